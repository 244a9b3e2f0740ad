"""The noise of a private sum is the declared noise, however many clients participate and answer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fedveil import At, Plan
from fedveil.audits.of_method import canary_clients, canary_task
from fedveil.engines.worker import ClientWorker
from fedveil.experiment.config import build_method
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.privacy.private_sum import CohortNoise, private_sum
from fedveil.privacy.releases import GaussianNoise, RandomGaussianNoise
from fedveil.streams import ServerStreams, named_stream

PLAN = Plan(100, 10, "poisson", 5)


@pytest.mark.parametrize("scope", ["shared", "local", "central"])
@pytest.mark.parametrize(("cohort", "answered"), [(0, 0), (3, 3), (10, 10), (10, 7), (25, 25), (25, 4)])
def test_uploads_and_top_up_make_the_declared_noise(scope: Any, cohort: int, answered: int) -> None:
    noise = CohortNoise(2.0, 1.5, scope, PLAN)
    total = math.sqrt(answered * noise.upload(cohort).std ** 2 + noise.top_up(answered, cohort).std ** 2)
    assert total == pytest.approx(noise.total(cohort).std)
    if scope != "local":
        assert total == pytest.approx(3.0)  # whoever participated: its size discloses nothing


@pytest.mark.parametrize(("cohort", "answered"), [(0, 0), (4, 4), (30, 30), (30, 12)])
def test_the_mean_carries_that_noise(cohort: int, answered: int) -> None:
    start = {"w": torch.zeros(40_000, dtype=torch.float64)}
    noise = CohortNoise(1.0, 2.0, "shared", PLAN)
    share = noise.upload(cohort).std
    generator = torch.Generator().manual_seed(cohort)
    up = None
    if answered:
        up = {"w": share * torch.randn(answered, 40_000, generator=generator, dtype=torch.float64)}
    top_up = noise.top_up(answered, cohort)
    summed = private_sum(up, start, answered, PLAN, top_up, named_stream(0))
    moved = summed.added_to(start)["w"] * PLAN.cohort  # divided by the constant pN
    assert float(moved.std()) == pytest.approx(2.0, rel=0.02)


def test_the_cohort_size_is_announced_and_repeated() -> None:
    method = UDPFedAvg()
    server = method.init_server({"w": torch.zeros(2)}, PLAN)
    assert method.broadcast(At(PLAN, 1), server, range(17)).cohort == 17


def test_what_is_declared_for_whom() -> None:
    upload, mean = UDPFedAvg(noise_multiplier=3.0).releases(PLAN)
    assert isinstance(upload.protection, RandomGaussianNoise)
    assert max(upload.protection.multipliers) == pytest.approx(3.0 / math.sqrt(10))
    assert mean.protection == GaussianNoise(3.0)
    assert mean.participation == "hidden"
    assert isinstance(mean.insider, RandomGaussianNoise)
    assert min(mean.insider.multipliers) == pytest.approx(3.0 * math.sqrt(0.9))
    local = UDPFedAvg(noise_multiplier=3.0, noise_scope="local").releases(PLAN)[1]
    assert local.participation == "seen"  # its noise grows with the cohort
    assert isinstance(local.protection, RandomGaussianNoise)
    fixed = UDPFedAvg(noise_multiplier=3.0).releases(Plan(100, 4, "fixed", 5))
    assert fixed[0].protection == GaussianNoise(1.5)
    assert isinstance(fixed[1].insider, GaussianNoise)
    assert fixed[1].insider.multiplier == pytest.approx(3.0 * math.sqrt(0.75))
    assert UDPFedAvg().releases(Plan(100, 1, "fixed", 5))[1].insider is None


def test_large_cohorts_are_declared_in_few_groups_and_never_with_more_noise() -> None:
    plan = Plan(100_000, 1000, "poisson", 5)
    upload = UDPFedAvg().releases(plan)[0].protection
    assert isinstance(upload, RandomGaussianNoise)
    assert len(upload.weights) <= 48
    assert min(upload.multipliers) <= 1 / math.sqrt(1290)
    assert upload.failure < 1e-12  # what rounding leaves of the sum of the probabilities


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("udp-fedavg", {"noise_scope": "local"}),
        ("dp-fedavg", {"noise_scope": "local"}),
        ("dp-fedags-proven", {"variant": "everywhere"}),
        ("dp-fedags-proven", {"variant": "public-mask", "selected": 1.0}),
    ],
)
def test_who_does_not_answer_takes_no_noise_from_a_sum_of_local_noise(
    name: str, fields: dict[str, Any]
) -> None:
    """Of six participants (three were expected) two answer; the sum still has the noise of six."""
    method = build_method({"name": name, "lr": 1.0, "noise_multiplier": 3.0} | fields)
    plan = Plan(8, 3, "poisson", 200, 1, 1)
    task = canary_task(400)
    worker = ClientWorker(task, canary_clients(8, (), 400), method, 0)
    server = method.init_server(task.init(0), plan)
    seen = []
    for number in range(1, 30):
        at = At(plan, number)
        up, _ = worker.update((1, 4), method.broadcast(at, server, range(6)).rows([0]), {}, at)
        after = method.server_update(task, at, server, (1, 4), up, ServerStreams(0, number))
        seen.append(next(iter(method.model(after).values())).flatten())
    assert float(torch.cat(seen).std()) * 3 == pytest.approx(3.0 * math.sqrt(6), rel=0.03)
