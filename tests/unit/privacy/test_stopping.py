"""What is lost where results decide what happens next: when a run ends, or which mechanism follows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import norm

from fedveil.privacy.accounting import account
from fedveil.privacy.calibrate import calibrate
from fedveil.privacy.releases import GaussianNoise, Plan, Protection, PureDP, Release

SIGMA, DELTA = 12.0, 1e-5
CELLS = 8  # of a round's loss, in one of its standard deviations


def stated(rounds: int, ends: int) -> float:
    release = Release("the sum", "client", ("server",), GaussianNoise(SIGMA))
    rows = account([release], Plan(3, 3, "all", rounds), DELTA, ends=ends)
    (row,) = [row for row in rows if row.adversary == "server"]
    assert row.epsilon is not None
    assert (row.delta, row.ends) == (DELTA, ends)
    return row.epsilon


def failure(epsilons: list[float]) -> float:
    """The largest sum over t of P(S, end t) - e^epsilon_t Q(S, end t), over all S and all rules of when to end.

    Backwards over the rounds: it is better to end where more is lost than by going on. A round's loss is rounded to a
    grid, without bias, so the result has two digits.
    """
    rounds, mean, deviation = len(epsilons), 0.5 / SIGMA**2, 1 / SIGMA
    step = deviation / CELLS
    reach = round(10 * CELLS * rounds**0.5)
    total = step * np.arange(-reach, reach + 1)
    one = step * np.arange(-10 * CELLS, 10 * CELLS + 1)
    edges = np.append(one, one[-1] + step) - step / 2
    chance: npt.NDArray[np.float64] = np.diff(norm.cdf(edges, mean, deviation))

    def before(value: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The expected value one round earlier, by the total loss until then."""
        padded = np.pad(value, 10 * CELLS, mode="edge")
        return np.correlate(padded, chance, mode="valid")

    value = np.zeros(len(total))
    for epsilon in reversed(epsilons):
        ends_here = -np.expm1(np.minimum(0.0, epsilon - total))
        value = before(np.maximum(ends_here, value))
    return float(value[reach])


@pytest.mark.parametrize(("rounds", "times"), [(10, 4.5), (40, 8.0)])
def test_no_rule_of_stopping_exceeds_the_stated_delta(rounds: int, times: float) -> None:
    whole = failure([stated(rounds, 1)] * rounds)
    assert 0.98 * DELTA < whole < 1.02 * DELTA, "epsilon of all planned rounds holds whatever the rule"
    naive = failure([stated(t, 1) for t in range(1, rounds + 1)])
    assert naive > times * DELTA, "epsilon of the rounds that ran, at the whole delta, is refuted"
    assert failure([stated(t, rounds) for t in range(1, rounds + 1)]) < DELTA


def test_a_mechanism_that_is_chosen_by_results_may_exceed_the_delta_of_a_limit() -> None:
    """docs/concepts/assumptions.md: a limit counts what was charged as if it had been settled beforehand.

    After a Gaussian release, another one and randomised response each exhaust the limit. Choosing between them by the
    loss so far fails more often than either.
    """
    limit, first, plan = 3.0, 1 / 0.35, Plan(3, 3, "all", 1)

    def then(second: Protection) -> list[Release]:
        return [
            Release(f"{n}", "client", ("server",), p) for n, p in enumerate((GaussianNoise(first), second))
        ]

    def largest(kind: Callable[[float], Protection]) -> Protection:
        return kind(
            calibrate(lambda sigma: then(kind(sigma)), plan, DELTA, limit, "server", "client", tolerance=1e-5)
        )

    noisy, answer = largest(GaussianNoise), largest(lambda sigma: PureDP(1 / sigma))
    assert isinstance(noisy, GaussianNoise)
    assert isinstance(answer, PureDP)
    drawn = np.linspace(-9, 9, 20_001)
    weight = norm.pdf(drawn) * (drawn[1] - drawn[0])
    left = limit - (0.5 / first**2 + drawn / first)
    m, heads = 1 / noisy.multiplier, 1 / (1 + np.exp(-answer.epsilon))
    gaussian = norm.cdf(m / 2 - left / m) - np.exp(left) * norm.cdf(-m / 2 - left / m)
    up, down = (-np.expm1(np.minimum(0, left - side * answer.epsilon)) for side in (1, -1))
    responded = heads * up + (1 - heads) * down
    for fixed in (gaussian, responded):
        assert 0.9 * DELTA < float((weight * fixed).sum()) <= 1.001 * DELTA
    assert float((weight * np.maximum(gaussian, responded)).sum()) > 1.8 * DELTA
