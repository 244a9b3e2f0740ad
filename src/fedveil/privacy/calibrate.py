"""The noise that meets a target: the smallest multiplier whose accounted epsilon does not exceed it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fedveil.errors import InputError
from fedveil.privacy.accounting import epsilon_of
from fedveil.privacy.releases import Adversary, Plan, Release, Unit

SMALLEST, LARGEST = 1e-2, 1e6


def calibrate(
    make_releases: Callable[[float], Sequence[Release]],
    plan: Plan,
    delta: float,
    target: float,
    adversary: Adversary,
    unit: Unit,
    tolerance: float = 2e-3,
) -> float:
    """The noise multiplier for which epsilon against `adversary` is in [(1 - `tolerance`) target, target].

    Epsilon decreases in the multiplier, so the search brackets and then bisects on a logarithmic scale. Epsilon of
    the result never exceeds the target. Raises `InputError` where no multiplier meets it.
    """
    if not (math.isfinite(target) and target > 0):
        raise InputError("target_epsilon", target, "is not a positive number", "Use an epsilon above 0.")

    def epsilon(multiplier: float) -> float:
        value = epsilon_of(make_releases(multiplier), plan, delta, adversary, unit)
        if value is None:
            raise InputError(
                "target_epsilon",
                target,
                f"nothing can be proven for the {unit} against the {adversary}, whatever the noise",
                "Choose another adversary or unit, or a method that protects the releases visible to this one.",
            )
        return value

    high = 1.0
    while epsilon(high) > target:
        high *= 2
        if high > LARGEST:
            raise _unreachable(target, epsilon(LARGEST), adversary, unit)
    low = high / 2
    while epsilon(low) <= target:
        high, low = low, low / 2
        if low < SMALLEST:
            return high
    best = epsilon(high)
    while best < (1 - tolerance) * target and high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        value = epsilon(middle)
        if value <= target:
            high, best = middle, value
        else:
            low = middle
    return high


def _unreachable(target: float, reachable: float, adversary: Adversary, unit: Unit) -> InputError:
    """The error for an unreachable target, with the smallest epsilon that can be reached."""
    who = f"for the {unit} against the {adversary}"
    if math.isinf(reachable):
        problem = f"cannot be reached {who}: a release visible to it is not protected, so epsilon is infinite"
        return InputError("target_epsilon", target, problem, "Choose another adversary or another method.")
    return InputError(
        "target_epsilon",
        target,
        f"cannot be reached {who}: the largest noise gives epsilon {reachable:.4g}",
        f"Use {reachable:.4g} or more, or fewer rounds.",
    )
