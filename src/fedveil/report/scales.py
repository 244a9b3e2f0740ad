"""From values to places on paper, with round ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps `low..high` to `start..end`, by logarithm if `log`; `ticks` lie inside."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, 1e-12))
        share = (value - low) / (high - low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def linear(
    values: Sequence[float], start: float, end: float, bounds: tuple[float, float] = (-math.inf, math.inf)
) -> Scale:
    """A scale that holds the values, begins and ends at round numbers and stays within what values can be."""
    inside = [min(max(value, bounds[0]), bounds[1]) for value in values]
    low, high = min(inside, default=0.0), max(inside, default=1.0)
    if high - low < 1e-9 * max(1.0, abs(high)):
        pad = abs(high) * 0.1 if abs(high) > 1e-9 else 0.5
        low, high = low - pad, high + pad
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    every = [round(i * step, 12) for i in range(first, last + 1)]
    ticks = tuple(tick for tick in every if bounds[0] <= tick <= bounds[1])
    return Scale(max(every[0], bounds[0]), min(every[-1], bounds[1]), start, end, ticks)


def exact(low: float, high: float, start: float, end: float, *, count: int, whole: bool = False) -> Scale:
    """A scale over just this range, with round ticks inside; `whole`: of things that have no fractions."""
    if high - low < 1e-9 * max(1.0, abs(high)):
        high = low + max(1.0, 0.1 * abs(low))
    step = _round_step((high - low) / count)
    if whole:
        step = math.ceil(step)
    inside = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return Scale(low, high, start, end, tuple(round(i * step, 12) for i in inside))


def logarithmic(values: Sequence[float], start: float, end: float, *, most: int = 8) -> Scale:
    """A scale of powers of ten around the positive values."""
    positive = [value for value in values if value > 0] or [1.0]
    low = math.floor(math.log10(min(positive)) + 1e-9)
    high = max(low + 1, math.ceil(math.log10(max(positive)) - 1e-9))
    every = max(1, math.ceil((high - low) / most))
    ticks = tuple(10.0**power for power in range(low, high + 1, every))
    return Scale(10.0**low, 10.0**high, start, end, ticks, log=True)


def _round_step(about: float) -> float:
    power = 10.0 ** math.floor(math.log10(about))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= about * (1 - 1e-9))


def short(value: float) -> str:
    """A tick's label."""
    if value != 0 and (abs(value) >= 1e5 or abs(value) < 1e-3):
        text = f"{value:.0e}"
        mantissa, _, exponent = text.partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:g}"
