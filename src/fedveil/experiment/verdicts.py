"""Whether a published table is reproduced, by the stated `RULE`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np
from scipy.special import stdtrit

from fedveil.streams import named_stream

Verdict = Literal["level", "order", "missed", "not run"]
Proven = Literal["proven", "not proven", "not run"]
# How far a score of an attack may be from the published one. KL is not among them: its classifier is another one here.
ATTACK_TOLERANCES = {
    "mse": 0.25,
    "psnr": 1.0,
    "ssim": 0.05,
    "lpips": 0.05,
    "rouge1": 5.0,
    "rouge2": 5.0,
    "rougeL": 5.0,
    "basic-mia": 0.03,
    "ml-leaks": 0.03,
    "white-box": 0.03,
}
_CLAIM_SLACK = 0.05
_LEAST_TAU = 0.6  # at most one pair in five is reversed
_LEAST_SHARE = 0.8
_DRAWS = 1000
RULE = f"""\
A row has the published **level** if its mean is within the larger of the table's tolerance and the mean's 95 % interval
over seeds (Student's t), which is printed with it, since a wide one is easily met. One seed has no interval: there the
tolerance alone decides. A table has the level if at least {100 * _LEAST_SHARE:g} % of its rows that were run have it.
Where a text can be read in several ways, each reading is judged by itself.

A row that misses the level has the **order** if it stands in the published order to every other row of its group.

The order of a table is reproduced if Kendall's tau over the pairs of one group whose published values differ is at
least {_LEAST_TAU:g}, where equal means count as neither right nor reversed, and if with several seeds of every row its
95 % interval lies above 0. For the interval each row's mean is drawn {_DRAWS} times from Student's t about it, as wide
as its seeds say. Where a row has one seed there is no interval, and an order may be chance.

Scores of **attacks** are judged in the same way, with these tolerances: MSE {ATTACK_TOLERANCES["mse"]:g}, PSNR
{ATTACK_TOLERANCES["psnr"]:g} dB, SSIM and LPIPS {ATTACK_TOLERANCES["ssim"]:g}, ROUGE {ATTACK_TOLERANCES["rouge1"]:g}
points, accuracy of membership inference {100 * ATTACK_TOLERANCES["basic-mia"]:g} points. KL is not judged: its
classifier is another one here.

An **epsilon** that a paper claims is proven if the ledger of the run, for the claimed unit and adversary, is at most
{100 * _CLAIM_SLACK:g} % above it; where the ledger has another epsilon or none, it is not proven."""


@dataclass(frozen=True)
class Measured:
    """A row beside its published value, one number per seed."""

    row: str
    group: str
    published: float | None
    values: tuple[float, ...]
    seconds: float = 0.0

    @property
    def mean(self) -> float | None:
        return fmean(self.values) if self.values else None

    @property
    def half_width(self) -> float | None:
        """Of the mean's 95 % interval; None with fewer than two seeds."""
        return half_width(self.values)


@dataclass(frozen=True)
class Order:
    """Kendall's tau over the pairs of rows in one group, with its interval where there are several seeds."""

    tau: float | None
    low: float | None
    high: float | None
    pairs: int

    @property
    def reproduced(self) -> bool:
        return self.tau is not None and self.tau >= _LEAST_TAU and (self.low is None or self.low > 0)

    def to_json(self) -> dict[str, Any]:
        interval = None if self.low is None else [self.low, self.high]
        return {
            "tau": self.tau,
            "interval": interval,
            "pairs": self.pairs,
            "published_order_reproduced": self.reproduced,
        }


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean by Student's t."""
    if len(values) < 2:
        return None
    return float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values))


def reaches_level(row: Measured, tolerance: float) -> bool:
    if row.mean is None or row.published is None:
        return False
    return abs(row.mean - row.published) <= max(tolerance, row.half_width or 0.0)


def verdicts(rows: Sequence[Measured], tolerance: float) -> dict[str, Verdict]:
    """The verdict of each row by its name; rows without a published value are judged by nothing and left out."""
    found: dict[str, Verdict] = {}
    for row in rows:
        if row.published is None:
            continue
        if row.mean is None:
            found[row.row] = "not run"
        elif reaches_level(row, tolerance):
            found[row.row] = "level"
        else:
            signs = [_sign(a, b) for a, b in _pairs(rows) if row in (a, b)]
            found[row.row] = "order" if signs and min(signs) > 0 else "missed"
    return found


def order_of(rows: Sequence[Measured]) -> Order:
    """The order of the rows that were run."""
    signs = [_sign(a, b) for a, b in _pairs(rows)]
    if not signs:
        return Order(None, None, None, 0)
    taus = _drawn(rows) if min(len(row.values) for row in rows if row.values) > 1 else []
    low, high = (float(q) for q in np.quantile(taus, [0.025, 0.975])) if taus else (None, None)
    return Order(fmean(signs), low, high, len(signs))


def _pairs(rows: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """Pairs whose order is published: of one group, both run, with different published values."""
    return [
        (a, b)
        for a, b in itertools.combinations(rows, 2)
        if a.group == b.group and a.values and b.values and None not in (a.published, b.published)
        if a.published != b.published
    ]


def _sign(a: Measured, b: Measured) -> int:
    """1 where the means are in the published order, -1 where they are reversed, 0 where they are equal."""
    assert a.published is not None
    assert b.published is not None
    gap = fmean(a.values) - fmean(b.values)
    return int(math.copysign(1, gap * (a.published - b.published))) if gap else 0


def _drawn(rows: Sequence[Measured]) -> list[float]:
    """Tau with each row's mean drawn from Student's t: a bootstrap of two or three seeds would be far too narrow."""
    rng = named_stream(0, "tau")
    draws = []
    for _ in range(_DRAWS):
        again = [replace(row, values=(_likely_mean(row, rng),)) if row.values else row for row in rows]
        draws.append(fmean(_sign(a, b) for a, b in _pairs(again)))
    return draws


def _likely_mean(row: Measured, rng: np.random.Generator) -> float:
    count = len(row.values)
    return fmean(row.values) + float(rng.standard_t(count - 1)) * stdev(row.values) / math.sqrt(count)


def judge_claim(claimed: float, found: Sequence[float | None]) -> Proven:
    """Whether every run proves the claimed epsilon, up to rounding and small differences in batches."""
    if not found:
        return "not run"
    right = all(value is not None and value <= (1 + _CLAIM_SLACK) * claimed for value in found)
    return "proven" if right else "not proven"


def level_reproduced(found: Sequence[Verdict]) -> bool:
    """Of a table: enough of the rows that were run have the published level."""
    run = [verdict for verdict in found if verdict != "not run"]
    return bool(run) and sum(verdict == "level" for verdict in run) >= _LEAST_SHARE * len(run)
