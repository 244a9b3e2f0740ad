"""Noise on the grid: exactly the rounding of (value + noise), whatever double precision makes of it."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy.stats import chisquare, laplace, norm

from fedveil.privacy.noise import choice, grid
from fedveil.streams import EntropyStream, named_stream

LOWEST = -(2**63)
EDGES = [LOWEST, LOWEST + 1, LOWEST + 7, LOWEST + 2**52, LOWEST + 2**52 - 1, -1, 0, 1, -(LOWEST + 2**52)]
EDGES += [-(LOWEST + 1), -(LOWEST + 8), -(LOWEST + 2**52) - 1]


class Words(EntropyStream):
    """A stream of given words; further ones are zero."""

    def __init__(self, *words: int) -> None:
        self.left = b"".join(word.to_bytes(8, "little", signed=True) for word in words)

    def bytes(self, length: int) -> bytes:
        found, self.left = self.left[:length], self.left[length:]
        return found.ljust(length, b"\0")


def some_words(count: int) -> list[int]:
    stream = named_stream(3, "words")
    middle = stream.integers(LOWEST, -(LOWEST + 1), count, dtype=np.int64)
    deep = [LOWEST + int(2.0**power) for power in stream.uniform(0, 62.9, count)]
    return [*EDGES, *map(int, middle), *deep, *(-word - 1 for word in deep)]


def normal_below(bound: Any) -> Any:
    return mpmath.ncdf(bound)


def laplace_below(bound: Any) -> Any:
    return mpmath.exp(bound) / 2 if bound < 0 else 1 - mpmath.exp(-bound) / 2


def gumbel_below(bound: Any) -> Any:
    return mpmath.exp(-mpmath.exp(-bound))


@pytest.mark.parametrize(
    ("quantiles", "below"),
    [
        (grid.normal_quantiles, normal_below),
        (grid.laplace_quantiles, laplace_below),
        (choice.gumbel_quantiles, gumbel_below),
    ],
)
def test_a_quantile_is_off_by_a_tenth_of_what_is_allowed_for(quantiles: Any, below: Any) -> None:
    """The distribution function at quantile -+ error / 10 encloses all uniform numbers that a word stands for."""
    words = np.array(some_words(300), dtype=np.int64)
    error = grid.UNCERTAIN / 10 + 2.0**-61 / grid.tail(words)
    with mpmath.workprec(400):
        for word, quantile, slack in zip(
            words.tolist(), quantiles(words).tolist(), error.tolist(), strict=True
        ):
            low, high = (mpmath.ldexp(word + 2**63 + side, -64) for side in (0, 1))
            if low > 0:
                assert below(mpmath.mpf(quantile) - slack) <= low, word
            if high < 1:
                assert high <= below(mpmath.mpf(quantile) + slack), word


def nearest(value: float, std: float, word: int, more: int, below: Any) -> float:
    """The brute-force answer: the distribution function inverted at 128 digits by bisection over integers."""
    with mpmath.workprec(500):
        uniform = mpmath.ldexp((word + 2**63) * 2**64 + more, -128)
        low, high = -(2**20), 2**20
        while high - low > 1:
            middle = (low + high) // 2
            bound = (mpmath.mpf(middle) - mpmath.mpf(1) / 2 - mpmath.mpf(value)) / mpmath.mpf(std)
            low, high = (middle, high) if below(bound) <= uniform else (low, middle)
        return float(low)


@pytest.mark.parametrize("value", [0.0, 0.3, -0.5, 1234.499999])
@pytest.mark.parametrize(
    ("draw", "below"), [(grid.rounded_normal, normal_below), (grid.rounded_laplace, laplace_below)]
)
def test_words_at_the_border_between_two_multiples_are_decided_exactly(
    draw: Any, below: Any, value: float
) -> None:
    """Words whose interval holds the border itself: the next 64 digits decide, below and above the border."""
    std = 1500.7
    for multiple in (-4000, -1, 0, 1, 777, 5000):
        with mpmath.workprec(500):
            border = below((mpmath.mpf(multiple) + mpmath.mpf(1) / 2 - mpmath.mpf(value)) / mpmath.mpf(std))
            digits = int(mpmath.floor(mpmath.ldexp(border, 128)))
        for near in (digits - 2, digits + 2):
            word, more = (near >> 64) - 2**63, near & (2**64 - 1)
            signed = more - 2**64 if more >= 2**63 else more
            found = draw(np.array([value]), std, 1.0, Words(word, signed))[0]
            assert found == nearest(value, std, word, more, below)
            assert found in (multiple, multiple + 1)


@pytest.mark.parametrize("word", EDGES)
@pytest.mark.parametrize(
    ("draw", "below"), [(grid.rounded_normal, normal_below), (grid.rounded_laplace, laplace_below)]
)
def test_the_outermost_words_are_drawn_exactly(draw: Any, below: Any, word: int) -> None:
    more = 12345678901234567
    found = draw(np.array([0.25]), 1024.0, 1.0, Words(word, more))[0]
    assert found == nearest(0.25, 1024.0, word, more, below)


@pytest.mark.parametrize("part", [0.0, 0.37, -0.5])
@pytest.mark.parametrize(
    ("draw", "below", "spread"),
    [(grid.rounded_normal, norm.cdf, 2.5), (grid.rounded_laplace, laplace.cdf, 1.7)],
)
def test_the_distribution_is_that_of_the_rounded_sum(
    draw: Any, below: Any, spread: float, part: float
) -> None:
    count = 200_000
    value, step = np.full(count, 40 + part) * 0.25, 0.25
    found = draw(value, spread * step, step, named_stream(11, "draws"))
    multiples, edges = np.arange(34, 47), np.arange(33.5, 47)
    seen = [(found / step == multiple).sum() for multiple in multiples]
    chance = np.diff(below((edges - 40 - part) / spread))
    rest = count - sum(seen)
    assert chisquare([*seen, rest], count * np.array([*chance, 1 - chance.sum()])).pvalue > 1e-4


def test_the_step_is_a_power_of_two_below_a_thousandth_of_the_deviation() -> None:
    for std in (1.0, 0.75, 3e-9, 7e8, 1.0 - 2**-53):
        step = grid.grid_step(std)
        assert math.frexp(step)[0] == 0.5
        assert 2**10 <= std / step < 2**11


def test_not_finite_values_stay_and_others_do_not_suffer() -> None:
    value = np.array([math.nan, math.inf, -math.inf, 1.0])
    found = grid.rounded_normal(value, 1.0, 2.0**-10, named_stream(0, "any"))
    assert math.isnan(found[0])
    assert found[1:3].tolist() == [math.inf, -math.inf]
    assert abs(found[3]) < 50


def test_draws_do_not_depend_on_how_the_words_are_fetched() -> None:
    """Philox hands out the same words one way and the other."""
    fetched = grid.words_of(named_stream(5, "w"), 1000)
    as_bytes = np.frombuffer(named_stream(5, "w").bytes(8000), dtype="<i8")
    assert (fetched == as_bytes).all()


def reachable(found: np.ndarray, std: float) -> np.ndarray:
    """Which float32 numbers are std * z for some float32 z: the attack on noise that is added in floating point."""
    start = (found.astype(np.float64) / std).astype(np.float32)
    hit = np.zeros(len(found), dtype=bool)
    for direction in (-np.inf, np.inf):
        candidate = start.copy()
        for _ in range(3):
            hit |= (np.float32(std) * candidate).astype(np.float32) == found
            candidate = np.nextafter(candidate, np.float32(direction))
    return hit


def test_the_attack_distinguishes_floating_point_sums_and_fails_on_the_grid() -> None:
    std, size, stream = 0.7, 20_000, named_stream(1, "attack")
    value = (stream.standard_normal(size) * 0.01).astype(np.float32)
    draws = stream.standard_normal(size).astype(np.float32)
    alone, added = np.float32(std) * draws, value + np.float32(std) * draws
    assert reachable(alone, std).all()
    assert reachable(added, std).mean() < 0.99
    step = grid.grid_step(std)
    empty, full = (
        grid.rounded_normal(start.astype(np.float64), std, step, stream).astype(np.float32)
        for start in (value * 0, value)
    )
    rates = [reachable(found, std).mean() for found in (empty, full)]
    assert abs(rates[0] - rates[1]) < 5 * math.sqrt(0.5 / size)
    for found in (empty, full):
        assert (found / step == np.rint(found / step)).all()


def test_comparisons_that_doubles_cannot_decide_are_decided_by_further_digits() -> None:
    """Two draws from the same first word differ only in later digits; the larger one wins."""
    for later in ((1, 2), (2, 1)):
        draws = [choice._Draw(1.0, 1.0, 17, choice._gumbel, Words(digit)) for digit in later]
        assert choice._larger(draws[0], draws[1]) == (later[0] > later[1])


def test_gumbel_choice_is_the_exponential_mechanism() -> None:
    values, scale, stream = np.array([0.0, 0.5, 2.0]), 1.3, named_stream(2, "gumbel")
    count = 20_000
    seen = np.zeros(3)
    for _ in range(count):
        seen[choice.largest_by_gumbel(values, scale, 1, stream)] += 1
    weights = np.exp(values / scale)
    assert chisquare(seen, count * weights / weights.sum()).pvalue > 1e-4


def test_gumbel_choice_with_equal_words_asks_for_more_digits() -> None:
    """All first words equal: double precision ties everywhere, and the next digits order the coordinates."""
    chosen = choice.largest_by_gumbel(np.zeros(3), 1.0, 1, Words(5, 5, 5, 1, 9, 1, 7, 2, 3, 4))
    assert len(chosen) == 1


def test_above_threshold_has_the_probability_of_two_laplace_draws() -> None:
    stream, trials = named_stream(4, "sparse"), 4000
    hits = sum(
        len(choice.above_noisy_threshold(np.array([0.3]), 1.0, (0.5, 0.8), np.array([0]), 1, stream))
        for _ in range(trials)
    )
    points = np.linspace(-12, 12, 4001)
    wanted = np.trapezoid(laplace.pdf(points, scale=0.5) * laplace.sf(0.7 + points, scale=0.8), points)
    assert abs(hits / trials - wanted) < 4 * math.sqrt(0.25 / trials)


def test_the_first_positions_in_the_order_are_released() -> None:
    values, order = np.array([1e9, 0.0, 1e9, 1e9]), np.array([3, 1, 0, 2])
    found = choice.above_noisy_threshold(values, 1e6, (1.0, 1.0), order, 2, named_stream(0, "o"))
    assert found.tolist() == [3, 0]
