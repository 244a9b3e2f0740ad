"""Canary clients: does an upload disclose whether one client's update was in it?

A Dirac canary is an update with all its weight on one coordinate. The same upload is released many times with
the canary and many times without; the best threshold on that coordinate is chosen on one part of the samples
and its error rates are bounded on the other part by Clopper-Pearson intervals. Any (epsilon, delta)-DP
mechanism has false positives and negatives of at least (1 - delta - FNR) <= e^eps FPR, both ways round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import beta, norm
from torch import Tensor

from fedveil.audits.findings import ALARM, AuditFinding
from fedveil.errors import InputError
from fedveil.streams import ClientStreams, Stream

Floats = np.ndarray[Any, np.dtype[np.float64]]
UploadRelease = Callable[[Tensor, Sequence[Stream]], Tensor]
"""Maps updates `[n, d]` of n clients and their n noise streams to the observed uploads, `[n, d]`."""

GDP_NOTE = "assumes that the noise is Gaussian; it can exceed the truth"
_CHUNK_VALUES = 2**22


def clopper_pearson_upper(events: int, trials: int, confidence: float) -> float:
    """An upper bound on a probability of which `events` in `trials` were observed, one-sided."""
    if trials <= 0:
        return 1.0
    return 1.0 if events >= trials else float(beta.ppf(confidence, events + 1, trials - events))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon at `delta` of a mu-GDP mechanism, whose arms are as distinguishable as N(0, 1) and N(`mu`, 1)."""
    if mu <= 0:
        return 0.0

    def excess(eps: float) -> float:
        second = math.exp(min(0.0, eps + float(norm.logcdf(-mu / 2 - eps / mu))))  # above 0 by rounding only
        return float(norm.cdf(mu / 2 - eps / mu)) - second - delta

    if excess(0.0) <= 0:
        return 0.0
    return float(brentq(excess, 0.0, mu * mu / 2 + 40 * mu + 1))


def declared_p_value(inside: Floats, outside: Floats, multiplier: float) -> float:
    """The p-value of arms at this distance under a Gaussian mechanism of `multiplier` or more.

    Under the declaration the arms are normal with the same spread s and means at most s / `multiplier` apart. The
    distance in units of the pooled spread is then approximately normal, for 20 samples and more.
    """
    n, m = len(inside), len(outside)
    spread = math.sqrt(((n - 1) * inside.var(ddof=1) + (m - 1) * outside.var(ddof=1)) / (n + m - 2))
    if spread == 0:
        return 0.0 if inside.mean() != outside.mean() else 1.0
    declared = 1 / multiplier
    error = math.sqrt(1 / n + 1 / m + declared**2 / (2 * (n + m - 2)))
    return float(norm.sf((abs(inside.mean() - outside.mean()) / spread - declared) / error))


def independence_p_value(one: Floats, other: Floats) -> float:
    """The p-value of noise with this correlation, `[n, d]` each, if all of it were independent and normal.

    Each upload may be correct by itself while two of them have the same noise, which their difference cancels.
    Coordinates that were not sent are zero in both and are ignored.
    """
    first, second = (np.asarray(rows, dtype=np.float64).ravel() for rows in (one, other))
    sent = (first != 0) & (second != 0)
    first, second = first[sent], second[sent]
    sizes = float(np.linalg.norm(first) * np.linalg.norm(second))
    if sizes == 0:
        return 1.0
    correlation = float(first @ second) / sizes
    return float(2 * norm.sf(abs(correlation) * math.sqrt(len(first))))


def audit_samples(
    with_canary: Floats,
    without_canary: Floats,
    *,
    delta: float,
    confidence: float = 0.95,
    choosing: float = 0.2,
    declared_multiplier: float | None = None,
) -> AuditFinding:
    """A lower bound on epsilon from observations with and without the canary (higher means "with").

    The first `choosing` share of each arm chooses the threshold; the rest, independent of it, gives the bound.
    With `declared_multiplier` the arms are also tested against the declared Gaussian mechanism.
    """
    arms = [np.asarray(arm, dtype=np.float64) for arm in (with_canary, without_canary)]
    if any(arm.ndim != 1 or len(arm) < 20 or not np.isfinite(arm).all() for arm in arms):
        raise InputError("samples", [len(a) for a in arms], "are too few or not finite", "Use 20 or more.")
    if not (0 < confidence < 1 and 0 <= delta < 1 and 0 < choosing < 1):
        raise InputError("confidence", confidence, "is not a probability", "Use 0.95.")
    parts = [(arm[: int(choosing * len(arm))], arm[int(choosing * len(arm)) :]) for arm in arms]
    (pick_in, test_in), (pick_out, test_out) = parts
    threshold, flipped = _best_threshold(pick_in, pick_out, (len(test_in), len(test_out)), delta, confidence)
    errors, trials = _errors(test_in, test_out, threshold), (len(test_in), len(test_out))
    bound, sure = (_bound(errors, trials, delta, c)[int(flipped)] for c in (confidence, 1 - ALARM))
    spread = math.sqrt((arms[0].var(ddof=1) + arms[1].var(ddof=1)) / 2)
    shift = float(arms[0].mean() - arms[1].mean())
    estimate = gaussian_epsilon(abs(shift) / spread, delta) if spread > 0 else math.inf
    samples = len(arms[0]) + len(arms[1])
    p = None if declared_multiplier is None else declared_p_value(arms[0], arms[1], declared_multiplier)
    return AuditFinding("canary clients", bound, confidence, samples, delta, estimate, GDP_NOTE, p, sure)


def _errors(inside: Floats, outside: Floats, threshold: float) -> tuple[int, int]:
    """False negatives and false positives of the test "in if at least the threshold"."""
    return int((inside < threshold).sum()), int((outside >= threshold).sum())


def _bound(
    errors: tuple[int, int], trials: tuple[int, int], delta: float, confidence: float
) -> tuple[float, float]:
    """The bounds of the two directions; each rate's interval takes half of the permitted error."""
    each = 1 - (1 - confidence) / 2
    fnr, fpr = (clopper_pearson_upper(e, n, each) for e, n in zip(errors, trials, strict=True))
    forward = math.log((1 - delta - fnr) / fpr) if 1 - delta - fnr > fpr else 0.0
    backward = math.log((1 - delta - fpr) / fnr) if 1 - delta - fpr > fnr else 0.0
    return forward, backward


def _best_threshold(
    inside: Floats, outside: Floats, trials: tuple[int, int], delta: float, confidence: float
) -> tuple[float, bool]:
    """The threshold and direction with the largest bound at the error rates predicted by a normal fit.

    The fit extrapolates to tails beyond the few choosing samples; a bad fit reduces power, never validity.
    """
    spread = max(float(inside.std()), float(outside.std()), 1e-300)
    low, high = float(outside.mean()), float(inside.mean())
    thresholds = np.linspace(min(low, high) - 5 * spread, max(low, high) + 5 * spread, 201)
    each = 1 - (1 - confidence) / 2
    upper = []
    for rates, n in (
        (norm.cdf((thresholds - high) / spread), trials[0]),
        (norm.sf((thresholds - low) / spread), trials[1]),
    ):
        events = np.minimum(np.round(rates * n), n - 1)
        upper.append(beta.ppf(each, events + 1, n - events))
    fnr, fpr = upper
    forward = np.log(np.maximum(1 - delta - fnr, 1e-300) / fpr)
    backward = np.log(np.maximum(1 - delta - fpr, 1e-300) / fnr)
    flipped = bool(backward.max() > forward.max())
    return float(thresholds[int((backward if flipped else forward).argmax())]), flipped


def dirac_canary(dimension: int, size: float) -> Tensor:
    """An update `[dimension]` with all its weight on the first coordinate, which `_observe` reads."""
    canary = torch.zeros(dimension)
    canary[0] = size
    return canary


def audit_upload(
    release: UploadRelease,
    *,
    dimension: int,
    clip: float,
    seed: int,
    delta: float,
    samples: int = 20_000,
    confidence: float = 0.95,
    exaggeration: float = 10.0,
    declared_multiplier: float | None = None,
) -> AuditFinding:
    """Release `samples` uploads with a canary and as many with an empty update, and distinguish them.

    The canary is `exaggeration` times longer than `clip`, so that clipping is audited too.

    Args:
        release: The mechanism: updates and streams to what is sent.
        dimension: Number of coordinates of an update.
        clip: The declared clip.
        seed: The seed of canaries and coins.
        delta: The delta of the bound.
        samples: Number of uploads of each kind.
        confidence: The confidence of the bound.
        exaggeration: The canary's norm in units of the clip.
        declared_multiplier: The declared noise multiplier, to test it too.

    Returns:
        A lower bound of epsilon, and the test of the declared noise.
    """
    canary = dirac_canary(dimension, clip * exaggeration)
    arms = [
        _observe(release, update, samples, ClientStreams(seed, arm, ()))
        for arm, update in enumerate((canary, torch.zeros(dimension)))
    ]
    return audit_samples(
        arms[0], arms[1], delta=delta, confidence=confidence, declared_multiplier=declared_multiplier
    )


def _observe(release: UploadRelease, update: Tensor, samples: int, streams: ClientStreams) -> Floats:
    """The canary's coordinate in `samples` releases of the update, in chunks that fit into memory."""
    chunk = max(1, _CHUNK_VALUES // len(update))
    seen: list[Floats] = []
    for start in range(0, samples, chunk):
        clients = tuple(range(start, min(start + chunk, samples)))
        here = ClientStreams(streams.seed, streams.round, clients)
        uploads = release(update.expand(len(clients), -1), here.noise("audit"))
        seen.append(uploads[:, 0].double().numpy())
    return np.concatenate(seen)
