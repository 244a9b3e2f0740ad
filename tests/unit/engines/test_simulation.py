from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass as record
from typing import Literal

import pytest
import torch
from torch import nn

from fedveil import At, Task
from fedveil.data.client_data import ArrayClients, ClientData
from fedveil.engines.pool import Pool
from fedveil.engines.shared_memory import Leaf, SharedMemory, layout
from fedveil.engines.simulation import Simulation, cores
from fedveil.errors import FedveilError
from fedveil.methods.fedavg import FedAvg, TrainedModel
from fedveil.methods.fedem import FedEM
from fedveil.methods.fedsgd import FedSGD
from fedveil.methods.shared_model import Model
from fedveil.models.registry import make_model
from fedveil.streams import ClientStreams
from fedveil.tree import State
from tests.contract.federation import SIZES, distance, make_clients, make_plan, make_task
from tests.refusals import refuses


@record(frozen=True)
class Failing(FedAvg):
    how: str = "error"

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[TrainedModel, State]:
        if 3 in rng.clients:
            if self.how == "error":
                raise FedveilError("client 3 has a problem")
            if self.how == "crash":
                raise ZeroDivisionError("a bug")
            os._exit(9)
        return FedAvg.client_update(self, task, at, down, data, state, rng)


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("error", FedveilError, "client 3 has a problem"),  # the text of `Failing`
        ("crash", RuntimeError, "ZeroDivisionError: a bug"),
        ("die", FedveilError, "run.workers"),
    ],
)
def test_errors_in_a_worker_are_reported(how: str, kind: type[Exception], said: str) -> None:
    task, plan = make_task(), make_plan(cohort=5)
    method = Failing(batch_size=4)
    object.__setattr__(method, "how", how)
    engine = Simulation(task, make_clients(), method, plan, seed=0, workers=2)
    at = At(plan, 1)
    down = method.broadcast(at, method.init_server(task.init(0), plan), range(5))
    try:
        with pytest.raises(kind) as caught:
            engine.exchange(range(5), down, at)
        assert said in (str(caught.value) + getattr(caught.value, "field", ""))
    finally:
        engine.close()


@pytest.mark.parametrize("asleep", [False, True], ids=["idle", "with an order unread"])
def test_a_killed_worker_is_reported_at_every_stage(asleep: bool) -> None:
    """As the system does when memory runs out."""
    task, plan, method = make_task(), make_plan(cohort=5), FedAvg(batch_size=4)
    engine = Simulation(task, make_clients(), method, plan, seed=0, workers=2)
    assert isinstance(engine._workers, Pool)
    victim = engine._workers._processes[0]
    assert victim.pid is not None
    at = At(plan, 1)
    down = method.broadcast(at, method.init_server(task.init(0), plan), range(5))
    if asleep:
        os.kill(victim.pid, signal.SIGSTOP)
        threading.Timer(0.2, victim.kill).start()
    else:
        victim.kill()
        victim.join()
    try:
        with refuses("run.workers", FedveilError):
            engine.exchange(range(5), down, at)
    finally:
        engine.close()


def test_what_the_server_keeps_is_not_overwritten_by_the_next_exchange() -> None:
    task, plan, method = make_task(), make_plan(cohort=5), FedAvg(batch_size=4)
    engine = Simulation(task, make_clients(), method, plan, seed=0, workers=2)
    server = method.init_server(task.init(0), plan)
    try:
        up = engine.exchange(range(5), method.broadcast(At(plan, 1), server, range(5)), At(plan, 1)).up
        assert isinstance(up, TrainedModel)
        kept = engine.own(up)
        copy = {name: leaf.clone() for name, leaf in up.params.items()}
        engine.exchange(range(5), method.broadcast(At(plan, 2), server, range(5)), At(plan, 2))
        assert distance(kept.params, copy) == 0
        assert distance(up.params, copy) > 0
    finally:
        engine.close()


@pytest.mark.parametrize("memory", [1, 10_000, None])
def test_memory_limits_the_chunks_and_not_the_result(memory: int | None) -> None:
    task, plan, method = make_task(), make_plan(cohort=5), FedAvg(batch_size=4)
    results = []
    for limit in (None, memory):
        engine = Simulation(
            task, make_clients(), method, plan, seed=0, workers=1, execution="stacked", max_memory=limit
        )
        down = method.broadcast(At(plan, 1), method.init_server(task.init(0), plan), range(5))
        up = engine.exchange(range(5), down, At(plan, 1)).up
        assert isinstance(up, TrainedModel)
        results.append(up)
    assert distance(results[0].params, results[1].params) < 1e-12
    assert results[0].size.tolist() == list(SIZES)


def test_convolutions_run_one_by_one_and_agree_with_the_stack() -> None:
    def net() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 2), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4, 3)
        ).double()

    task, plan, method = Task(net), make_plan(cohort=5), FedAvg(batch_size=4, epochs=2)
    ups = []
    executions: Sequence[str] = ("auto", "stacked")
    for execution in executions:
        engine = Simulation(
            task,
            make_clients(),
            method,
            plan,
            seed=0,
            workers=1,
            execution="auto" if execution == "auto" else "stacked",
        )
        down = method.broadcast(At(plan, 1), method.init_server(task.init(0), plan), range(5))
        up = engine.exchange(range(5), down, At(plan, 1)).up
        assert isinstance(up, TrainedModel)
        ups.append(up)
    assert distance(ups[0].params, ups[1].params) < 1e-12


def test_an_arena_holds_tables_of_any_kind() -> None:
    memory = SharedMemory(1 << 16)
    tensors = {
        "a": torch.arange(6).reshape(3, 2),
        "b": torch.tensor([True, False, True]),
        "c": torch.randn(3, 4, dtype=torch.float64),
        "d": torch.zeros(3, 0),
    }
    leaves = [Leaf.from_json(leaf.to_json()) for leaf in layout(tensors)]
    assert memory.fits(leaves)
    for leaf in leaves:
        memory.view(leaf).copy_(tensors[leaf.name])
    assert all(torch.equal(memory.view(leaf), tensors[leaf.name]) for leaf in leaves)
    assert memory.holds(memory.view(leaves[2]))
    assert not memory.holds(tensors["c"])
    assert not memory.fits(layout({"big": torch.zeros(1 << 17)}))


class Counting(ArrayClients):
    """Counts how often clients' examples are gathered."""

    loads = 0

    def load(self, clients: Sequence[int]) -> ClientData:
        self.loads += 1
        return super().load(clients)


@pytest.mark.parametrize("kept", [1 << 28, 0], ids=["kept", "too large to keep"])
def test_examples_are_gathered_once_a_round(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedveil.engines.worker._MOST_KEPT", kept)
    plain = make_clients()
    clients = Counting(plain.x, plain.y, plain.parts)
    task, plan, method = make_task(), make_plan(cohort=5), FedSGD(batch_size=4)
    engine = Simulation(task, clients, method, plan, seed=0, workers=1, execution="stacked")
    server = method.init_server(task.init(0), plan)
    for number in (1, 2):
        for exchange in range(method.exchanges(plan)):
            at = At(plan, number, exchange)
            engine.exchange(range(5), method.broadcast(at, server, range(5)), at)
    chunks = 2 * len(engine._chunks(range(5)))
    assert clients.loads == (chunks if kept else chunks * method.exchanges(plan))


def small_images(sizes: Sequence[int]) -> ArrayClients:
    generator = torch.Generator().manual_seed(2)
    pairs = [
        (torch.rand(n, 1, 12, 12, generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in sizes
    ]
    return ArrayClients.from_arrays(pairs)


@pytest.mark.parametrize(
    "method", [FedSGD(batch_size=4), FedEM(batch_size=4, perturbation_steps=3), FedEM(batch_size=4, block=2)]
)
def test_gradients_computed_together_are_those_of_each_client_alone(method: FedSGD | FedEM) -> None:
    """In single precision, bit for bit: on few workers or many, in any order, stacked or one by one."""
    sizes = (9, 4, 7, 9, 2)
    task = Task(lambda: make_model("lenet-zhu", (1, 12, 12), 3))
    assert method.computes_together(task)
    clients, plan = small_images(sizes), make_plan(sizes, cohort=5, rounds=2)
    down = method.broadcast(At(plan, 1), method.init_server(task.init(0), plan), range(5))
    found = []
    ways: tuple[tuple[tuple[int, ...], Literal["auto", "stacked", "one-by-one"], int], ...] = (
        ((0, 1, 2, 3, 4), "one-by-one", 1),
        ((0, 1, 2, 3, 4), "auto", 1),
        ((3, 1, 4, 0, 2), "stacked", 1),
        ((0, 1, 2, 3, 4), "stacked", 2),
    )
    for order, execution, workers in ways:
        engine = Simulation(task, clients, method, plan, seed=0, execution=execution, workers=workers)
        uploads = []
        for exchange in range(method.exchanges(plan)):
            up = engine.exchange(order, down, At(plan, 1, exchange)).up
            assert up is not None
            uploads.append(engine.own(up).rows([order.index(client) for client in range(5)]).tensors())
        found.append(uploads)
        engine.close()
    for uploads in found[1:]:
        for one, other in zip(uploads, found[0], strict=True):
            assert all(torch.equal(leaf, other[name]) for name, leaf in one.items())


def test_an_exchange_of_little_work_needs_no_worker() -> None:
    """What counts is the work of one exchange: its workers wait for each other at the end."""
    task = Task(lambda: make_model("lenet-zhu", (1, 12, 12), 3))
    clients, plan = small_images([3000] * 4), make_plan((3000,) * 4, cohort=4)
    few, many = FedSGD(batch_size=8), FedEM(batch_size=8, perturbation_steps=1000)
    for method, alone in ((few, True), (many, cores() == 1)):
        engine = Simulation(task, clients, method, plan, seed=0)
        assert (engine._workers is None) == alone
        engine.close()
