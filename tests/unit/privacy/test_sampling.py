from __future__ import annotations

import numpy as np
import pytest

from fedveil import Plan
from fedveil.privacy.sampling import cohort_sizes, draw_cohort


def test_fixed_cohorts_have_their_size_and_no_favourites() -> None:
    plan = Plan(20, 5, "fixed", 1)
    cohorts = [draw_cohort(plan, 0, t) for t in range(1, 2001)]
    assert all(len(set(c)) == 5 and list(c) == sorted(c) for c in cohorts)
    counts = np.bincount([client for c in cohorts for client in c], minlength=20)
    assert np.abs(counts / 2000 - 0.25).max() < 0.05


def test_poisson_takes_each_client_on_its_own() -> None:
    plan = Plan(20, 5, "poisson", 1)
    taken = np.zeros((4000, 20))
    for t in range(4000):
        taken[t, list(draw_cohort(plan, 1, t + 1))] = 1
    assert np.abs(taken.mean(0) - 0.25).max() < 0.04
    sizes = taken.sum(1)
    assert abs(sizes.var() - 20 * 0.25 * 0.75) < 0.4
    correlations = np.corrcoef(taken.T) - np.eye(20)
    assert np.abs(correlations).max() < 0.08


def test_all_is_everybody_and_the_seed_decides() -> None:
    assert draw_cohort(Plan(3, 3, "all", 1), 0, 1) == (0, 1, 2)
    plan = Plan(1000, 10, "fixed", 1)
    assert draw_cohort(plan, 0, 1) == draw_cohort(plan, 0, 1)
    assert draw_cohort(plan, 0, 1) != draw_cohort(plan, 0, 2)
    assert draw_cohort(plan, 0, 1) != draw_cohort(plan, 1, 1)


def test_the_sizes_of_poisson_cohorts_have_their_probabilities() -> None:
    plan = Plan(30, 6, "poisson", 1)
    sizes = dict(cohort_sizes(plan))
    assert sum(sizes.values()) == pytest.approx(1.0, abs=1e-12)
    assert sum(k * w for k, w in sizes.items()) == pytest.approx(6.0)
    given = dict(cohort_sizes(plan, present=2))
    assert min(given) == 2
    assert sum(k * w for k, w in given.items()) == pytest.approx(2 + 28 * 0.2)
    drawn = [len(draw_cohort(plan, 0, t)) for t in range(2000)]
    assert np.mean([k == 6 for k in drawn]) == pytest.approx(sizes[6], abs=0.04)
