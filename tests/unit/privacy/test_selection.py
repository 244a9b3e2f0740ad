"""Private selection: its curves against the exact divergence of the whole procedure, and against hand values."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from fedveil.errors import InputError
from fedveil.privacy import selection
from fedveil.privacy.accounting import Cohort, Round, account_rounds, renyi_curve, rounds_of
from fedveil.privacy.releases import GaussianNoise, Plan, Release, RenyiCurve
from fedveil.privacy.selection import NegativeBinomialTrials, PoissonTrials, Trials, draw
from tests.unit.privacy.brute_force import Floats, Pair

ORDERS = (1.25, 1.5, 2.0, 3.0, 5.0, 8.0, 16.0, 32.0, 64.0, 256.0)
ALL_TRIALS: list[Trials] = [
    NegativeBinomialTrials(1.0, 0.1),
    NegativeBinomialTrials(1.0, 0.5),
    NegativeBinomialTrials(0.0, 0.05),
    NegativeBinomialTrials(-0.5, 0.02),
    NegativeBinomialTrials(3.0, 0.3),
    PoissonTrials(0.5),
    PoissonTrials(5.0),
    PoissonTrials(30.0),
]
TRIALS = pytest.mark.parametrize("trials", ALL_TRIALS, ids=lambda trials: trials.in_words())


def _probabilities(trials: Trials) -> Floats:
    return np.array([trials.probability(k) for k in range(2000)])


def _best(output: Floats, trials: Trials) -> Floats:
    """The distribution of the best of K draws of outputs that are sorted from worst to best; last: no draw at all."""
    at_most = np.concatenate([[0.0], np.cumsum(output)])
    chances = _probabilities(trials)
    powers = np.array([chances[k] * np.diff(at_most**k) for k in range(1, len(chances)) if chances[k] > 0])
    return np.concatenate([powers.sum(axis=0), [chances[0]]])


def _mechanisms() -> list[tuple[Floats, Floats]]:
    """Output distributions of one trial under neighbouring data sets, outputs sorted by their score."""
    rng = np.random.default_rng(0)
    found = [
        (np.array([0.5, 0.5]), np.array([0.6, 0.4])),
        (np.array([0.99, 0.01]), np.array([0.98, 0.02])),
        (np.array([0.01, 0.99]), np.array([0.02, 0.98])),
        (np.array([0.3, 0.4, 0.3]), np.array([0.3, 0.35, 0.35])),
    ]
    for _ in range(6):
        first = rng.dirichlet(np.ones(5))
        second = first * np.exp(rng.uniform(-0.3, 0.3, 5))
        found.append((first, second / second.sum()))
    return found


@TRIALS
def test_selection_bounds_the_exact_divergence_of_the_procedure(trials: Trials) -> None:
    for p, q in _mechanisms():
        one = Pair(p, q)
        trial = RenyiCurve(ORDERS, tuple(one.renyi(order) for order in ORDERS))
        whole = Pair(_best(p, trials), _best(q, trials))
        bound = trials.curve(trial)
        for order, stated in zip(ORDERS, bound, strict=True):
            assert whole.renyi(order) <= stated + 1e-9, order
        release = selection.selection_release(RenyiCurve(ORDERS, tuple(np.maximum(bound, 0))), "client")
        rounds = Counter([Round((release,), Cohort(1, 1, "all"))])
        for delta in (1e-2, 1e-4, 1e-6):
            row = next(r for r in account_rounds(rounds, delta) if r.adversary == "observer")
            assert row.epsilon is not None
            assert whole.delta(row.epsilon) <= delta


@TRIALS
def test_the_number_of_trials_follows_its_distribution(trials: Trials) -> None:
    chances = _probabilities(trials)
    assert chances.sum() == pytest.approx(1.0, abs=1e-9)
    assert chances @ np.arange(len(chances)) == pytest.approx(trials.mean, rel=1e-6)
    drawn = np.array([draw(trials) for _ in range(400)])
    deviation = math.sqrt(chances @ (np.arange(len(chances)) - trials.mean) ** 2 / 400)
    assert abs(drawn.mean() - trials.mean) < 6 * deviation


def test_eta_one_is_geometric_and_eta_zero_logarithmic() -> None:
    for k in range(1, 20):
        assert NegativeBinomialTrials(1.0, 0.2).probability(k) == pytest.approx(0.2 * 0.8 ** (k - 1))
        expected = 0.8**k / (k * math.log(5))
        assert NegativeBinomialTrials(0.0, 0.2).probability(k) == pytest.approx(expected)


def test_the_theorems_by_hand() -> None:
    """Theorems 2 and 6 evaluated here, at order 10, for a trial of divergence 0.01 times the order."""
    orders = (2.0, 10.0, 40.0)
    trial = RenyiCurve(orders, tuple(0.01 * order for order in orders))
    # eta 1, gamma 0.01: E K = 100; lambda_hat 40 is best of the three: 39/40 * 0.4 + log(100) / 40 = 0.505129...
    by_hand = 0.1 + 2 * (0.975 * 0.4 + math.log(100) / 40) + math.log(100) / 9
    assert by_hand == pytest.approx(1.6219440, abs=1e-6)
    assert NegativeBinomialTrials(1.0, 0.01).curve(trial)[1] == pytest.approx(by_hand, rel=1e-12)
    # Poisson of mean 10 at order 10: eps_hat = log(10/9) = 0.105361, log(10) / 9 = 0.255843; delta_hat of the trial by
    # exp((a - 1)(eps(a) - eps_hat)) / a * (1 - 1/a)^(a - 1), the least over the orders.
    hat = math.log(10 / 9)
    fails = min(math.exp((a - 1) * (0.01 * a - hat)) / a * (1 - 1 / a) ** (a - 1) for a in orders)
    assert PoissonTrials(10.0).curve(trial)[1] == pytest.approx(0.1 + 10 * fails + 0.2558428, rel=1e-3)


def test_a_geometric_number_of_trials_has_up_to_three_times_the_epsilon_of_one_run() -> None:
    """It grows with the expected number of trials and stays below the factor 3 of Liu and Talwar 2019 for pure DP."""
    plan = Plan(100, 10, "poisson", 100)
    release = Release("sum", "client", ("observer",), GaussianNoise(2.0), participation="hidden")
    rounds = rounds_of([release], plan)
    one = next(r.epsilon for r in account_rounds(rounds, 1e-5, "rdp") if r.adversary == "observer")
    assert one is not None
    for gamma, low, high in ((0.5, 1.3, 1.5), (0.1, 1.8, 2.0), (0.01, 2.3, 2.6), (0.001, 2.7, 3.0)):
        curve = selection.selection_curve([rounds], "client", NegativeBinomialTrials(1.0, gamma))
        best = Counter([Round((selection.selection_release(curve, "client"),), Cohort.of(plan))])
        all_ = next(r.epsilon for r in account_rounds(best, 1e-5) if r.adversary == "observer")
        assert all_ is not None
        assert low * one < all_ < high * one


def test_the_epsilon_of_a_mixture_of_candidates_is_between_the_smallest_and_the_largest() -> None:
    plan = Plan(100, 10, "poisson", 10)
    cheap, dear = (
        rounds_of([Release("s", "client", ("observer",), GaussianNoise(m), "hidden")], plan)
        for m in (4.0, 1.0)
    )
    trials = NegativeBinomialTrials()
    low, both, high = (
        np.array(selection.selection_curve(c, "client", trials).values)
        for c in ([cheap], [cheap, dear], [dear])
    )
    assert (low <= both).all()
    assert (both <= high).all()


def test_curve_of_a_run_is_that_of_its_rounds() -> None:
    plan = Plan(10, 10, "all", 7)
    curve = renyi_curve(
        rounds_of([Release("s", "client", ("observer",), GaussianNoise(2.0))], plan), "client", "observer"
    )
    assert curve.values == pytest.approx([7 * order / 8 for order in curve.orders])


@pytest.mark.parametrize("field", ["eta", "gamma", "mean"])
@pytest.mark.parametrize("value", [-1.0, 0.0, 1e300, math.nan, math.inf])
def test_impossible_distributions_are_refused(field: str, value: float) -> None:
    if (field, value) == ("eta", 0.0):
        return
    with pytest.raises(InputError) as refused:
        _ = PoissonTrials(value) if field == "mean" else NegativeBinomialTrials(**{field: value})
    assert refused.value.field == field


def test_a_run_without_a_proof_has_no_private_selection() -> None:
    plan = Plan(10, 5, "poisson", 3)
    only_server = rounds_of([Release("s", "client", ("server",), GaussianNoise(2.0))], plan)
    with pytest.raises(InputError):
        selection.selection_curve([only_server], "client", NegativeBinomialTrials())
