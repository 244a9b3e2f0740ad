from __future__ import annotations

from pathlib import Path

import torch

import fedveil
from fedveil import ArrayClients, Task, make_model
from fedveil.data.client_data import digest_of
from fedveil.methods.udp_fedavg import UDPFedAvg


def with_an_empty_client() -> ArrayClients:
    x, y = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    return ArrayClients(x, y, [torch.arange(3), torch.arange(0), torch.arange(3, 6)])


def test_an_empty_client_has_a_digest_of_its_place() -> None:
    clients = with_an_empty_client()
    moved = ArrayClients(clients.x, clients.y, [torch.arange(0), torch.arange(3), torch.arange(3, 6)])
    assert digest_of(clients, None) == digest_of(with_an_empty_client(), None)
    assert digest_of(clients, None) != digest_of(moved, None)


def test_a_federation_with_an_empty_client_trains(tmp_path: Path) -> None:
    method = UDPFedAvg(lr=0.1, clip=1.0, noise_multiplier=1.0)
    task = Task(lambda: make_model("logistic", (2,), 2))
    result = fedveil.run(
        task, with_an_empty_client(), method, rounds=2, sampler="all", results=tmp_path / "run"
    )
    assert len(result.history) == 2
