from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedveil.audits.canaries import (
    UploadRelease,
    audit_samples,
    audit_upload,
    clopper_pearson_upper,
    declared_p_value,
    dirac_canary,
    gaussian_epsilon,
)
from fedveil.audits.findings import AuditFinding
from fedveil.audits.one_run import SumRelease, audit_sum, lower_bound, one_run, p_value, random_canaries
from fedveil.errors import InputError
from fedveil.privacy.mechanisms import Gaussian, clip_rows
from fedveil.streams import Stream, named_stream

DELTA = 1e-5


def _sum_release(mechanism: Gaussian, *, clipped: bool = True, factor: float = 1.0) -> SumRelease:
    def release(rows: Tensor, streams: Sequence[Stream]) -> Tensor:
        bounded = clip_rows({"w": rows}, mechanism.clip)["w"] if clipped else rows
        total = {"w": bounded.sum(0, keepdim=True)}
        noisy = mechanism.perturb({"w": torch.zeros_like(total["w"])}, streams)["w"]
        return (total["w"] + factor * noisy)[0]

    return release


def _one_run(mechanism: Gaussian, seed: int = 0, **broken: Any) -> AuditFinding:
    return audit_sum(
        _sum_release(mechanism, **broken),
        dimension=5000,
        clip=mechanism.clip,
        coins=named_stream(seed, "coins"),
        noise=[named_stream(seed, "noise")],
        delta=DELTA,
        canaries=500,
        guesses=100,
    )


# --- one run ------------------------------------------------------------------------------------------------


def test_the_p_value_is_that_of_a_naive_sum() -> None:
    from scipy.stats import binom

    eps, right, guesses, m, delta = 1.0, 80, 100, 1000, 1e-5
    q = math.exp(eps) / (1 + math.exp(eps))
    pmf = [binom.pmf(k, guesses, q) for k in range(guesses + 1)]
    best = max(sum(pmf[right - i : right]) / i for i in range(1, right + 1))
    naive = sum(pmf[right:]) + 2 * m * delta * best
    assert p_value(eps, right, guesses, m, delta) == pytest.approx(naive, rel=1e-9)


def test_the_bound_is_where_the_p_value_crosses() -> None:
    bound = lower_bound(90, 100, 1000, DELTA, 0.95)
    assert p_value(bound, 90, 100, 1000, DELTA) <= 0.05 < p_value(bound + 1e-3, 90, 100, 1000, DELTA)
    assert lower_bound(50, 100, 1000, DELTA, 0.95) == 0.0
    assert lower_bound(100, 100, 1000, 0.0, 0.95) == pytest.approx(3.49, abs=0.02)  # 0.05^(1/100)


def test_guessing_at_random_proves_nothing() -> None:
    rng = named_stream(1)
    bounds = [
        one_run(rng.random(200), rng.random(200) < 0.5, guesses=100, delta=DELTA).lower_bound
        for _ in range(100)
    ]
    assert sum(b > 0 for b in bounds) <= 10


@pytest.mark.parametrize(("multiplier", "true"), [(1.0, 4.377), (0.5, 10.0)])
def test_a_sound_mechanism_is_bounded_below_its_epsilon(multiplier: float, true: float) -> None:
    for seed in range(3):
        finding = _one_run(Gaussian(0.5, multiplier), seed)
        assert 0.5 < finding.lower_bound <= true
        assert not finding.broken(true)


def test_broken_sums_are_flagged() -> None:
    sound = Gaussian(1.0, 4.0)  # epsilon 0.94: within reach of a hundred guesses
    assert not _one_run(sound).broken(0.94)
    assert _one_run(sound, factor=0.1).broken(0.94)
    assert _one_run(sound, clipped=False).broken(0.94)


def test_the_bounds_of_a_thousand_canaries() -> None:
    """About 1.54 at a true epsilon of 4.38, and 2.71 at 10, with m = 1000 and d = 20 000."""
    for multiplier, expected in ((1.0, 1.54), (0.5, 2.71)):
        findings = [
            audit_sum(
                _sum_release(Gaussian(1.0, multiplier)),
                dimension=20_000,
                clip=1.0,
                coins=named_stream(seed, "coins"),
                noise=[named_stream(seed, "noise")],
                delta=DELTA,
                canaries=1000,
                guesses=50,
            )
            for seed in range(3)
        ]
        middle = statistics.median(finding.lower_bound for finding in findings)
        assert middle == pytest.approx(expected, abs=0.3)
        assert {finding.samples for finding in findings} == {1000}


@pytest.mark.parametrize("guesses", [0, 1, 3, 202])
def test_impossible_numbers_of_guesses_are_refused(guesses: int) -> None:
    with pytest.raises(InputError):
        one_run(np.zeros(200), np.zeros(200, dtype=np.bool_), guesses=guesses, delta=DELTA)


def test_canaries_have_their_length() -> None:
    canaries = random_canaries(5, 100, 3.0, named_stream(2))
    torch.testing.assert_close(torch.linalg.vector_norm(canaries, dim=1), torch.full((5,), 3.0))
    assert dirac_canary(4, 2.0).tolist() == [2.0, 0.0, 0.0, 0.0]


# --- canary clients -----------------------------------------------------------------------------------------


def _upload(mechanism: Gaussian, *, clipped: bool = True, noise: float = 1.0) -> UploadRelease:
    def release(updates: Tensor, streams: Sequence[Stream]) -> Tensor:
        weaker = Gaussian(mechanism.clip, mechanism.multiplier * noise)
        if clipped:
            return weaker({"w": updates}, streams)["w"]
        return weaker.perturb({"w": updates}, streams)["w"]

    return release


def _canaries(mechanism: Gaussian, samples: int = 4000, **broken: Any) -> AuditFinding:
    return audit_upload(
        _upload(mechanism, **broken),
        dimension=3,
        clip=mechanism.clip,
        seed=5,
        delta=DELTA,
        samples=samples,
        declared_multiplier=mechanism.multiplier,
    )


def test_a_sound_upload_is_bounded_below_its_epsilon() -> None:
    one_upload = Gaussian(1.0, 1 / math.sqrt(10))  # epsilon 17.86
    finding = _canaries(one_upload, samples=20_000)
    assert 6.0 < finding.lower_bound < 8.5
    assert finding.estimate == pytest.approx(17.86, abs=0.6)
    assert finding.p_value is not None
    assert not finding.broken(17.86)


@pytest.mark.parametrize("broken", [{"noise": 0.1}, {"clipped": False}])
@pytest.mark.parametrize(("multiplier", "proven"), [(1 / math.sqrt(10), 17.86), (1.0, 4.377)])
def test_broken_uploads_are_flagged(broken: dict[str, Any], multiplier: float, proven: float) -> None:
    finding = _canaries(Gaussian(0.5, multiplier), **broken)
    assert finding.broken(proven)
    assert finding.p_value is not None
    assert finding.p_value < 1e-6
    assert "BROKEN" in finding.in_words(proven)
    if proven < 5:  # within reach of a bound that assumes nothing
        assert finding.contradicts(proven)


def test_a_claim_of_a_tenth_is_refuted_where_coordinates_leave_without_noise() -> None:
    def release(updates: Tensor, streams: Sequence[Stream]) -> Tensor:
        bounded = clip_rows({"w": updates}, 1.0)["w"]
        noisy = Gaussian(1.0, 8.04)({"w": updates}, streams)["w"]
        return torch.where(bounded >= 0.5, noisy, bounded)  # only significant coordinates get noise

    finding = audit_upload(
        release, dimension=3, clip=1.0, seed=6, delta=DELTA, samples=2000, exaggeration=0.4
    )
    assert finding.contradicts(0.1)


def test_bounds_hold_at_the_stated_confidence() -> None:
    rng = named_stream(7)
    mu = 1.0
    true = gaussian_epsilon(mu, DELTA)
    bounds, rejected = [], 0
    for _ in range(200):
        inside, outside = rng.standard_normal(400) + mu, rng.standard_normal(400)
        bounds.append(audit_samples(inside, outside, delta=DELTA).lower_bound)
        rejected += declared_p_value(inside, outside, 1 / mu) < 0.05
    assert max(bounds) <= true
    assert rejected <= 22  # 5 % of 200, and chance


def test_clopper_pearson_covers() -> None:
    assert clopper_pearson_upper(0, 100, 0.95) == pytest.approx(1 - 0.05 ** (1 / 100))
    assert clopper_pearson_upper(100, 100, 0.95) == 1.0
    assert clopper_pearson_upper(0, 0, 0.95) == 1.0
    rng = named_stream(8)
    seen = rng.binomial(50, 0.1, size=2000)
    covered = np.mean([clopper_pearson_upper(int(k), 50, 0.9) >= 0.1 for k in seen])
    assert covered >= 0.88


def test_gaussian_epsilon_is_the_accountants() -> None:
    assert gaussian_epsilon(1.0, DELTA) == pytest.approx(4.377, abs=1e-3)
    assert gaussian_epsilon(math.sqrt(10), DELTA) == pytest.approx(17.857, abs=1e-3)
    assert gaussian_epsilon(0.0, DELTA) == 0.0


def test_an_estimate_is_never_a_bound() -> None:
    finding = AuditFinding("canary clients", 1.0, 0.95, 100, DELTA, 9.0, "assumes Gaussian noise")
    assert not finding.contradicts(5.0)
    assert "Estimate, not a bound: 9.00" in finding.in_words()
    assert finding.to_json()["estimate_note"] == "assumes Gaussian noise"
    assert "estimate" not in AuditFinding("x", 1.0, 0.95, 10, DELTA).to_json()


def test_arms_that_never_mix_prove_what_two_one_sided_intervals_allow() -> None:
    """No error in 800 trials of either kind; each rate's interval takes half of the five per cent."""
    finding = audit_samples(np.ones(1000), np.zeros(1000), delta=1e-3)
    most = 1 - 0.025 ** (1 / 800)
    assert finding.lower_bound == pytest.approx(math.log((1 - 1e-3 - most) / most), rel=1e-6)


def test_too_few_or_broken_samples_are_refused() -> None:
    with pytest.raises(InputError):
        audit_samples(np.zeros(5), np.zeros(5), delta=DELTA)
    with pytest.raises(InputError):
        audit_samples(np.full(50, math.nan), np.zeros(50), delta=DELTA)
