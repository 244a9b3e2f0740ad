"""Exact divergences of small mechanisms: two distributions over finitely many outputs, and what tells them apart.

Continuous outputs are cut into cells whose probabilities are exact. Cutting is post-processing, so every divergence
found here is a lower bound of the true one: an accountant that states less is wrong, whatever the cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import laplace, norm

Floats = np.ndarray[Any, np.dtype[np.float64]]
Density = tuple[tuple[float, float], ...]  # (weight, centre) of the components of a mixture


@dataclass(frozen=True)
class Pair:
    """Output probabilities under a data set (`p`) and under its neighbour (`q`), cell by cell."""

    p: Floats
    q: Floats

    def delta(self, epsilon: float) -> float:
        """The hockey-stick divergence, the larger of both directions."""
        factor = np.exp(epsilon)
        forth = np.maximum(self.p - factor * self.q, 0).sum()
        back = np.maximum(self.q - factor * self.p, 0).sum()
        return float(max(forth, back))

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon at which the pair is (epsilon, delta)-indistinguishable."""
        if self.delta(0.0) <= delta:
            return 0.0
        return float(brentq(lambda e: self.delta(e) - delta, 0.0, 600.0, xtol=1e-10))

    def renyi(self, order: float) -> float:
        """The Renyi divergence, the larger of both directions."""
        with np.errstate(divide="ignore"):
            p, q = np.log(self.p), np.log(self.q)
        kept = np.isfinite(p) & np.isfinite(q)
        sums = [np.logaddexp.reduce(order * a[kept] + (1 - order) * b[kept]) for a, b in ((p, q), (q, p))]
        return float(max(sums) / (order - 1))

    def then(self, *others: Pair, cells: int = 300) -> Pair:
        """Independent outputs one after another."""
        total = self.coarse(cells)
        for other in others:
            more = other.coarse(cells)
            total = Pair(np.outer(total.p, more.p).ravel(), np.outer(total.q, more.q).ravel()).coarse(cells)
        return total

    def coarse(self, cells: int) -> Pair:
        """At most about so many cells: those of nearly equal likelihood ratio are told apart no more."""
        if len(self.p) <= cells:
            return self
        kept = (self.p > 0) | (self.q > 0)
        p, q = self.p[kept], self.q[kept]
        with np.errstate(divide="ignore"):
            ratio = np.clip(np.log(p) - np.log(q), -200, 200)
        # Cells are narrow where probability lies: half of them by rank of mass, half by value.
        order = np.argsort(ratio)
        mass = np.cumsum((p + q)[order]) / (p + q).sum()
        low, high = ratio.min(), ratio.max() + 1e-12
        by_mass = np.minimum((mass * cells / 2).astype(int), cells // 2)
        by_value = ((ratio[order] - low) / (high - low) * cells * 4).astype(int)
        label = np.unique(by_mass * (4 * cells + 1) + by_value, return_inverse=True)[1]
        merged = [np.bincount(label, x[order]).astype(np.float64) for x in (p, q)]
        return Pair(*merged)

    def sometimes(self, rate: float) -> Pair:
        """With probability `rate` this pair, otherwise an output that says so and nothing else."""
        if rate == 1:
            return self
        return either((rate, self), (1 - rate, Pair(np.ones(1), np.ones(1))))


def either(*branches: tuple[float, Pair]) -> Pair:
    """One of several pairs, by a draw that is the same for both data sets and that the output shows."""
    weighed = [(weight * pair.p, weight * pair.q) for weight, pair in branches]
    return Pair(np.concatenate([p for p, _ in weighed]), np.concatenate([q for _, q in weighed]))


def _cells(cdf: Callable[..., Any], sf: Callable[..., Any], density: Density, edges: Floats) -> Floats:
    """The probability of each cell, from whichever tail is the more exact."""
    total = np.zeros(len(edges) - 1)
    for weight, centre in density:
        left, right = edges[:-1] - centre, edges[1:] - centre
        total += weight * np.where(left < 0, cdf(right) - cdf(left), sf(left) - sf(right))
    return total


def _edges(densities: Sequence[Density], reach: float, cells: int, kinks: Sequence[float]) -> Floats:
    centres = [centre for density in densities for _, centre in density]
    inner = np.union1d(np.linspace(min(centres) - reach, max(centres) + reach, cells), np.asarray(kinks))
    return np.concatenate([[-np.inf], inner, [np.inf]])


def gaussian(p: Density, q: Density, sigma: float, cells: int = 4000) -> Pair:
    """Mixtures of normal distributions of deviation `sigma`."""
    edges = _edges([p, q], 9 * sigma, cells, ())
    first, second = (
        _cells(lambda x: norm.cdf(x, scale=sigma), lambda x: norm.sf(x, scale=sigma), density, edges)
        for density in (p, q)
    )
    return Pair(first, second)


def laplacian(p: Density, q: Density, scale: float, cells: int = 4000) -> Pair:
    """Mixtures of Laplace distributions."""
    kinks = [centre for density in (p, q) for _, centre in density]
    edges = _edges([p, q], 30 * scale, cells, kinks)
    first, second = (
        _cells(lambda x: laplace.cdf(x, scale=scale), lambda x: laplace.sf(x, scale=scale), density, edges)
        for density in (p, q)
    )
    return Pair(first, second)


def randomised_response(epsilon: float, delta: float = 0.0, rate: float = 1.0) -> Pair:
    """The worst (epsilon, delta)-DP mechanism, run on a record that is in a batch with probability `rate`."""
    heads = (1 - delta) / (1 + np.exp(-epsilon))
    tails = 1 - delta - heads
    present, absent = np.array([delta, heads, tails, 0.0]), np.array([0.0, tails, heads, delta])
    return Pair(rate * present + (1 - rate) * absent, absent)


def at(centre: float) -> Density:
    return ((1.0, centre),)


def mixed(rate: float, present: float, absent: float = 0.0) -> Density:
    """At `present` with probability `rate`, otherwise at `absent`."""
    return ((rate, present), (1 - rate, absent))
