"""Grades have one scale, and odds never understate what an attack can do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import norm

from fedveil.privacy.accounting import epsilon_of
from fedveil.privacy.meaning import SCALE, grade, guess_accuracy, rounded_up
from fedveil.privacy.mechanisms import Gaussian
from fedveil.privacy.releases import ADVERSARIES, Plan, Release


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("delta", [1e-5, 0.01])
def test_the_best_test_of_a_gaussian_is_right_no_more_often_than_stated(sigma: float, delta: float) -> None:
    mechanism = Gaussian(clip=1.0, multiplier=sigma)
    release = Release("a sum", "client", ADVERSARIES, mechanism.protection())
    plan = Plan(clients=10, cohort=10, sampler="all", rounds=1)
    epsilon = epsilon_of([release], plan, delta, "server", "client")
    assert epsilon is not None
    best = float(norm.cdf(1 / (2 * sigma)))  # the likelihood ratio test of N(0, sigma^2) and N(1, sigma^2)
    assert best <= guess_accuracy(epsilon, delta)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.2])
def test_the_odds_are_those_of_the_worst_mechanism(epsilon: float, delta: float) -> None:
    """Everything is revealed with probability delta, else a suspicion of 1/2 becomes e^eps / (1 + e^eps)."""
    high = math.exp(epsilon) / (1 + math.exp(epsilon))
    inside = [delta, (1 - delta) * high, (1 - delta) * (1 - high), 0.0]
    outside = inside[::-1]
    assert _delta(inside, outside, epsilon) == pytest.approx(delta, abs=1e-12)
    assert _best_guess(inside, outside) == pytest.approx(guess_accuracy(epsilon, delta), abs=1e-12)
    suspicions = [a / (a + b) for a, b in zip(inside, outside, strict=True) if a + b > 0]
    assert max(share for share in suspicions if share < 1) <= high + 1e-12


def test_no_mechanism_beats_the_odds() -> None:
    """Random pairs of distributions, with the exact delta of each epsilon, found by trying every set of outcomes."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        inside, outside = rng.dirichlet(np.full(6, 0.5), size=2).tolist()
        for epsilon in (0.0, 0.5, 2.0):
            delta = max(_delta(inside, outside, epsilon), _delta(outside, inside, epsilon))
            assert _best_guess(inside, outside) <= guess_accuracy(epsilon, delta) + 1e-12


def _delta(inside: Sequence[float], outside: Sequence[float], epsilon: float) -> float:
    """The smallest delta for which P(S | inside) <= e^eps P(S | outside) + delta for every set S of outcomes."""
    places = range(len(inside))
    sets = itertools.chain.from_iterable(
        itertools.combinations(places, size) for size in range(len(inside) + 1)
    )
    return max(sum(inside[i] - math.exp(epsilon) * outside[i] for i in chosen) for chosen in sets)


def _best_guess(inside: Sequence[float], outside: Sequence[float]) -> float:
    """How often the likelihood ratio test is right if both cases are equally frequent."""
    return sum(max(a, b) for a, b in zip(inside, outside, strict=True)) / 2


def test_odds_start_at_a_coin_and_grow_to_certainty() -> None:
    assert guess_accuracy(0.0, 0.0) == 0.5
    assert guess_accuracy(3.0, 1e-5) == pytest.approx(0.95258, abs=1e-4)
    assert guess_accuracy(1e6, 1e-5) == 1.0


def test_epsilon_3_and_10_have_different_words() -> None:
    words = [grade(epsilon).word for epsilon in (0.5, 3.0, 10.0, 50.0, None)]
    assert len(set(words)) == 5
    assert [step.limit for step in SCALE] == [1.0, 3.0, 10.0, math.inf]


def test_a_delta_that_exposes_one_client_is_no_protection() -> None:
    assert grade(1.0, 1e-5, 100).level == "good"
    assert grade(1.0, 1e-2, 100).level == "bad"


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.5, "50 %"),
        (0.7311, "74 %"),
        (0.9526, "95.3 %"),
        (0.99995, "99.995 %"),
        (1 - 1e-9, "more than 99.999 %"),
    ],
)
def test_shares_are_rounded_up(share: float, text: str) -> None:
    assert rounded_up(share) == text
    assert rounded_up(1.0) == "100 %"
