"""The audit of the last bits: which floating-point numbers can noise alone produce?

The floating-point sum of a value and noise reaches some numbers that noise alone cannot (Mironov 2012). The attacker
knows the noise's standard deviation and its post-processing. It counts the values of a release that no draw can
produce, and guesses "canary" if there are many. The counts with and without a canary give a lower bound on epsilon as
in any other audit. Noise on a grid is not affected: docs/noise.md.
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
_NEIGHBOURS = 4  # each rounding changes a number by at most half a unit in the last place


@dataclass(frozen=True)
class FloatNoise:
    """A float32 draw times `std` in float32, then times each of `factors`, rounded to float32 every time."""

    std: float
    factors: tuple[float, ...] = ()
    single: bool = True
    """Whether factors are rounded to float32 as in PyTorch; otherwise products are computed in float64."""

    def __call__(self, draws: Singles) -> Singles:
        found = np.float32(self.std) * draws
        for factor in self.factors:
            found = (
                np.float32(factor) * found
                if self.single
                else (factor * found.astype(np.float64)).astype(np.float32)
            )
        return found

    def reachable(self, observed: Singles) -> Flags:
        """Which numbers some draw can produce."""
        scale = self.std * math.prod(self.factors)
        middle = (observed.astype(np.float64) / scale).astype(np.float32)
        hit: Flags = self(middle) == observed
        for direction in (-np.inf, np.inf):
            draws = middle
            for _ in range(_NEIGHBOURS):
                draws = np.nextafter(draws, np.float32(direction))
                hit |= self(draws) == observed
        return hit


def unreachable_share(observed: Singles, noise: FloatNoise) -> Floats:
    """The share of each row's values `[n, d]` that noise alone cannot produce; zeros count as not sent."""
    sent = observed != 0
    missed = sent & ~noise.reachable(observed)
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

    The noise model that best separates the first fifth of both arms is tested on the rest.
    """
    arms = (with_canary, without_canary)
    first = [arm[: int(CHOOSING * len(arm))] for arm in arms]
    best = max(noises, key=lambda noise: _separation(*(unreachable_share(arm, noise) for arm in first)))
    inside, outside = (unreachable_share(arm, best) for arm in arms)
    finding = audit_samples(inside, outside, delta=delta, confidence=confidence, choosing=CHOOSING)
    return replace(finding, kind=KIND, estimate=None, estimate_note="")


def _separation(inside: Floats, outside: Floats) -> float:
    """The distance between the arms' means, in units of their spread."""
    spread = math.sqrt(float(inside.var() + outside.var())) + 1e-9
    return abs(float(inside.mean() - outside.mean())) / spread


def float_noises(method: AnyMethod, plan: Plan) -> list[FloatNoise]:
    """The noise that the method would have if it were added in floating point, according to its settings."""
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
            yield max(weighted)[1]  # of the planned cohort size, which is audited


def _setting(method: object, name: str) -> float | None:
    """A setting of a method, of its wrappers or of the method inside."""
    found = getattr(method, name, None)
    if isinstance(found, int | float):
        return float(found)
    if is_dataclass(method):
        for field in fields(method):
            inner = getattr(method, field.name)
            if is_dataclass(inner) and (found := _setting(inner, name)) is not None:
                return found
    return None
