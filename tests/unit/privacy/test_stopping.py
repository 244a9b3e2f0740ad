"""The best rule by which released models can end a run, against what is stated for the rounds that ran."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import norm

from fedveil.privacy.accounting import account
from fedveil.privacy.releases import GaussianNoise, Plan, Release

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
