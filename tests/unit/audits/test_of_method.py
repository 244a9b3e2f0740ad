"""Audits of whole methods: sound ones pass, broken ones are found, and chance alone raises no alarm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedveil import METHODS, Plan
from fedveil.audits.bits import KIND
from fedveil.audits.canaries import declared_p_value, independence_p_value
from fedveil.audits.findings import ALARM
from fedveil.audits.of_method import audit_method
from fedveil.data.client_data import ClientData
from fedveil.methods.fedlap import FedLAPDP
from fedveil.methods.method import AnyMethod, At
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.methods.user_level import CohortModel, NoisyModel
from fedveil.privacy.mechanisms import gaussian
from fedveil.privacy.releases import Sampler
from fedveil.streams import ClientStreams, named_stream
from fedveil.task import Task
from fedveil.training.surrogate import Loops, RealGradients
from fedveil.tree import State

PLAN = Plan(20, 5, "fixed", 20, 5, 5)
DELTA = 1e-5
SAMPLES = 400


PRIVATE = ("centaur", "cpsgd", "dp-fedags-proven", "dp-fedavg", "fedceo", "ppsgd", "udp-fedavg")


class Weakened(UDPFedAvg):
    """A method whose code does not do what its releases declare."""

    def weak(self, rng: ClientStreams) -> tuple[UDPFedAvg, ClientStreams]:
        raise NotImplementedError

    def client_update(
        self, task: Task, at: At, down: CohortModel, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[NoisyModel, State]:
        method, streams = self.weak(rng)
        return method.client_update(task, at, down, data, state, streams)


class TenthOfTheNoise(Weakened):
    def weak(self, rng: ClientStreams) -> tuple[UDPFedAvg, ClientStreams]:
        return UDPFedAvg(noise_multiplier=self.noise_multiplier / 10), rng


class NoClipping(Weakened):
    def weak(self, rng: ClientStreams) -> tuple[UDPFedAvg, ClientStreams]:
        return UDPFedAvg(clip=1e4, noise_multiplier=self.noise_multiplier / 1e4), rng


class OneNoiseForAllClients(Weakened):
    def weak(self, rng: ClientStreams) -> tuple[UDPFedAvg, ClientStreams]:
        return UDPFedAvg(), replace(rng, clients=(0,) * len(rng.clients))


class OneNoiseForAllRounds(Weakened):
    def weak(self, rng: ClientStreams) -> tuple[UDPFedAvg, ClientStreams]:
        return UDPFedAvg(), replace(rng, round=1)


def findings(method: AnyMethod, plan: Plan = PLAN, seed: int = 0) -> dict[str, Any]:
    found = audit_method(method, plan, delta=DELTA, seed=seed, samples=SAMPLES)
    return {audited.adversary: audited for audited in found if audited.finding.kind != KIND}


@pytest.mark.parametrize("name", PRIVATE)
def test_methods_stay_below_what_is_proven(name: str) -> None:
    found = findings(METHODS[name]())
    assert found
    for audited in found.values():
        assert audited.proven is not None
        assert audited.finding.lower_bound <= audited.proven
        assert not audited.broken


@pytest.mark.parametrize(
    ("sampler", "scope"), [("poisson", "shared"), ("poisson", "local"), ("all", "shared")]
)
def test_a_sound_method_passes_under_every_sampler(sampler: Sampler, scope: Any) -> None:
    plan = replace(PLAN, sampler=sampler, cohort=20 if sampler == "all" else 5)
    for audited in findings(UDPFedAvg(noise_scope=scope), plan).values():
        assert not audited.broken
        assert audited.finding.p_value is not None


@pytest.mark.parametrize("seed", [10, 20])
def test_a_sound_method_passes_with_every_seed(seed: int) -> None:
    found = findings(UDPFedAvg(), seed=seed)
    assert set(found) == {"server", "observer"}
    assert not any(audited.broken for audited in found.values())


@pytest.mark.parametrize("broken", [TenthOfTheNoise, NoClipping])
@pytest.mark.parametrize("sampler", ["fixed", "poisson"])
def test_too_little_noise_and_missing_clipping_are_detected(
    broken: Callable[[], AnyMethod], sampler: Sampler
) -> None:
    for audited in findings(broken(), replace(PLAN, sampler=sampler)).values():
        assert audited.broken
        assert audited.finding.p_value < 1e-6
        assert audited.to_json()["broken"] is True


@pytest.mark.parametrize("broken", [OneNoiseForAllClients, OneNoiseForAllRounds])
def test_reused_noise_is_detected(broken: Callable[[], AnyMethod]) -> None:
    """Each upload alone looks as declared; the difference of two has no noise at all."""
    server = findings(broken())["server"]
    assert server.broken
    assert server.finding.p_value < 1e-6


class Repeating:
    """Mixin: clients reuse the draws of another client, or their own of the round before."""

    def streams(self, rng: ClientStreams) -> ClientStreams:
        raise NotImplementedError

    def client_update(
        self, task: Task, at: At, down: Any, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Any, State]:
        inner: Any = super()
        answer: tuple[Any, State] = inner.client_update(task, at, down, data, state, self.streams(rng))
        return answer


class AllClients(Repeating):
    def streams(self, rng: ClientStreams) -> ClientStreams:
        return replace(rng, clients=(0,) * len(rng.clients))


class AllRounds(Repeating):
    def streams(self, rng: ClientStreams) -> ClientStreams:
        return replace(rng, round=1)


@pytest.mark.parametrize("flaw", [AllClients, AllRounds])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("dp-fedprox", {"epochs": 1}),
        ("dp-fedsgd", {}),
        ("dp-fedavg", {"unit": "record"}),
        ("fedceo", {"unit": "record"}),
        ("cpsgd", {"noise_scope": "local"}),
        ("dp-fedags-proven", {"variant": "top-k", "selected": 0.5}),
        ("dp-fedags-proven", {"variant": "sparse-vector", "selected": 0.5, "upload_epsilon": 2.0}),
    ],
)
def test_reused_noise_is_detected_for_every_distribution_and_unit(
    name: str, fields: dict[str, Any], flaw: type[Repeating]
) -> None:
    sound = METHODS[name]
    plan = replace(PLAN, records_per_client=100, largest_client=100)
    assert not findings(sound(**fields), plan)["server"].broken
    broken = type(f"Broken{sound.__name__}", (flaw, sound), {})(**fields)
    found = findings(broken, plan)["server"]
    assert found.broken
    assert found.finding.p_value < 1e-6


def test_gradients_with_shared_noise_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    few: dict[str, Any] = {"trajectories": 1, "max_steps": 1, "real_batches": 3}
    plan = replace(PLAN, records_per_client=100, largest_client=100)
    assert not findings(FedLAPDP(**few), plan)["server"].broken
    begin, draw = RealGradients.__init__, RealGradients.draw
    given: dict[int, ClientStreams] = {}

    def remember(real: RealGradients, task: Task, data: ClientData, rng: ClientStreams, loops: Loops) -> None:
        given[id(real)] = rng
        begin(real, task, data, rng, loops)

    def anew(real: RealGradients, w: Any, active: Any) -> Any:
        real._noise = given[id(real)].noise("real-gradients")
        return draw(real, w, active)

    monkeypatch.setattr(RealGradients, "__init__", remember)
    monkeypatch.setattr(RealGradients, "draw", anew)
    assert findings(FedLAPDP(**few), plan)["server"].broken


class LittleNoiseInImages(FedLAPDP):
    """Synthetic images made from gradients with a hundredth of the declared noise."""

    def private_loops(self, at: At, radius: float) -> Loops:
        loops = super().private_loops(at, radius)
        return replace(loops, mechanism=gaussian(self.clip, self.noise_multiplier / 100))


def test_images_with_too_little_noise_are_detected() -> None:
    few: dict[str, Any] = {
        "trajectories": 1,
        "max_steps": 1,
        "real_batches": 12,
        "batch_size": 100,
        "noise_multiplier": 8.0,
    }
    plan = replace(PLAN, records_per_client=200, largest_client=200)
    sound = findings(FedLAPDP(**few), plan)["server"]
    broken = findings(LittleNoiseInImages(**few), plan)["server"]
    assert sound.finding.lower_bound <= (sound.proven or 0)
    assert not sound.broken
    assert broken.broken


def test_a_method_without_protection_has_nothing_to_refute() -> None:
    assert audit_method(METHODS["fedavg"](), PLAN, delta=DELTA) == []


def test_the_false_alarm_rate_is_at_most_the_stated_one() -> None:
    stream = named_stream(3)
    trials = 3000
    declared = alike = 0
    for _ in range(trials):
        inside, outside = 1 + stream.standard_normal(40), stream.standard_normal(40)
        declared += declared_p_value(inside, outside, 1.0) < ALARM
        first, second = stream.standard_normal((10, 8)), stream.standard_normal((10, 8))
        alike += independence_p_value(first, second) < ALARM
    assert declared <= 12  # 3 are expected of 3000; 12 or more come once in 10 000 times
    assert alike <= 12
    assert independence_p_value(np.ones((50, 4)), np.ones((50, 4))) < 1e-6
    assert independence_p_value(np.zeros((50, 4)), np.zeros((50, 4))) == 1.0
