"""Auditing with a single run (Steinke, Nasr, Jagielski 2023).

m canaries are included or not by independent fair coins; an auditor who observes the result guesses r of the
coins and abstains on the rest. If the mechanism is (epsilon, delta)-DP, the number of correct guesses exceeds that of
r coins of bias e^eps / (1 + e^eps) only with small probability. r is fixed before the scores are observed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

from fedveil.audits.findings import ALARM, AuditFinding
from fedveil.errors import InputError
from fedveil.streams import Stream

Floats = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
SumRelease = Callable[[Tensor, Sequence[Stream]], Tensor]
"""Maps contributions `[n, d]` of n records and a client's noise streams to their release, `[d]`."""

_LARGEST_EPSILON = 50.0


def p_value(epsilon: float, right: int, guesses: int, canaries: int, delta: float) -> float:
    """A bound on the probability of `right` or more correct guesses under (epsilon, delta)-DP."""
    bias = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, bias))
    if right == 0 or delta == 0:
        return min(1.0, tail)
    steps = np.arange(1, right + 1)
    below = np.cumsum(binom.pmf(right - steps, guesses, bias))  # P[right - i <= Bin < right]
    return min(1.0, tail + 2 * canaries * delta * float((below / steps).max()))


def lower_bound(right: int, guesses: int, canaries: int, delta: float, confidence: float) -> float:
    """The largest epsilon that this many correct guesses refute with `confidence`."""
    level = 1 - confidence
    if p_value(0.0, right, guesses, canaries, delta) > level:
        return 0.0
    low, high = 0.0, _LARGEST_EPSILON
    if p_value(high, right, guesses, canaries, delta) <= level:
        return high
    while high - low > 1e-6:
        middle = (low + high) / 2
        refuted = p_value(middle, right, guesses, canaries, delta) <= level
        low, high = (middle, high) if refuted else (low, middle)
    return low


def one_run(
    scores: Floats, included: Bools, *, guesses: int, delta: float, confidence: float = 0.95
) -> AuditFinding:
    """Guess "in" for the highest `guesses`/2 scores, "out" for the lowest, and bound epsilon by the result.

    `scores[i]` should be high if canary i seems to be included; `included[i]` is its coin. `guesses` must be
    chosen independently of the scores.
    """
    scores = np.asarray(scores, dtype=np.float64)
    included = np.asarray(included, dtype=np.bool_)
    m = len(scores)
    if scores.shape != included.shape or scores.ndim != 1 or not np.isfinite(scores).all():
        raise InputError(
            "scores", scores.shape, "do not match the coins", "Give one finite score per canary."
        )
    if not 2 <= guesses <= m or guesses % 2:
        raise InputError("guesses", guesses, "is not possible", f"Use an even number from 2 to {m}.")
    if not (0 < confidence < 1 and 0 <= delta < 1):
        raise InputError("confidence", confidence, "is not a probability", "Use 0.95.")
    order = np.argsort(scores, kind="stable")
    half = guesses // 2
    right = int(included[order[-half:]].sum() + (~included[order[:half]]).sum())
    bound, sure = (lower_bound(right, guesses, m, delta, c) for c in (confidence, 1 - ALARM))
    return AuditFinding("one-run canary records", bound, confidence, m, delta, sure_bound=sure)


def random_canaries(count: int, dimension: int, norm: float, stream: Stream) -> Tensor:
    """`count` contributions of length `norm` in independent random directions, `[count, dimension]`."""
    rows = [torch.from_numpy(stream.standard_normal(dimension)).float() for _ in range(count)]
    stacked = torch.stack(rows)
    lengths: Tensor = torch.linalg.vector_norm(stacked, dim=1, keepdim=True)
    return stacked * (norm / lengths)


def audit_sum(
    release: SumRelease,
    *,
    dimension: int,
    clip: float,
    coins: Stream,
    noise: Sequence[Stream],
    delta: float,
    canaries: int = 1000,
    guesses: int = 100,
    confidence: float = 0.95,
    exaggeration: float = 10.0,
) -> AuditFinding:
    """Audit a mechanism that clips and sums contributions and adds noise, from a single release.

    Canaries are `exaggeration` times longer than `clip`, so that clipping is audited too.

    Args:
        release: The mechanism: contributions and streams to the noisy sum.
        dimension: Number of coordinates of a contribution.
        clip: The declared clip.
        coins: The stream that decides which canaries are in the sum.
        noise: The streams of the mechanism.
        delta: The delta of the bound.
        canaries: Number of canaries.
        guesses: Number of canaries that are guessed; on the rest the audit abstains.
        confidence: The confidence of the bound.
        exaggeration: A canary's norm in units of the clip.

    Returns:
        A lower bound of epsilon.
    """
    directions = random_canaries(canaries, dimension, 1.0, coins)
    included = np.asarray(coins.random(canaries) < 0.5, dtype=np.bool_)
    released = release(directions[torch.from_numpy(included)] * (clip * exaggeration), noise)
    scores = (directions.double() @ released.double().flatten()).numpy()
    return one_run(scores, included, guesses=guesses, delta=delta, confidence=confidence)
