"""A node that sends more than clip and noise explain drops out of the round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")
from fedveil.federation.run_settings import LOG
from fedveil.methods.user_level import NoisyModel
from tests.engines.test_deployed_nodes import NODES, deployed, federated, write_nodes
from tests.engines.test_hostile import uploading


def boosted(factor: float) -> Callable[[bytes], bytes]:
    """The upload of a node that would rather decide the mean alone."""

    def change(data: bytes) -> bytes:
        up = NoisyModel.from_bytes(data)
        far = {name: leaf + factor * torch.ones_like(leaf) for name, leaf in up.params.items()}
        return NoisyModel(far, up.cohort).to_bytes()

    return change


def test_a_long_upload_is_refused_with_its_node_and_the_bound(tmp_path: Path) -> None:
    config = federated("udp-fedavg", cohort=NODES)
    faults = {1001: uploading(boosted(100.0))}
    result = deployed(config, write_nodes(tmp_path), tmp_path, faults=faults)
    assert [line["answered"] for line in result.history] == [2, 2]
    assert result.folder is not None
    lines = [line for line in (result.folder / LOG).read_text().splitlines() if "clip and noise" in line]
    assert len(lines) == 2
    assert all("client 1, node 'node-1' (1001), dropped out: its upload has norm" in line for line in lines)


@pytest.mark.parametrize("name", ["udp-fedavg", "fedceo", "ppsgd", "centaur", "dp-fedavg"])
def test_honest_nodes_are_never_refused_for_their_length(name: str, tmp_path: Path) -> None:
    result = deployed(federated(name, cohort=NODES, rounds=3), write_nodes(tmp_path), tmp_path)
    assert [line["answered"] for line in result.history] == [NODES] * 3
