"""Wrappers: each rule against an independent form of itself, and any method inside any wrapper."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.signal
import torch

from fedveil import At, run
from fedveil.experiment.config import make_config
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.fedceo import FedCEO
from fedveil.methods.fedsgd import FedSGD
from fedveil.methods.ppsgd import PPSGD
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.methods.wrappers import WRAPPERS, Rule, WrappedMethod
from fedveil.methods.wrappers.averaging import LowPass, ModelAverage, ServerMomentum
from fedveil.methods.wrappers.denoising import (
    DisplacementDenoise,
    marchenko_pastur_median,
    optimal_singular_values,
)
from fedveil.methods.wrappers.wrapper import Wrapped
from fedveil.session.loop import Callback, RoundEnd
from fedveil.tree import Params
from tests.contract.federation import StopsAfter, distance, make_clients, make_plan, make_task
from tests.refusals import refuses

QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 4}
RULES = [rule for _, kind in sorted(WRAPPERS.items()) if isinstance(rule := kind(), Rule)]


def released(rule: Rule, path: np.ndarray) -> np.ndarray:
    """What the rule makes of a one-parameter model that walks along `path` (from its first value)."""
    before: Params = {"w": torch.tensor([path[0]])}
    memory = rule.start(before)
    out = []
    for round_, value in enumerate(path[1:], start=1):
        step = rule.step(round_, memory, before, {"w": torch.tensor([value])})
        memory, before = step.memory, step.released
        out.append(float(before["w"]))
    return np.array(out)


def walk() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(40).cumsum() + 3.0


def test_the_average_weights_round_i_by_its_decay() -> None:
    path, found = walk(), released(ModelAverage(decay=0.8), walk())
    for t in (1, 7, 39):
        weights = 0.8 ** np.arange(t)[::-1]
        assert found[t - 1] == pytest.approx((weights * path[1 : t + 1]).sum() / weights.sum(), rel=1e-12)


def test_the_low_pass_is_a_butterworth_filter_of_the_displacement() -> None:
    path = walk()
    for cutoff in (0.05, 0.4):
        b, a = scipy.signal.butter(2, cutoff)
        expected = path[0] + scipy.signal.lfilter(b, a, path[1:] - path[0])
        np.testing.assert_allclose(released(LowPass(cutoff=cutoff), path), expected, rtol=1e-9)


def test_momentum_sums_past_changes() -> None:
    """Against the recursion written out: the method answers each model with a change of its own."""
    rule = ServerMomentum(momentum=0.6, lr=0.5)
    changes = np.random.default_rng(1).standard_normal(12)
    w: Params = {"w": torch.tensor([1.0], dtype=torch.float64)}
    memory = rule.start(w)
    expected, velocity = 1.0, 0.0
    for round_, change in enumerate(changes, start=1):
        step = rule.step(round_, memory, w, {"w": w["w"] + change})
        memory, w = step.memory, step.released
        velocity = 0.6 * velocity + change
        expected += 0.5 * velocity
        assert float(w["w"]) == pytest.approx(expected, rel=1e-12)
        assert step.resume is step.released


def test_momentum_without_memory_is_the_method_itself() -> None:
    method = FedCEO(lam=2.0, interval=2, **QUICK)
    plain = run(make_task(), make_clients(), method, rounds=5, cohort=3, workers=1, noise="seeded")
    same = run(
        make_task(),
        make_clients(),
        WrappedMethod(method, ServerMomentum(momentum=0.0)),
        rounds=5,
        cohort=3,
        workers=1,
        noise="seeded",
    )
    assert distance(plain.model, same.model) < 1e-12


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
def test_the_median_of_noise(ratio: float) -> None:
    large = 1200
    noise = torch.randn(
        int(ratio * large), large, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    found = float(torch.linalg.svdvals(noise).square().median()) / large
    assert marchenko_pastur_median(ratio) == pytest.approx(found, rel=0.03)


def test_optimal_shrinkage_undoes_what_noise_adds() -> None:
    """A planted value x appears at y(x); shrinking y gives x times the cosines of both singular vectors."""
    ratio, x = 0.4, torch.tensor([1.2, 2.0, 7.0], dtype=torch.float64)
    y = ((x + 1 / x) * (x + ratio / x)).sqrt()
    left = ((x**4 - ratio) / (x**4 + ratio * x**2)).sqrt()
    right = ((x**4 - ratio) / (x**4 + x**2)).sqrt()
    torch.testing.assert_close(optimal_singular_values(y, ratio), x * left * right, rtol=1e-9, atol=0)
    edge = torch.tensor([1 + math.sqrt(ratio), 0.5], dtype=torch.float64)
    assert optimal_singular_values(edge, ratio).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shrinkage", ["soft", "optimal"])
@pytest.mark.parametrize("noise", ["estimate", 0.05])
def test_denoising_finds_a_low_rank_displacement(shrinkage: Any, noise: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(200, 80, generator=generator)
    moved = torch.randn(200, 2, generator=generator) @ torch.randn(2, 80, generator=generator)
    noisy = start + moved + 0.05 * 2 * torch.randn(200, 80, generator=generator)
    rule = DisplacementDenoise(noise=noise, shrinkage=shrinkage)
    params = {"w": start, "b": torch.zeros(3)}
    found = rule.step(4, rule.start(params), params, {"w": noisy, "b": torch.ones(3)})
    before, after = (float((one - start - moved).norm()) for one in (noisy, found.released["w"]))
    assert after < 0.5 * before
    assert torch.equal(found.released["b"], torch.ones(3))
    assert found.resume is None


def test_denoising_of_a_zero_displacement_is_zero() -> None:
    params = {"w": torch.ones(6, 4)}
    for rule in (DisplacementDenoise(), DisplacementDenoise(resume=True)):
        step = rule.step(1, rule.start(params), params, params)
        assert torch.equal(step.released["w"], params["w"])
        assert (step.resume is None) != rule.resume


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    "method", [FedCEO(lam=2.0, interval=2, **QUICK), PPSGD(**QUICK), FedSGD(batch_size=4)]
)
def test_any_method_in_any_rule(rule: Rule, method: Any, tmp_path: Path) -> None:
    """Same disclosures, whole on the wire and on disk, the same bits after an interruption and with workers."""
    wrapped = rule.around(method)
    task, clients, plan = make_task(), make_clients(), make_plan()
    assert wrapped.releases(plan) == method.releases(plan)
    assert wrapped.paper_claim(plan) == method.paper_claim(plan)
    server = wrapped.init_server(task.init(0), plan)
    back = Wrapped.from_bytes(server.to_bytes())
    assert back.scalars() == server.scalars()
    assert all(torch.equal(leaf, back.tensors()[key]) for key, leaf in server.tensors().items())
    assert wrapped.broadcast(At(plan, 1), back, (0, 1)).count == 1
    whole = run(
        task, clients, wrapped, rounds=4, cohort=3, results=tmp_path / "whole", workers=1, noise="seeded"
    )
    with pytest.raises(KeyboardInterrupt):
        run(
            task,
            clients,
            wrapped,
            rounds=4,
            cohort=3,
            results=tmp_path / "cut",
            workers=1,
            noise="seeded",
            callbacks=[StopsAfter(2)],
        )
    resumed = run(
        task, clients, wrapped, rounds=4, cohort=3, results=tmp_path / "cut", workers=1, noise="seeded"
    )
    assert distance(whole.model, resumed.model) == 0
    assert (whole.summary["personal"] is None) == (method.name != "ppsgd")


class Models(Callback):
    """The models of a run, round by round."""

    def __init__(self) -> None:
        self.seen: list[Params] = []

    def round_ends(self, end: RoundEnd) -> None:
        self.seen.append(end.model)


def test_wrappers_that_only_release_follow_the_method_they_wrap() -> None:
    """Applied to a finished run's models they give what they give inside it; wrappers nest in their order."""
    method, rules = UDPFedAvg(**QUICK), (LowPass(cutoff=0.3), ModelAverage(decay=0.7))
    task, plain = make_task(), Models()
    run(task, make_clients(), method, rounds=5, cohort=3, workers=1, noise="seeded", callbacks=[plain])
    both = WrappedMethod(WrappedMethod(method, rules[0]), rules[1])
    found = run(task, make_clients(), both, rounds=5, cohort=3, workers=1, noise="seeded")
    models, start = plain.seen, task.init(0)
    for rule in rules:
        memory, before, out = rule.start(start), start, []
        for round_, model in enumerate(models, start=1):
            step = rule.step(round_, memory, before, model)
            memory, before = step.memory, step.released
            out.append(before)
        models = out
    assert distance(found.model, models[-1]) == 0
    assert both.name == "udp-fedavg+low-pass+model-average"


def test_configuration_of_wrappers() -> None:
    raw = {"method": {"name": "udp-fedavg"}, "wrap": [{"name": "model-average", "decay": 0.9}]}
    config = make_config(raw)
    method = config.build_method()
    assert isinstance(method, WrappedMethod)
    assert method.rule == ModelAverage(decay=0.9)
    assert config.identity() != make_config({"method": {"name": "udp-fedavg"}}).identity()
    default = make_config({"wrap": [{"name": "model-average"}]})
    assert default.resolved()["wrap"] == [{"name": "model-average", "decay": 0.95}]
    assert default.identity() == make_config({"wrap": [{"name": "model-average", "decay": 0.95}]}).identity()
    with refuses("wrap.name"):
        make_config({"wrap": [{"name": "model-averge"}]})
    with refuses("wrap.decya"):
        make_config({"wrap": [{"name": "model-average", "decya": 0.9}]})
    with refuses("wrap.decay"):
        make_config({"wrap": [{"name": "model-average", "decay": 1.0}]})


def test_a_wrapped_fedavg_learns_the_same() -> None:
    plain = run(make_task(), make_clients(), FedAvg(**QUICK), rounds=4, cohort=3, workers=1, noise="seeded")
    method = WrappedMethod(FedAvg(**QUICK), ModelAverage(decay=1e-9))
    wrapped = run(make_task(), make_clients(), method, rounds=4, cohort=3, workers=2, noise="seeded")
    assert distance(plain.model, wrapped.model) < 1e-6
