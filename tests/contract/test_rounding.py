"""Single precision and layers of odd sizes, whose products torch rounds by the alignment of their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedveil import METHODS, ArrayClients, Task
from fedveil.engines.simulation import Simulation
from fedveil.session.loop import run_rounds
from fedveil.tree import Params
from tests.contract.federation import distance, make_method, make_plan

COLUMNS, CLASSES = 13, 3
UNEQUAL = (20, 3, 11, 20, 7, 1, 16, 20, 9, 5, 13, 20, 2)
EQUAL = (20,) * 37  # chunks of neighbours, which train in the memory that the simulator reads


def regression() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(COLUMNS, CLASSES))


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(COLUMNS, 7), nn.ReLU(), nn.Linear(7, CLASSES))


def make_clients(sizes: tuple[int, ...]) -> ArrayClients:
    generator = torch.Generator().manual_seed(3)
    pairs: list[tuple[Tensor, Tensor]] = []
    for n in sizes:
        y = torch.randint(0, CLASSES, (n,), generator=generator)
        pairs.append((torch.randn(n, COLUMNS, generator=generator) + y[:, None], y))
    return ArrayClients.from_arrays(pairs)


def assert_workers_change_no_bit(
    name: str, model: Callable[[], nn.Module], sizes: tuple[int, ...], **fields: Any
) -> None:
    def trained(workers: int) -> Params:
        method, plan, task = make_method(name, **fields), make_plan(sizes, cohort=len(sizes)), Task(model)
        engine = Simulation(
            task, make_clients(sizes), method, plan, seed=0, execution="stacked", workers=workers
        )
        try:
            start = method.init_server(task.init(0), plan)
            return method.model(run_rounds(task, method, engine, plan, start, seed=0).server)
        finally:
            engine.close()

    alone = trained(1)
    assert all(leaf.dtype == torch.float32 for leaf in alone.values())
    assert distance(alone, trained(3)) == 0


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedveil.engines.simulation.cores", lambda: 4)  # on any machine four chunks


@pytest.mark.parametrize("name", sorted(METHODS))
def test_workers_change_no_bit_of_odd_layers(name: str) -> None:
    assert_workers_change_no_bit(name, network, UNEQUAL)


@pytest.mark.parametrize("model", [regression, network])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "udp-fedavg"])
def test_training_in_shared_memory_changes_no_bit_of_odd_layers(
    name: str, model: Callable[[], nn.Module]
) -> None:
    """Rows of the tables are not aligned, so such models train in memory of their own."""
    assert_workers_change_no_bit(name, model, EQUAL, batch_size=20)
