"""Deployed nodes in this process: their own folders decide, whatever the server's configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch

pytest.importorskip("flwr")
from flwr.app import Context, Message, RecordDict

from fedveil.config import Config, make_config
from fedveil.deploy.node import open_node
from fedveil.errors import FedveilError, InputError
from fedveil.experiment import prepare, run_seed
from fedveil.flower_app.client import app as client_app
from fedveil.flower_app.launch import with_shape
from fedveil.flower_app.server import app as server_app
from fedveil.flower_app.settings import LOG, RunSettings
from fedveil.methods import METHODS
from fedveil.privacy.ledger import Ledger
from fedveil.results import Result, ResultFolder
from fedveil.streams import NoiseSource
from tests.contract.federation import distance
from tests.engines.configs import COMPARED, quick_config
from tests.engines.grid import Fault, InMemoryNodes

NODES = 3


def write_nodes(
    place: Path, *, seeded: bool = True, policies: Mapping[int, object] | None = None
) -> list[Path]:
    """A folder for each client, with the examples that the simulator would give to it."""
    clients = prepare(quick_config("fedavg", clients=NODES), 0).clients
    folders = []
    for client in range(NODES):
        folder = place / f"node-{client}"
        folder.mkdir(parents=True)
        data = clients.load([client])
        np.savez(folder / "data.npz", x=data.x[0].numpy(), y=data.y[0].numpy())
        node = {
            "name": f"node-{client}",
            "client": client,
            "data": {"reader": "npz", "path": "data.npz"},
            "testing": {"seeded_noise": seeded},
        }
        (folder / "node.toml").write_text(tomli_w.dumps(node))
        policy = (policies or {}).get(client, {"methods": sorted(METHODS), "minimum_cohort": 1})
        assert isinstance(policy, dict)
        (folder / "policy.toml").write_text(tomli_w.dumps(policy))
        folders.append(folder)
    return folders


def deployed(
    config: Config,
    folders: Sequence[Path],
    results: Path,
    *,
    noise: NoiseSource | None = "seeded",
    faults: Mapping[int, Fault] | None = None,
) -> Result:
    settings = RunSettings(with_shape(config, None), 0, "test", results, None, noise)
    given = settings.to_run_config()
    grid = InMemoryNodes(client_app, [{"fedveil-node": str(folder)} for folder in folders], given, faults)
    server_app(grid, Context(1, 1, {}, RecordDict(), dict(given)))
    return ResultFolder(settings.folder).read()


def federated(name: str, **run: object) -> Config:
    return quick_config(name, "flower", clients=NODES, **run)


@pytest.mark.parametrize("name", COMPARED)
def test_nodes_with_their_own_data_give_the_simulators_bits(name: str, tmp_path: Path) -> None:
    here = run_seed(quick_config(name, clients=NODES), 0, experiment="test", results=tmp_path)
    there = deployed(federated(name), write_nodes(tmp_path), tmp_path)
    assert distance(here.model, there.model) == 0
    assert there.summary["privacy"] == here.summary["privacy"]
    assert "per_client" not in there.summary, "the server cannot score what it does not hold"


def test_nodes_and_server_draw_noise_that_nobody_can_repeat(tmp_path: Path) -> None:
    config = federated("udp-fedavg")
    models = [
        deployed(config, write_nodes(tmp_path / f"{i}", seeded=False), tmp_path / f"r{i}", noise=None).model
        for i in range(2)
    ]
    assert distance(*models) > 1e-3


def test_a_seed_from_the_server_does_not_make_a_nodes_noise_predictable(tmp_path: Path) -> None:
    """The server may seed its own noise; the nodes do not follow."""
    config = federated("udp-fedavg", rounds=1)
    models = [
        deployed(
            config, write_nodes(tmp_path / f"{i}", seeded=False), tmp_path / f"r{i}", noise="seeded"
        ).model
        for i in range(2)
    ]
    assert distance(*models) > 1e-3


def test_a_node_whose_policy_says_no_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    folders = write_nodes(tmp_path, policies={1: {"methods": ["fedlap-dp"], "minimum_cohort": 1}})
    result = deployed(federated("fedavg"), folders, tmp_path)
    assert [line["answered"] for line in result.history] == [2, 2]
    assert result.folder is not None
    log = (result.folder / LOG).read_text()
    assert "client 1, node 'node-1' (1001), is left out: refused: node node-1 refuses round 1" in log
    assert len(open_node(folders[1]).guard.ledger) == 0
    assert len(open_node(folders[0]).guard.ledger) > 0


def test_a_node_never_takes_the_servers_data(tmp_path: Path) -> None:
    """Whatever data set the server names, each node trains on what its own file names."""
    folders = write_nodes(tmp_path)
    one = deployed(federated("fedavg"), folders, tmp_path / "one")
    for folder in folders:
        with np.load(folder / "data.npz") as held:
            np.savez(folder / "data.npz", x=held["x"][:, :, ::-1], y=held["y"])
    other = deployed(federated("fedavg"), folders, tmp_path / "other")
    assert distance(one.model, other.model) > 0


def test_a_node_without_a_folder_has_no_place_in_a_federation(tmp_path: Path) -> None:
    settings = RunSettings(with_shape(federated("fedavg"), None), 0, "test", tmp_path, None, "seeded")
    given = settings.to_run_config()
    grid = InMemoryNodes(client_app, [{"partition-id": p} for p in range(NODES)], given)
    with pytest.raises(FedveilError, match="0 of 3 nodes are here"):
        server_app(grid, Context(1, 1, {}, RecordDict(), dict(given)))


def test_a_model_of_texts_is_refused_before_anything_is_submitted() -> None:
    config = make_config(
        {
            "task": {"model": "lstm", "dataset": "none", "input_shape": [8], "classes": 2},
            "partition": {"clients": 2},
            "run": {"engine": "flower"},
        }
    )
    with pytest.raises(InputError, match="nodes hold images and tables"):
        with_shape(config, None)


def test_a_server_that_dies_goes_on_and_every_attempt_is_charged(tmp_path: Path) -> None:
    """Deployed nodes draw fresh noise, so what a dead server asked for is spent, and spent again."""
    config = federated("scaffold", rounds=4, cohort=3, checkpoint_every=2)
    folders = write_nodes(tmp_path, seeded=False)
    left = 8  # orders: rounds 1 and 2, then two of round 3

    def dying(message: Message, answer: Callable[[], Message]) -> Message:
        nonlocal left
        reply = answer()
        left -= message.metadata.message_type.startswith("train")
        if left == 0:
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        deployed(config, folders, tmp_path, noise=None, faults=dict.fromkeys(range(1000, 1003), dying))
    result = deployed(config, folders, tmp_path, noise=None)
    assert [line["round"] for line in result.history] == [1, 2, 3, 4]
    assert all(bool(torch.isfinite(leaf).all()) for leaf in result.model.values())
    assert result.folder is not None
    own = [entry.round for entry in Ledger(result.folder / "ledger.jsonl").entries]
    assert own.count(3) == 2 * own.count(1), "round 3 was begun twice"
    twice = 0
    for folder in folders:
        spent = [entry.round for entry in open_node(folder).guard.ledger.entries]
        assert set(spent) == {1, 2, 3, 4}
        twice += spent.count(3) == 2 * spent.count(1)
    assert twice == 2, "the two nodes that had answered"
