"""DP-FedSGD against a step written out, and what it proves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedveil.data.client_data import ClientData
from fedveil.errors import InputError
from fedveil.experiment.config import make_config
from fedveil.methods.dp_fedsgd import DPFedSGD, NoisyGradient
from fedveil.methods.method import At
from fedveil.privacy.accounting import account
from fedveil.privacy.releases import Plan
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.tree import Params, with_axis

PLAN = Plan(2, 2, "all", 10, 6, 6)


def task() -> Task:
    return Task(lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)).double())


def data(change: float = 0.0) -> ClientData:
    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0, 2] += change
    return ClientData(x, torch.arange(12).reshape(2, 6) % 3, torch.tensor([6, 6]))


def upload(method: DPFedSGD, held: ClientData, round_: int = 1) -> tuple[Params, NoisyGradient]:
    start = task().init(0)
    at = At(PLAN, round_)
    down = method.broadcast(at, method.init_server(start, PLAN), (0, 1))
    up, _ = method.client_update(task(), at, down, held, {}, ClientStreams(0, round_, (0, 1)))
    return start, up


def test_without_noise_and_sampling_it_is_gradient_descent_with_momentum() -> None:
    method = DPFedSGD(noise_multiplier=0.0, clip=1e6, record_rate=1.0, lr=0.5, momentum=0.9)
    problem, held = task(), data()
    server = method.init_server(problem.init(0), PLAN)
    w, velocity = problem.init(0), {name: torch.zeros_like(leaf) for name, leaf in problem.init(0).items()}
    for round_ in (1, 2, 3):
        at = At(PLAN, round_)
        down = method.broadcast(at, server, (0, 1))
        up, _ = method.client_update(problem, at, down, held, {}, ClientStreams(0, round_, (0, 1)))
        server = method.server_update(problem, at, server, (0, 1), up, ServerStreams(0, round_))
        rows = {name: torch.cat([leaf, leaf]) for name, leaf in with_axis(w).items()}
        gradient = problem.grad(rows, held.everything())
        velocity = {name: 0.9 * leaf + gradient[name].mean(0) for name, leaf in velocity.items()}
        w = {name: leaf - 0.5 * velocity[name] for name, leaf in w.items()}
    for name, leaf in method.model(server).items():
        torch.testing.assert_close(leaf, w[name])


def test_one_record_moves_a_sum_by_no_more_than_the_clip() -> None:
    method = DPFedSGD(noise_multiplier=0.0, clip=0.3, record_rate=1.0)
    _, one = upload(method, data())
    _, other = upload(method, data(change=50.0))
    moved = torch.cat([(one.gradient[name] - other.gradient[name]).flatten(1) for name in one.gradient], 1)
    assert float(moved[0].norm()) * method.nominal_batch(PLAN) <= 2 * 0.3  # one record replaced
    assert float(moved[1].norm()) == 0


def test_the_divisor_does_not_depend_on_the_batch() -> None:
    method = DPFedSGD(record_rate=0.5, records=40)
    assert method.nominal_batch(PLAN) == 20
    assert DPFedSGD(record_rate=0.5).nominal_batch(PLAN) == 3


def test_clients_add_noise_of_their_own() -> None:
    method = DPFedSGD(noise_multiplier=2.0, clip=0.5, record_rate=0.01)
    draws = [upload(method, data(), round_)[1].gradient["1.weight"] for round_ in range(1, 200)]
    noise = torch.stack(draws)
    assert float(noise[:, 0].std()) == pytest.approx(1.0, rel=0.1)
    assert abs(float((noise[:, 0] * noise[:, 1]).mean())) < 0.1


def test_the_epsilon_of_the_recommended_setting() -> None:
    """100 rounds, rate 0.1, multiplier 1.977: epsilon 2.38 at delta 1e-5, for everybody."""
    plan = Plan(5, 5, "all", 100, 12000, 12000)
    rows = account(DPFedSGD(noise_multiplier=1.977).releases(plan), plan, 1e-5)
    assert {row.adversary for row in rows if row.unit == "record"} == {"server", "observer", "client"}
    for row in rows:
        assert row.epsilon == pytest.approx(2.38, abs=0.01)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"record_rate": 0.0}, "method.record_rate"),
        ({"record_rate": 1.5}, "method.record_rate"),
        ({"records": 5, "record_rate": 0.1}, "method.records"),
    ],
)
def test_impossible_batches_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as refusal:
        make_config({"method": {"name": "dp-fedsgd"} | fields})
    assert refusal.value.field == field
