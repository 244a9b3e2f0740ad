"""The interpretation of epsilon: the grades of the privacy statement and of the report, and the odds of a guess.

For an (epsilon, delta)-DP mechanism and a person who participated with probability 1/2, no test of its output is
correct more often than (e^epsilon + delta) / (1 + e^epsilon) (Kairouz, Oh, Viswanath 2015, Theorem 2.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "fair", "weak", "bad"]


@dataclass(frozen=True)
class Grade:
    """A grade of the scale: the word for epsilon up to `limit`."""

    limit: float
    word: str
    band: str
    level: Level


SCALE = (
    Grade(1.0, "strong protection", "strong", "good"),
    Grade(3.0, "moderate protection", "moderate", "fair"),
    Grade(10.0, "limited protection", "limited", "weak"),
    Grade(math.inf, "too large to be called protection", "too large to protect", "bad"),
)
_NOTHING = Grade(math.inf, "nothing proven", "nothing proven", "bad")
_DELTA = Grade(math.inf, "delta is too large for this to be called protection", "delta too large", "bad")


def grade(epsilon: float | None, delta: float | None = None, units: int = 1) -> Grade:
    """The word for an epsilon, given how many units the statement is about.

    Args:
        epsilon: None where nothing is proven.
        delta: The delta of the same guarantee.
        units: Number of participating clients or records.
    """
    if epsilon is None:
        return _NOTHING
    found = next(step for step in SCALE if epsilon <= step.limit)
    if found is not SCALE[-1] and delta is not None and exposes_one(delta, units):
        return _DELTA
    return found


def exposes_one(delta: float, units: int) -> bool:
    """Whether this delta permits a mechanism that publishes one of the units; then no epsilon is protection."""
    return delta * units >= 1


def fewest_records(clients: int, smallest: int, largest: int) -> int:
    """The least number of records of so many clients, of which one has `largest` and none fewer than `smallest`."""
    return (clients - 1) * smallest + max(smallest, largest)


NEARLY_CERTAIN = 0.99999  # a bound on a right guess above it excludes nothing


def guess_accuracy(epsilon: float, delta: float) -> float:
    """The largest possible accuracy of guessing whether a unit participated, with prior probability 1/2.

    Guarantees:
        Never below the accuracy of any test (`tests/unit/privacy/test_meaning.py`).
    """
    if epsilon > 700:  # e^epsilon is beyond floating point
        return 1.0
    grown = math.exp(epsilon)
    return min(1.0, (grown + delta) / (1 + grown))


def rounded_up(share: float) -> str:
    """A percentage rounded up: 95.26 % is "95.3 %", and only 1 is "100 %"."""
    for digits in (0, 1, 2, 3):
        step = 10.0**-digits
        value = math.ceil(100 * share / step - 1e-9) * step
        if value < 100 - step / 2 or share >= 1:
            if digits == 0 and value > 90 and share < 1:
                continue  # use one more digit
            return f"{value:.{digits}f} %"
    return "more than 99.999 %" if share < 1 else "100 %"


def plain(theorem: str) -> str:
    """The name of a proof in plain words."""
    visible = "over rounds whose participants are visible"
    theorem = theorem.replace(
        "mixture over seen participation of Poisson-sampled batches",
        f"composition of Poisson-sampled batches {visible}",
    )
    return theorem.replace("mixture over seen participation", f"composition {visible}")


def sampler_in_words(sampler: str) -> str:
    """`Guarantee.sampler` in plain words."""
    clients, _, records = sampler.partition(", ")
    kinds = [_DRAWN.get(kind, kind) for kind in clients.removesuffix(" clients").split(" + ")]
    drawn = [" or ".join(kinds), *(["records drawn one by one"] if "poisson" in records else [])]
    return "; ".join(drawn)


_DRAWN = {
    "fixed": "clients drawn, a fixed number in each round",
    "poisson": "clients drawn one by one",
    "all": "all clients in every round",
    "none": "no rounds",
}
