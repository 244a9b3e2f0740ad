"""Integers drawn exactly: no floating point decides a draw (Canonne, Kamath, Steinke 2020)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from fedveil.errors import InputError
from fedveil.streams import Stream

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Words = np.ndarray[Any, np.dtype[np.uint64]]

LARGEST_STD = 4096
MOST_COUNTED_TRIALS = 1 << 14
_MIDDLE = 1 << 256


def add_discrete_gaussian(levels: Ints, std: float, stream: Stream) -> Ints:
    """Exact discrete Gaussian noise on integers `[d]`; see `discrete_gaussian`."""
    return levels + discrete_gaussian(std, len(levels), stream)


def add_binomial(levels: Ints, trials: int, stream: Stream) -> Ints:
    """Exact centred binomial noise on integers `[d]`; see `centred_binomial`."""
    return levels + centred_binomial(trials, len(levels), stream)


def uniform_below(limits: Ints, stream: Stream) -> Ints:
    """Independent integers, each uniform on 0 .. limit - 1, by rejection from 62 random bits."""
    out = np.empty(len(limits), dtype=np.int64)
    left = np.arange(len(limits))
    top = np.int64(2**62)
    while len(left):
        words = np.frombuffer(stream.bytes(8 * len(left)), dtype=np.uint64) >> np.uint64(2)
        draws = words.astype(np.int64)
        limit = limits[left]
        kept = draws < (top // limit) * limit
        out[left[kept]] = draws[kept] % limit[kept]
        left = left[~kept]
    return out


def bernoulli_exp(numerator: Ints, denominator: int, stream: Stream) -> Bools:
    """True with probability exp(-numerator / denominator) exactly, for numerators of at least 0."""
    whole, part = numerator // denominator, numerator % denominator
    alive = np.ones(len(numerator), dtype=np.bool_)
    step = 0
    while True:  # exp(-whole) as that many trials of probability exp(-1), all of which must succeed
        due = np.flatnonzero(alive & (whole > step))
        if not len(due):
            break
        alive[due] = _bernoulli_exp_small(np.full(len(due), denominator), denominator, stream)
        step += 1
    due = np.flatnonzero(alive)
    alive[due] = _bernoulli_exp_small(part[due], denominator, stream)
    return alive


def _bernoulli_exp_small(numerator: Ints, denominator: int, stream: Stream) -> Bools:
    """exp(-x) for x in [0, 1]: trials of x/1, x/2, x/3, ... until one fails; True if their number is odd."""
    result = np.zeros(len(numerator), dtype=np.bool_)
    left = np.arange(len(numerator))
    count = 1
    while len(left):
        limits = np.full(len(left), denominator * count, dtype=np.int64)
        success = uniform_below(limits, stream) < numerator[left]
        result[left[~success]] = count % 2 == 1
        left = left[success]
        count += 1
    return result


def discrete_laplace(scale: int, size: int, stream: Stream) -> Ints:
    """Integers with probability proportional to exp(-|x| / `scale`)."""
    out = np.empty(size, dtype=np.int64)
    left = np.arange(size)
    while len(left):
        low = uniform_below(np.full(len(left), scale, dtype=np.int64), stream)
        kept = bernoulli_exp(low, scale, stream)
        high = np.zeros(len(left), dtype=np.int64)
        going = np.flatnonzero(kept)
        while len(going):  # geometric: trials of probability exp(-1)
            going = going[bernoulli_exp(np.ones(len(going), dtype=np.int64), 1, stream)]
            high[going] += 1
        value = low + scale * high
        negative = uniform_below(np.full(len(left), 2, dtype=np.int64), stream) == 1
        kept &= ~(negative & (value == 0))  # otherwise zero would have twice its probability
        out[left[kept]] = np.where(negative, -value, value)[kept]
        left = left[~kept]
    return out


def rational_variance(std: float) -> Fraction:
    """A rational number not below `std` squared, with terms small enough for 64-bit arithmetic."""
    if not 0 < std <= LARGEST_STD:
        raise InputError(
            "std", std, "is out of range for exact sampling", f"Use a coarser grid: 0 < std <= {LARGEST_STD}."
        )
    parts = 1024 if std <= 4 else 64 if std <= 32 else 1
    return Fraction(math.ceil(Fraction(std) ** 2 * parts), parts)


def discrete_gaussian(std: float, size: int, stream: Stream) -> Ints:
    """Integers with probability proportional to exp(-x^2 / (2 variance)), variance `rational_variance(std)`.

    Candidates are discrete Laplace of scale t; each is accepted by an exact trial of probability
    exp(-(|x| - variance/t)^2 / (2 variance)), computed in integers.
    """
    variance = rational_variance(std)
    a, b = variance.numerator, variance.denominator
    scale = math.isqrt(a // b) + 1
    denominator = 2 * a * b * scale * scale
    out = np.empty(size, dtype=np.int64)
    left = np.arange(size)
    while len(left):
        candidate = discrete_laplace(scale, len(left), stream)
        distance = np.abs(candidate) * (scale * b) - a
        kept = bernoulli_exp(distance * distance, denominator, stream)
        out[left[kept]] = candidate[kept]
        left = left[~kept]
    return out


def centred_binomial(trials: int, size: int, stream: Stream) -> Ints:
    """Binomial(`trials`, 1/2) - `trials`/2; `trials` is a multiple of 8.

    Up to `MOST_COUNTED_TRIALS` random bits are counted, which is exact; above, the distribution function is
    inverted in whole numbers, with an error below 1e-30 in total variation.
    """
    if trials < 8 or trials % 8:
        raise InputError("trials", trials, "is not a multiple of 8", "Use 8, 16, 24, ...")
    if trials > MOST_COUNTED_TRIALS:
        return _binomial_by_table(trials, size, stream)
    out = np.zeros(size, dtype=np.int64)
    length = trials // 8
    rows = max(1, 2**24 // length)
    for start in range(0, size, rows):
        count = min(rows, size - start)
        out[start : start + count] = _ones(_bytes(stream, count * length), count)
    return out - trials // 2


def _bytes(stream: Stream, length: int) -> bytes:
    """What `stream.bytes` returns, from raw words where those are the same bytes: three times as fast."""
    philox = stream.bit_generator if isinstance(stream, np.random.Generator) else None
    if length % 8 or not isinstance(philox, np.random.Philox) or philox.state["has_uint32"]:
        return stream.bytes(length)
    return philox.random_raw(length // 8).astype("<u8", copy=False).tobytes()


def _ones(bits: bytes, count: int) -> Ints:
    """The number of set bits in each of `count` equal parts."""
    length = len(bits) // count
    width = math.gcd(length, 8)  # the longest words that divide a part: fewest sums
    parts = np.frombuffer(bits, dtype=f"u{width}").reshape(count, length // width)
    ones: Ints = np.bitwise_count(parts).sum(1, dtype=np.int64)
    return ones


def _binomial_by_table(trials: int, size: int, stream: Stream) -> Ints:
    first, second = _binomial_table(trials)
    draws = np.frombuffer(stream.bytes(8 * size), dtype="<u8")
    found: Ints = np.searchsorted(first, draws).astype(np.int64)
    close = np.flatnonzero(first[np.minimum(found, len(first) - 1)] == draws)
    for place in close:  # 64 digits do not decide, which has probability 2^-64 for each entry of the table
        more = int.from_bytes(stream.bytes(8), "little")
        ties = np.searchsorted(first, draws[place], side="right") - found[place]
        found[place] += np.searchsorted(second[found[place] :][:ties], np.uint64(more), side="right")
    return found - len(first) // 2


@functools.lru_cache(maxsize=4)
def _binomial_table(trials: int) -> tuple[Words, Words]:
    """The distribution function from -reach up to reach - 1: its first 64 binary digits, and the next 64.

    Floating point is not accurate enough: an error of 1e-7 in the logarithm of a factorial affects every probability,
    and an upload has as many coordinates as the model.
    """
    half = trials // 2
    # Twelve standard deviations: the tails have a probability below 1e-30.
    reach = math.ceil(6 * math.sqrt(trials))
    whole = 2 * sum(_binomial_masses(half, reach)) - _MIDDLE
    digits = np.empty((2, 2 * reach), dtype=np.uint64)
    twice = whole - _MIDDLE
    for value, mass in enumerate(itertools.islice(_binomial_masses(half, reach), reach)):
        twice += 2 * mass
        upto = (twice << 127) // whole
        digits[:, reach + value] = divmod(upto, 1 << 64)
        digits[:, reach - value - 1] = divmod((1 << 128) - upto, 1 << 64)
    return digits[0], digits[1]


def _binomial_masses(half: int, reach: int) -> Iterator[int]:
    """The relative weights of the values 0 to `reach`, where 0 has the weight `_MIDDLE`."""
    mass = _MIDDLE
    for step in range(reach + 1):
        yield mass
        mass = mass * (half - step) // (half + step + 1)
