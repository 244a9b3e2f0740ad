"""A run whose clients all refuse or drop out ends, says why, and claims no more than was released."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from flwr.app import Message

from fedveil.engines.flower.wire import REASONS
from fedveil.errors import FedveilError, NobodyAnsweredError
from fedveil.federation.launch import with_shape
from fedveil.federation.node import open_node
from fedveil.federation.run_settings import PROBLEM, RunSettings
from fedveil.methods import METHODS
from fedveil.session.results import ResultFolder
from tests.engines.grid import Fault
from tests.engines.test_deployed_nodes import NODES, deployed, federated, write_nodes

NO = {"methods": ["fedlap-dp"], "minimum_cohort": 1}


def from_round(first: int) -> Fault:
    """A node that answers until this round and then no more."""
    asked = 0

    def fault(message: Message, answer: Callable[[], Message]) -> Message | None:
        nonlocal asked
        asked += message.metadata.message_type.startswith("train")
        return answer() if asked < first else None

    return fault


def test_a_run_whose_nodes_all_refuse_ends_in_its_first_round_with_their_reasons(tmp_path: Path) -> None:
    config = federated("udp-fedavg", rounds=20)
    folders = write_nodes(tmp_path, policies=dict.fromkeys(range(NODES), NO))
    with pytest.raises(NobodyAnsweredError) as caught:
        deployed(config, folders, tmp_path)
    assert caught.value.round == 1
    assert sorted(caught.value.reasons) == [0, 1, 2]
    assert all(REASONS["policy"] in why for why in caught.value.reasons.values())
    settings = RunSettings(with_shape(config, None), 0, "test", tmp_path, None, "seeded")
    folder = ResultFolder(settings.folder)
    assert not folder.finished, "an untrained model is not a result"
    assert not folder.rounds()
    told = (settings.folder / PROBLEM).read_text()
    assert "node-1" in told, "whoever submitted the run is told who refused"
    assert "No round was completed" in told
    assert all(len(open_node(place).guard.ledger) == 0 for place in folders)


def test_a_run_without_answers_ends_and_resumes(tmp_path: Path) -> None:
    config = federated("udp-fedavg", rounds=4, cohort=NODES, deadline=0.5)
    folders = write_nodes(tmp_path)
    faults = {1000 + k: from_round(3) for k in range(NODES)}
    with pytest.raises(NobodyAnsweredError) as caught:
        deployed(config, folders, tmp_path, faults=faults)
    assert caught.value.round == 3
    assert "After 2 completed rounds" in str(caught.value)
    result = deployed(config, folders, tmp_path)
    assert [line["round"] for line in result.history] == [1, 2, 3, 4]
    assert [line["answered"] for line in result.history] == [NODES] * 4


def test_nodes_that_are_not_let_in_are_named_with_their_reasons(tmp_path: Path) -> None:
    folders = write_nodes(tmp_path)
    for folder in folders:
        (folder / "data.npz").write_bytes(b"damaged")
    with pytest.raises(FedveilError, match=f"node-2 refused: {REASONS['unavailable']}"):
        deployed(federated("fedavg"), folders, tmp_path)


def test_an_empty_poisson_cohort_is_a_round_like_any_other(tmp_path: Path) -> None:
    """Stopping would disclose that nobody was sampled."""
    config = federated("udp-fedavg", rounds=12, cohort=1, sampler="poisson")
    result = deployed(config, write_nodes(tmp_path), tmp_path)
    assert [line["round"] for line in result.history] == list(range(1, 13))
    assert 0 in [line["cohort"] for line in result.history], "some cohort was empty"


def test_too_few_answers_leave_the_model_as_it_was(tmp_path: Path) -> None:
    """`min_clients` is about few answers, not about none."""
    policies = {0: NO, 1: NO, 2: {"methods": sorted(METHODS), "minimum_cohort": 1}}
    config = federated("fedavg", cohort=NODES, min_clients=2)
    result = deployed(config, write_nodes(tmp_path, policies=policies), tmp_path)
    assert [line["answered"] for line in result.history] == [0, 0]
