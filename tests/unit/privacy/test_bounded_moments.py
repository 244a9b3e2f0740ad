from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.privacy.accounting import account
from fedveil.privacy.bounded_moments import BoundedMoments
from fedveil.privacy.releases import GaussianNoise, Plan, Release
from fedveil.streams import named_stream

BOUNDS = ((0.0, 120.0), (-5.0, 5.0), (1e6, 2e6))
CELL = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([0.0, 120.0, -5.0, 5.0, 1e6, 2e6])
)
ROW = st.lists(CELL, min_size=3, max_size=3)


@pytest.mark.parametrize("missing", [False, True])
@settings(max_examples=300, deadline=None)
@given(one=ROW, other=ROW)
def test_no_record_moves_the_sums_by_more_than_the_clip(
    missing: bool, one: list[float], other: list[float]
) -> None:
    """Taken out it moves them by its own part, exchanged for another by the difference of two."""
    moments = BoundedMoments(BOUNDS, 1.0, missing)
    parts = moments.parts(torch.tensor([one, other], dtype=torch.float64))
    clip = moments.mechanism.clip
    assert bool(torch.isfinite(parts).all())
    assert bool((parts.norm(dim=1) <= clip).all())  # zero-out
    assert float((parts[0] - parts[1]).norm()) <= 2 * clip  # replace-one
    d = len(BOUNDS)
    means, squares = (parts[0] - parts[1]).split([d, parts.shape[1] - d])
    assert float(means.abs().max()) <= 2  # a value crosses its whole range
    assert float(squares[:d].abs().max()) <= 1  # a square is never negative


def test_the_clip_is_reached_so_the_noise_is_no_larger_than_it_must_be() -> None:
    moments = BoundedMoments(BOUNDS, 1.0)
    parts = moments.parts(torch.tensor([[120.0, -5.0, 2e6]]))
    assert float(parts.norm()) == pytest.approx(moments.mechanism.clip)


def test_sums_of_parts_are_exact_in_any_order() -> None:
    values = torch.from_numpy(np.random.default_rng(0).uniform(-200, 2e6, (5000, 3)))
    parts = BoundedMoments(BOUNDS, 1.0).parts(values)
    shuffled = parts[torch.randperm(5000, generator=torch.Generator().manual_seed(1))]
    assert torch.equal(parts.sum(0), shuffled.sum(0))
    exact = [math.fsum(column) for column in parts.T.tolist()]
    assert parts.sum(0).tolist() == exact


def test_noise_on_neighbours_has_the_declared_deviation_and_lies_on_the_grid() -> None:
    """Two data sets that differ in one record: the means of many draws differ by its part, the spread is the noise."""
    moments = BoundedMoments(((0.0, 1.0),), 3.0)
    with_one = torch.tensor([[0.2], [1.0]], dtype=torch.float64)
    draws = torch.stack([moments.noisy_sums(with_one, named_stream(k, "x")) for k in range(4000)])
    without = torch.stack([moments.noisy_sums(with_one[:1], named_stream(k, "x")) for k in range(4000)])
    std = moments.mechanism.std
    assert std == pytest.approx(3 * math.sqrt(2))
    assert float(draws.std(0)[0]) == pytest.approx(std, rel=0.05)
    gap = draws.mean(0) - without.mean(0)
    assert gap.tolist() == pytest.approx(
        [1.0, 1.0], abs=0.02
    )  # the same draws, so only the grid is between them
    assert torch.equal(draws / moments.mechanism.step, (draws / moments.mechanism.step).round())


def test_without_much_noise_the_moments_are_those_of_the_rows() -> None:
    values = np.random.default_rng(2).normal([60, 1, 1.5e6], [10, 1.5, 1e5], (4000, 3))
    values[::7, 1] = np.nan
    moments = BoundedMoments(BOUNDS, 1e-3, missing=True)
    halves = torch.from_numpy(values).split(2000)
    sums = [moments.noisy_sums(half, named_stream(k, "x")) for k, half in enumerate(halves)]
    for (mean, std), column in zip(moments.moments(sums, 4000), values.T, strict=True):
        assert mean == pytest.approx(np.nanmean(column), rel=1e-2)
        assert std == pytest.approx(np.nanstd(column), rel=1e-2)


def test_moments_stay_finite_and_positive_under_any_noise() -> None:
    moments = BoundedMoments(BOUNDS, 1e6, missing=True)
    for seed in range(50):
        sums = [moments.noisy_sums(torch.zeros(0, 3), named_stream(seed, "x"))]
        for (mean, std), (low, high) in zip(moments.moments(sums, 0), BOUNDS, strict=True):
            assert low <= mean <= high
            assert 0 < std <= (high - low) / 2


@pytest.mark.parametrize("sampler", ["all", "fixed", "poisson"])
def test_the_release_composes_with_training_as_one_more_gaussian(sampler: str) -> None:
    """Against an oracle: k Gaussian releases of one record are one of multiplier 1 / sqrt(sum of 1 / m^2)."""
    plan = Plan(4, 4, sampler, 8, 50, 50)  # type: ignore[arg-type]
    training = Release("gradients", "record", ("server",), GaussianNoise(6.0), participation="charged")
    moments = BoundedMoments(BOUNDS, 9.0).release()
    both = account([training, moments], plan, 1e-5)
    alone = account([training], plan, 1e-5)
    whole = Release(
        "all",
        "record",
        ("server",),
        GaussianNoise(1 / math.sqrt(8 / 6**2 + 1 / 9**2)),
        participation="charged",
    )
    oracle = next(r for r in account([whole], Plan(4, 4, "all", 1, 50, 50), 1e-5) if r.adversary == "server")
    found = {row.adversary: row.epsilon for row in both}
    assert found["server"] == pytest.approx(oracle.epsilon, rel=1e-2)
    before = {row.adversary: row.epsilon for row in alone}
    assert (found["server"] or 0) > (before["server"] or 0) > 0
