"""The audit of the last bits: which floating-point numbers can noise alone reach?

Noise that is added in floating point reaches some numbers only if something was added to (Mironov 2012). The attacker
knows the noise's standard deviation and what is done to it afterwards. It counts the values of a release that no draw
can lead to, and guesses "something was added" if there are many. The counts with and without a canary become a lower
bound on epsilon as in any other audit. Noise on a grid shows nothing: docs/noise.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from fedveil.audits.canaries import audit_samples
from fedveil.audits.findings import AuditFinding
from fedveil.methods.method import AnyMethod
from fedveil.privacy.releases import GaussianNoise, Plan, RandomGaussianNoise

Floats = np.ndarray[Any, np.dtype[np.float64]]
Singles = np.ndarray[Any, np.dtype[np.float32]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

KIND = "reachable values"
CHOOSING = 0.2
_NEIGHBOURS = 4  # each rounding moves a number by at most half a unit in the last place


@dataclass(frozen=True)
class FloatNoise:
    """A float32 draw times `std` in float32, then times each of `factors`, rounded to float32 every time."""

    std: float
    factors: tuple[float, ...] = ()
    single: bool = True
    """Whether factors are rounded to float32 as well, as PyTorch does it; else products are formed in float64."""

    def __call__(self, draws: Singles) -> Singles:
        found = np.float32(self.std) * draws
        for factor in self.factors:
            found = (
                np.float32(factor) * found
                if self.single
                else (factor * found.astype(np.float64)).astype(np.float32)
            )
        return found

    def reachable(self, seen: Singles) -> Flags:
        """Which numbers some draw leads to."""
        scale = self.std * math.prod(self.factors)
        middle = (seen.astype(np.float64) / scale).astype(np.float32)
        hit: Flags = self(middle) == seen
        for direction in (-np.inf, np.inf):
            draws = middle
            for _ in range(_NEIGHBOURS):
                draws = np.nextafter(draws, np.float32(direction))
                hit |= self(draws) == seen
        return hit


def unreachable_share(seen: Singles, noise: FloatNoise) -> Floats:
    """The share of each row's values `[n, d]` that the noise alone cannot lead to; zeros were not sent."""
    sent = seen != 0
    missed = sent & ~noise.reachable(seen)
    share: Floats = missed.sum(1) / np.maximum(sent.sum(1), 1)
    return share


def audit_bits(
    with_canary: Singles,
    without_canary: Singles,
    noises: Sequence[FloatNoise],
    *,
    delta: float,
    confidence: float = 0.95,
) -> AuditFinding:
    """A lower bound on epsilon from the bits of releases `[n, d]` with and without a canary.

    The kind of noise that separates the first fifth of both arms best is tested on the rest.
    """
    arms = (with_canary, without_canary)
    first = [arm[: int(CHOOSING * len(arm))] for arm in arms]
    best = max(noises, key=lambda noise: _separation(*(unreachable_share(arm, noise) for arm in first)))
    inside, outside = (unreachable_share(arm, best) for arm in arms)
    finding = audit_samples(inside, outside, delta=delta, confidence=confidence, choosing=CHOOSING)
    return replace(finding, kind=KIND, estimate=None, estimate_note="")


def _separation(inside: Floats, outside: Floats) -> float:
    """How far the arms are apart, in units of their spread."""
    spread = math.sqrt(float(inside.var() + outside.var())) + 1e-9
    return abs(float(inside.mean() - outside.mean())) / spread


def float_noises(method: AnyMethod, plan: Plan) -> list[FloatNoise]:
    """What the method's noise would be if it were added in floating point, by all that its settings tell."""
    clip = _setting(method, "clip")
    if clip is None or not 0 < clip < math.inf:
        return []
    multipliers = set(_declared(method, plan))
    if (declared := _setting(method, "noise_multiplier")) is not None:
        multipliers |= {declared, declared / math.sqrt(plan.cohort)}
    rates = {_setting(method, "lr"), _setting(method, "server_lr")} - {None, 1.0}
    after: list[tuple[float, ...]] = [(), *((rate,) for rate in rates if rate)]
    mean = 1 / plan.cohort
    after += [(mean, *factors) for factors in after] + [(mean * rate,) for rate in rates if rate]
    return [
        FloatNoise(clip * multiplier, factors, single)
        for multiplier in sorted(multipliers)
        for factors in after
        for single in ((True, False) if factors else (True,))
        if multiplier > 0
    ]


def _declared(method: AnyMethod, plan: Plan) -> Iterator[float]:
    for release in method.releases(plan):
        if isinstance(release.protection, GaussianNoise):
            yield release.protection.multiplier
        if isinstance(release.protection, RandomGaussianNoise):
            weighted = zip(release.protection.weights, release.protection.multipliers, strict=True)
            yield max(weighted)[1]  # of a cohort as planned, which is what is audited


def _setting(method: object, name: str) -> float | None:
    """A setting of a method, or of what it is wrapped around or in."""
    found = getattr(method, name, None)
    if isinstance(found, int | float):
        return float(found)
    if is_dataclass(method):
        for field in fields(method):
            inner = getattr(method, field.name)
            if is_dataclass(inner) and (found := _setting(inner, name)) is not None:
                return found
    return None
