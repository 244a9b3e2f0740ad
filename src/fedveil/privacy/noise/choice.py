"""Private choices by exact comparison: noisy values are never tied, and rounding never decides a comparison.

Double precision decides nearly all comparisons. Where two values are closer than its error, more digits of the draws
are taken until they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.lazy_modules import LazyModule
from fedveil.privacy.noise.grid import (
    GUARD_DIGITS,
    UNCERTAIN,
    Floats,
    Places,
    SignedWords,
    laplace_quantiles,
    tail,
    words_of,
)
from fedveil.streams import Stream

if TYPE_CHECKING:
    import mpmath
else:
    mpmath = LazyModule("mpmath")

_ROUNDINGS = 2.0**-48
Bounds = tuple[Any, Any]


def above_noisy_threshold(
    values: Floats, threshold: float, scales: tuple[float, float], order: Places, most: int, stream: Stream
) -> Places:
    """The first `most` positions in `order` whose noisy value reaches the noisy threshold.

    The threshold gets one Laplace draw of scale `scales[0]`, each value one of `scales[1]`.
    """
    words = words_of(stream, 1 + len(values))
    bar, asked = words[:1], words[1:]
    distance = (
        values - threshold + scales[1] * laplace_quantiles(asked) - scales[0] * laplace_quantiles(bar)[0]
    )
    size = np.abs(values) + abs(threshold) + np.abs(distance) + 64 * max(scales)
    doubt = scales[1] * _error(asked) + scales[0] * _error(bar)[0] + _ROUNDINGS * size
    reaches = distance >= 0
    unclear = np.flatnonzero(np.abs(distance) <= doubt)
    if len(unclear):
        line = _Draw(threshold, scales[0], int(bar[0]), _laplace, stream)
        for place in unclear:
            own = _Draw(float(values[place]), scales[1], int(asked[place]), _laplace, stream)
            reaches[place] = _larger(own, line)
    first: Places = order[reaches[order]][:most]
    return first


def largest_by_gumbel(values: Floats, scale: float, count: int, stream: Stream) -> Places:
    """The ascending positions of the `count` largest values with Gumbel noise of `scale` on each."""
    words = words_of(stream, len(values))
    noisy = values + scale * gumbel_quantiles(words)
    doubt = scale * _error(words) + _ROUNDINGS * (np.abs(values) + np.abs(noisy) + 64 * scale)
    sure, close = _certain_and_close(noisy - doubt, noisy + doubt, count)
    wanted = count - len(sure)
    if wanted < len(close):
        draws = [_Draw(float(values[place]), scale, int(words[place]), _gumbel, stream) for place in close]
        close = close[_largest(draws, wanted)]
    return np.sort(np.concatenate([sure, close]))


def _certain_and_close(low: Floats, high: Floats, count: int) -> tuple[Places, Places]:
    """Given bounds `low` and `high`, the numbers certainly among the `count` largest, and those possibly among them."""
    if count >= len(low):
        return np.arange(len(low)), np.arange(0)
    first = len(low) - count
    reached = np.partition(low, first)[first]  # at least `count` numbers reach this
    others = np.partition(high, first - 1)[first - 1]  # at most `count` numbers exceed this
    certain = low > others
    return np.flatnonzero(certain), np.flatnonzero(~certain & (high >= reached))


def gumbel_quantiles(words: SignedWords) -> Floats:
    """Gumbel quantiles of scale 1, with the error that `_error` states."""
    small = tail(words)
    quantiles: Floats = -np.log(np.where(words < 0, -np.log(small), -np.log1p(-small)))
    return quantiles


def _error(words: SignedWords) -> Floats:
    """A bound on a quantile's error from double precision and from digits that are not drawn yet."""
    error: Floats = UNCERTAIN + 2.0**-61 / tail(words)
    return error


class _Draw:
    """value + scale * quantile(uniform), where the digits of the uniform number are drawn as needed."""

    def __init__(
        self, value: float, scale: float, word: int, quantile: Callable[[Any], Any], stream: Stream
    ) -> None:
        self.value, self.scale, self.quantile, self.stream = value, scale, quantile, stream
        self.digits, self.uniform = 64, word + 2**63

    def bounds(self) -> Bounds:
        """A lower and an upper bound of the noisy value."""
        with mpmath.workprec(self.digits + 2 * GUARD_DIGITS):
            ends = []
            for side in (0, 1):
                uniform = mpmath.ldexp(self.uniform + side, -self.digits)
                ends.append(self.value + self.scale * self.quantile(uniform))
            slack = mpmath.ldexp(abs(self.value) + 64 * self.scale, -self.digits - GUARD_DIGITS // 2)
            return ends[0] - slack, ends[1] + slack

    def refine(self) -> None:
        self.uniform = (self.uniform << 64) | int.from_bytes(self.stream.bytes(8), "little")
        self.digits += 64


def _laplace(uniform: Any) -> Any:
    if uniform in (0, 1):
        return mpmath.inf * (2 * uniform - 1)
    return mpmath.log(2 * uniform) if uniform < 0.5 else -mpmath.log(2 * (1 - uniform))


def _gumbel(uniform: Any) -> Any:
    if uniform in (0, 1):
        return mpmath.inf * (2 * uniform - 1)
    return -mpmath.log(-mpmath.log(uniform))


def _larger(one: _Draw, other: _Draw) -> bool:
    while True:
        (low, high), (other_low, other_high) = one.bounds(), other.bounds()
        if low > other_high:
            return True
        if high < other_low:
            return False
        one.refine()
        other.refine()


def _largest(draws: Sequence[_Draw], count: int) -> list[int]:
    """The positions of the `count` largest, by pairwise comparison."""
    wins = [sum(_larger(one, other) for other in draws if other is not one) for one in draws]
    return sorted(range(len(draws)), key=lambda place: -wins[place])[:count]
