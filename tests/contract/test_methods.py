"""What every registered method keeps to. A method added to the registry is tested here without a new test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil import METHODS, At, Task, run
from fedveil.engines.simulation import Execution, Simulation
from fedveil.engines.worker import ClientWorker
from fedveil.messages import Message, Record
from fedveil.methods.method import AnyMethod, Method, field_names
from fedveil.privacy.accounting import account
from fedveil.privacy.releases import GaussianNoise, RandomGaussianNoise
from fedveil.session.loop import run_rounds
from fedveil.streams import ServerStreams
from fedveil.tree import Params
from tests.contract.federation import (
    BASELINES,
    WHOLE_UPDATE,
    Scaled,
    StopsAfter,
    distance,
    make_clients,
    make_method,
    make_plan,
    make_task,
)

pytestmark = pytest.mark.parametrize("name", sorted(METHODS))


def train(
    method: AnyMethod,
    *,
    seed: int = 0,
    execution: Execution = "stacked",
    workers: int = 1,
    generic: bool = False,
    sizes: tuple[int, ...] = (5, 9, 1, 12, 7),
    cohort: int = 3,
) -> Params:
    task, clients, plan = make_task(generic=generic), make_clients(sizes), make_plan(sizes, cohort)
    engine = Simulation(task, clients, method, plan, seed=seed, execution=execution, workers=workers)
    try:
        start = method.init_server(task.init(seed), plan)
        return method.model(run_rounds(task, method, engine, plan, start, seed=seed).server)
    finally:
        engine.close()


def test_stacked_equals_one_by_one(name: str) -> None:
    method = make_method(name)
    assert distance(train(method), train(method, execution="one-by-one")) < 1e-9


def test_a_client_without_examples_can_be_alone(name: str) -> None:
    """As on a node of its own; and it changes as little as it does in a stack."""
    method, sizes = make_method(name), (5, 0, 1, 12, 7)
    alone = train(method, execution="one-by-one", sizes=sizes, cohort=5)
    assert all(bool(leaf.isfinite().all()) for leaf in alone.values())
    assert distance(train(method, sizes=sizes, cohort=5), alone) < 1e-9


def test_any_network_gives_what_the_closed_form_gives(name: str) -> None:
    method = make_method(name)
    closed = train(method)
    generic = train(method, generic=True)
    assert distance(closed, {key.removeprefix("inner."): leaf for key, leaf in generic.items()}) < 1e-9


def test_a_parameter_may_be_a_single_number(name: str) -> None:
    """A temperature, say: for K clients it is a line of K numbers, without an axis of its own."""
    method = make_method(name, **WHOLE_UPDATE.get(name, {}))
    result = run(Task(Scaled), make_clients(), method, rounds=1, workers=1, noise="seeded")
    assert result.model["scale"].shape == ()
    assert float(result.model["scale"]) != 1


def test_steps_may_be_counted_in_place_of_epochs(name: str) -> None:
    if "local_steps" not in field_names(METHODS[name]):
        pytest.skip("does not train locally by SGD")
    sizes = (12, 12, 12)
    by_epochs = train(make_method(name, epochs=2), sizes=sizes, cohort=2)  # of three batches each
    assert distance(by_epochs, train(make_method(name, local_steps=6), sizes=sizes, cohort=2)) == 0
    assert distance(by_epochs, train(make_method(name, local_steps=4), sizes=sizes, cohort=2)) > 0


def test_workers_change_no_bit(name: str) -> None:
    method = make_method(name)
    assert distance(train(method), train(method, workers=2)) == 0


def test_seed_decides_every_bit(name: str) -> None:
    method = make_method(name)
    assert distance(train(method, seed=1), train(method, seed=1)) == 0
    assert distance(train(method, seed=1), train(method, seed=2)) > 0


def exchange(method: AnyMethod, cohort: Sequence[int] = (0, 1, 3)) -> tuple[Any, Message, Message, Any]:
    """The server, what it sends, what comes back, and the clients' states, of the first exchange."""
    task, clients, plan = make_task(), make_clients(), make_plan()
    server = method.init_server(task.init(0), plan)
    at = At(plan, 1)
    down = method.broadcast(at, server, cohort)
    up, states = ClientWorker(task, clients, method, 0).update(cohort, down, {}, at)
    return server, down, up, states


def copies(record: Record) -> dict[str, torch.Tensor]:
    return {key: leaf.clone() for key, leaf in record.tensors().items()}


def unchanged(record: Record, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(leaf, before[key]) for key, leaf in record.tensors().items())


def test_inputs_are_not_changed(name: str) -> None:
    method = make_method(name)
    task, clients, plan = make_task(), make_clients(), make_plan()
    x, y = clients.x.clone(), clients.y.clone()
    server, down, up, states = exchange(method)
    sent, known = copies(down), {c: {k: v[i] for k, v in states.items()} for i, c in enumerate((0, 1, 3))}
    kept = {c: {k: v.clone() for k, v in state.items()} for c, state in known.items()}
    ClientWorker(task, clients, method, 0).update((0, 1, 3), down, known, At(plan, 2))
    assert unchanged(down, sent)
    assert all(torch.equal(known[c][k], kept[c][k]) for c in known for k in known[c])
    had, got = copies(server), copies(up)
    method.server_update(task, At(plan, 1), server, (0, 1, 3), up, ServerStreams(0, 1))
    assert unchanged(server, had)
    assert unchanged(up, got)
    assert torch.equal(clients.x, x)
    assert torch.equal(clients.y, y)


def test_messages_survive_the_wire(name: str) -> None:
    method = make_method(name)
    server, down, up, _ = exchange(method)
    for record, kind in (
        (server, method.server_type),
        (down, method.down_type),
        (up, method.up_type),
    ):
        back = kind.from_bytes(record.to_bytes())
        assert back.scalars() == record.scalars()
        assert back.tensors().keys() == record.tensors().keys()
        assert all(torch.equal(leaf, back.tensors()[key]) for key, leaf in record.tensors().items())


def test_uploads_have_a_row_per_client(name: str) -> None:
    _, _, up, states = exchange(make_method(name))
    assert up.count == 3
    assert all(leaf.shape[0] == 3 for leaf in up.tensors().values())
    assert all(leaf.shape[0] == 3 for leaf in states.values())


def test_without_noise_and_clip_it_is_its_baseline(name: str) -> None:
    fields = set(field_names(METHODS[name]))
    if not {"noise_multiplier", "clip"} <= fields:
        assert name not in BASELINES
        return
    if name not in BASELINES:  # only personalised methods privatise something that has no name of its own
        unnamed = (
            f"name in BASELINES (tests/contract/federation.py) what {name} is without noise and clipping"
        )
        assert METHODS[name].personal_model is not Method.personal_model, unnamed
        return
    baseline, changes = BASELINES[name]
    bare = train(make_method(name, noise_multiplier=0.0, clip=math.inf, **WHOLE_UPDATE.get(name, {})))
    assert distance(bare, train(make_method(baseline, **changes))) < 1e-9


def test_one_client_with_one_example(name: str) -> None:
    model = train(make_method(name), sizes=(1,), cohort=1)
    assert all(bool(torch.isfinite(leaf).all()) for leaf in model.values())


def test_a_round_without_participants(name: str) -> None:
    """An empty round of a method that declares noise on its aggregate releases that noise, and only that."""
    method = make_method(name)
    task, plan = make_task(), make_plan(sampler="poisson")
    server = method.init_server(task.init(0), plan)
    after = method.server_update(task, At(plan, 1), server, (), None, ServerStreams(0, 1))
    moved = distance(method.model(server), method.model(after))
    kinds = (GaussianNoise, RandomGaussianNoise)  # the kinds that a server tops up
    sums = [
        r for r in method.releases(plan) if "server" not in r.visible_to and isinstance(r.protection, kinds)
    ]
    assert math.isfinite(moved)
    assert (moved > 0) == bool(sums)


def test_every_disclosure_is_accounted_for_or_refused_with_a_reason(name: str) -> None:
    plan = make_plan()
    rows = account(make_method(name).releases(plan), plan, 1e-5)
    assert {row.adversary for row in rows} == {"server", "observer", "client"}
    for row in rows:
        assert (row.epsilon is None) == bool(row.reason)
        assert row.epsilon is None or (row.epsilon > 0 and row.theorem)


def test_an_interrupted_run_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    method = make_method(name)
    task, clients = make_task(), make_clients()
    whole = run(
        task, clients, method, rounds=5, cohort=3, results=tmp_path / "whole", workers=1, noise="seeded"
    )
    for stop in (2, 4):
        with pytest.raises(KeyboardInterrupt):
            run(
                task,
                clients,
                method,
                rounds=5,
                cohort=3,
                results=tmp_path / "cut",
                workers=1,
                noise="seeded",
                callbacks=[StopsAfter(stop)],
            )
    resumed = run(
        task, clients, method, rounds=5, cohort=3, results=tmp_path / "cut", workers=1, noise="seeded"
    )
    assert distance(whole.model, resumed.model) == 0
    assert [line["round"] for line in resumed.history] == [1, 2, 3, 4, 5]
    assert resumed.summary["bytes_up"] == whole.summary["bytes_up"]
