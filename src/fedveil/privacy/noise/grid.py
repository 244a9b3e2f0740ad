"""Exact noise on a grid: the result is exactly the rounding of (value + noise), without floating-point error.

A floating-point sum `value + noise` reaches some numbers only for some values, so its last bits disclose the value.
Here the exact sum of the value and a real-valued draw is rounded to a multiple of a public power of two. Rounding is
post-processing, so every guarantee of the real-valued mechanism holds unchanged. Scaling, averaging and conversion to
another floating-point type come afterwards and are post-processing, too. The proof is in docs/noise.md.

A draw is the inverse distribution function of a uniform number of which 64 binary digits are known. In all but about
one in a billion cases these digits and double precision decide to which multiple the sum is rounded. Otherwise more
digits are drawn and the distribution function is evaluated to as many digits as the decision needs. The result depends
neither on the machine nor on the accuracy of its mathematical functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.lazy_modules import LazyModule
from fedveil.lazy_torch import torch
from fedveil.streams import Stream

if TYPE_CHECKING:
    import mpmath
else:
    mpmath = LazyModule("mpmath")

Rows = np.ndarray[Any, np.dtype[np.floating[Any]]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Places = np.ndarray[Any, np.dtype[np.intp]]
SignedWords = np.ndarray[Any, np.dtype[np.int64]]

FINENESS = 10
"""By default noise of standard deviation s is on a grid of steps between s / 2^10 and s / 2^11."""
_LOWEST = np.int64(-(2**63))
_TAIL = np.int64(2**63 - 2**52)
UNCERTAIN = 2.0**-40
_BLOCK = 1 << 14
GUARD_DIGITS = 32


def grid_step(std: float, fineness: int = FINENESS) -> float:
    """The power of two between `std` / 2^`fineness` and half of that; depends on nothing but public numbers."""
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - fineness)


def rounded_normal(value: Rows, std: float, step: float, stream: Stream) -> Rows:
    """`value` plus normal noise of `std`, rounded to a multiple of `step`, a power of two; keeps non-finite values."""
    return _rounded(value, step, std / step, normal_quantiles, _normal_below, stream)


def rounded_laplace(value: Rows, scale: float, step: float, stream: Stream) -> Rows:
    """`value` plus Laplace noise of `scale`, rounded to a multiple of `step`, a power of two."""
    return _rounded(value, step, scale / step, laplace_quantiles, _laplace_below, stream)


def _rounded(
    value: Rows,
    step: float,
    tau: float,
    quantile: Callable[[SignedWords], Floats],
    below: Callable[[Any, float], Any],
    stream: Stream,
) -> Rows:
    """The multiples of `step` nearest to `value + step * tau * quantile`, in blocks that stay in the cache.

    They are converted to the dtype of `value` at the end.
    """
    if not (finite := np.isfinite(value)).all():
        zeros = np.where(finite, value, np.zeros_like(value))
        return np.where(finite, _rounded(zeros, step, tau, quantile, below, stream), value)
    out = np.empty_like(value)
    words = words_of(stream, len(value))
    for start in range(0, len(value), _BLOCK):
        block = slice(start, start + _BLOCK)
        scaled = np.divide(value[block], step, dtype=np.float64)  # exact: the step is a power of two
        whole = np.rint(scaled)
        scaled -= whole  # exact as well
        moved = quantile(words[block])
        moved *= tau
        moved += scaled
        near = np.rint(moved)
        moved -= near
        for place in _unclear(moved, words[block], tau):
            chance = partial(_at_scale, below, tau)
            near[place] = _decide(scaled[place], words[block][place], near[place], chance, stream)
        whole += near
        np.multiply(whole, step, out=out[block], casting="same_kind")
    return out


def _at_scale(below: Callable[[Any, float], Any], tau: float, bound: Any) -> Any:
    return below(bound, tau)


def words_of(stream: Stream, count: int) -> SignedWords:
    """Uniform 64-bit integers; w stands for the uniform numbers from (w + 2^63) / 2^64 to (w + 2^63 + 1) / 2^64."""
    if isinstance(stream, np.random.Generator) and isinstance(stream.bit_generator, np.random.Philox):
        # Three times as fast as `bytes`. Other bit generators may have shorter raw words.
        return stream.bit_generator.random_raw(count).view(np.int64)
    return np.frombuffer(stream.bytes(8 * count), dtype="<i8")


def _outer(words: SignedWords) -> Places:
    """Words in the outermost 2^-11 of the probability, where the distance from 0 or 1 must be exact."""
    return np.flatnonzero((words >= _TAIL) | (words < -_TAIL))


def tail(words: SignedWords) -> Floats:
    """The smaller of both tail probabilities, at the middle of each word's interval."""
    depth = np.where(words < 0, words - _LOWEST, ~_LOWEST - words)
    tail: Floats = (depth.astype(np.float64) + 0.5) * 2.0**-64
    return tail


def normal_quantiles(words: SignedWords) -> Floats:
    """Standard normal quantiles, with an error below `UNCERTAIN` plus that of the digits not drawn yet."""
    from scipy.special import ndtri  # slow to import, and only drawing needs it

    middle = torch.from_numpy(words.astype(np.float64)).mul_(2.0**-63)
    drawn: Floats = torch.erfinv(middle).mul_(math.sqrt(2)).numpy()
    outer = words[places := _outer(words)]
    far = ndtri(tail(outer))
    drawn[places] = np.where(outer < 0, far, -far)
    return drawn


def laplace_quantiles(words: SignedWords) -> Floats:
    """Laplace quantiles of scale 1, with an error below `UNCERTAIN` plus that of the digits not drawn yet."""
    far = np.log(2 * tail(words))
    return np.copysign(far, words)


def _unclear(distance: Floats, words: SignedWords, tau: float) -> Places:
    """Where a sum at `distance` from the nearest integer may round to the next one."""
    doubt = np.abs(distance) > 0.5 - 2 * tau * UNCERTAIN
    outer = words[places := _outer(words)]
    # Digits not drawn yet change a quantile by their share of the tail; elsewhere that is below another UNCERTAIN.
    doubt[places] |= np.abs(distance[places]) > 0.5 - tau * (UNCERTAIN + 2.0**-61 / tail(outer))
    return np.flatnonzero(doubt)


def _decide(part: float, word: int, near: float, below: Callable[[Any], Any], stream: Stream) -> int:
    """The integer nearest to `part` plus the draw whose uniform number begins with the digits of `word`."""
    digits, uniform, found = 64, int(word) + 2**63, int(near)
    while True:
        with mpmath.workprec(digits + 3 * GUARD_DIGITS):
            low, high = mpmath.ldexp(uniform, -digits), mpmath.ldexp(uniform + 1, -digits)
            error = mpmath.ldexp(1, -digits - GUARD_DIGITS)
            while high < below(mpmath.mpf(found - 0.5) - float(part)) - error:
                found -= 1
            while low > below(mpmath.mpf(found + 0.5) - float(part)) + error:
                found += 1
            lower, upper = (below(mpmath.mpf(found + side) - float(part)) for side in (-0.5, 0.5))
            if low > lower + error and high < upper - error:
                return found
        uniform = (uniform << 64) | int.from_bytes(stream.bytes(8), "little")
        digits += 64


def _normal_below(bound: Any, tau: float) -> Any:
    """The probability that normal noise of `tau` is below `bound`."""
    return mpmath.ncdf(bound / mpmath.mpf(tau))


def _laplace_below(bound: Any, tau: float) -> Any:
    """The probability that Laplace noise of scale `tau` is below `bound`."""
    tail = mpmath.exp(-abs(bound) / mpmath.mpf(tau)) / 2
    return tail if bound < 0 else 1 - tail
