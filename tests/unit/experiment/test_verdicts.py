"""The rule by which a table counts as reproduced."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedveil.experiment.verdicts import (
    Measured,
    half_width,
    judge_claim,
    level_reproduced,
    order_of,
    verdicts,
)


def row(name: str, published: float | None, *values: float, group: str = "g") -> Measured:
    return Measured(name, group, published, values)


def test_level_is_within_the_larger_of_tolerance_and_interval() -> None:
    near, far = row("near", 0.50, 0.52), row("far", 0.60, 0.55)
    assert verdicts([near], 0.03) == {"near": "level"}
    assert verdicts([far], 0.03)["far"] == "missed"
    wide = row("wide", 0.60, 0.50, 0.58, 0.57)
    assert half_width(wide.values) == pytest.approx(0.1082, abs=1e-3)  # t = 4.303, s = 0.0436
    assert verdicts([wide], 0.03)["wide"] == "level"


def test_a_row_that_misses_its_level_has_the_order_if_it_is_ordered_correctly() -> None:
    rows = [row("a", 0.9, 0.6), row("b", 0.8, 0.5), row("c", 0.7, 0.55)]
    assert verdicts(rows, 0.01) == {"a": "order", "b": "missed", "c": "missed"}


def test_rows_without_a_run_or_a_published_value() -> None:
    rows = [row("a", 0.9), row("b", None, 0.5)]
    assert verdicts(rows, 0.01) == {"a": "not run"}
    assert order_of(rows).tau is None
    assert not level_reproduced(["not run"])


def test_tau_counts_pairs_within_groups_only() -> None:
    rows = [
        row("a", 0.9, 0.6),
        row("b", 0.8, 0.5),
        row("c", 0.1, 0.7, group="h"),
        row("d", 0.2, 0.6, group="h"),
    ]
    order = order_of(rows)
    assert (order.tau, order.pairs) == (0.0, 2)
    assert not order.reproduced
    assert order_of(rows[:2]).reproduced


def test_tau_of_one_group_is_scipys() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        published, here = rng.permutation(8) / 10, rng.random(8)
        rows = [row(str(k), *pair) for k, pair in enumerate(zip(published, here, strict=True))]
        tau = order_of(rows).tau
        assert tau == pytest.approx(stats.kendalltau(published, here).statistic)


def test_tau_with_ties_is_scipys_somers_d() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        published, here = rng.integers(0, 4, 8) / 10, rng.integers(0, 4, 8) / 10
        rows = [row(str(k), *pair) for k, pair in enumerate(zip(published, here, strict=True))]
        order = order_of(rows)
        assert order.tau == pytest.approx(stats.somersd(published, here).statistic)
        assert order.pairs == sum(a != b for k, a in enumerate(published) for b in published[:k])


def test_the_interval_of_a_mean_is_scipys() -> None:
    values = np.random.default_rng(2).normal(0.5, 0.1, 5)
    low, high = stats.t.interval(0.95, 4, values.mean(), stats.sem(values))
    assert half_width(values.tolist()) == pytest.approx((high - low) / 2)


@pytest.mark.parametrize("seeds", [2, 3, 6])
@pytest.mark.parametrize("certain", [False, True])
def test_taus_interval_is_that_of_students_t_about_the_means(seeds: int, certain: bool) -> None:
    values = np.linspace(-1, 1, seeds)
    quantile = stats.t.ppf(0.975, seeds - 1) * stats.sem(values)
    gap = quantile * (1.5 if certain else 0.7)  # reversed in fewer or in more than 2.5 % of the draws
    order = order_of([row("a", 0.9, *(values + gap).tolist()), row("b", 0.8, *[0.0] * seeds)])
    assert (order.tau, order.low) == (1.0, 1.0 if certain else -1.0)
    assert order.reproduced == certain


def test_a_table_with_one_row_of_one_seed_has_no_interval() -> None:
    rows = [row("a", 0.9, 0.6), row("b", 0.8, 0.5, 0.5), row("c", 0.7, 0.4, 0.4)]
    assert order_of(rows).low is None
    assert order_of(rows[1:]).low == 1.0


def test_several_seeds_give_tau_an_interval_that_must_lie_above_zero() -> None:
    clear = [row("a", 0.9, 0.60, 0.61, 0.62), row("b", 0.8, 0.50, 0.51, 0.52)]
    order = order_of(clear)
    assert (order.tau, order.low, order.high) == (1.0, 1.0, 1.0)
    mixed = [row("a", 0.9, 0.60, 0.40, 0.62), row("b", 0.8, 0.50, 0.51, 0.52)]
    order = order_of(mixed)
    assert order.tau == 1.0
    assert order.low == -1.0
    assert not order.reproduced


def test_a_table_has_the_level_if_four_fifths_of_the_rows_that_ran_have_it() -> None:
    assert level_reproduced(["level", "level", "level", "level", "order", "not run"])
    assert not level_reproduced(["level", "level", "level", "missed"])


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([2.79, 2.9], "proven"),  # within 5 %
        ([2.79, 3.0], "not proven"),
        ([None], "not proven"),
        ([], "not run"),
    ],
)
def test_a_claim_is_proven_only_if_every_run_proves_it(found: list[float | None], verdict: str) -> None:
    assert judge_claim(2.79, found) == verdict
