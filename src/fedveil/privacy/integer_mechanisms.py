"""Mechanisms with integer noise, drawn exactly, so that floating-point rounding does not weaken the guarantee."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.privacy import noise
from fedveil.privacy.clipping import check_clip, check_level, check_streams, clip_rows
from fedveil.privacy.noise.integers import Ints, rational_variance
from fedveil.privacy.releases import ApproximateDP, ZeroConcentratedDP
from fedveil.streams import Stream
from fedveil.tree import Params, flatten, unflatten

if TYPE_CHECKING:
    from torch import Tensor

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Grid:
    """Unbiased rounding of clipped vectors to multiples of `spacing`, with a bound on the rounded norm.

    Random rounding can increase the norm. Draws longer than `l2` are rejected (conditional rounding, Kairouz, Liu,
    Steinke 2021), so the bounds `l2`, `l1` and `linf`, in grid steps, always hold. Zero rounds to zero, so they
    are the sensitivities under zero-out.
    """

    clip: float
    spacing: float
    dimension: int

    def __post_init__(self) -> None:
        check_clip(self.clip)
        check_clip(self.spacing)
        if self.dimension < 1:
            raise InputError(
                "dimension", self.dimension, "is not a positive number", "Use the number of parameters."
            )

    @property
    def l2(self) -> float:
        steps, root = self.clip / self.spacing, math.sqrt(self.dimension)
        likely = steps**2 + self.dimension / 4 + steps + root / 2  # exceeded in at most e^(-1/2) of draws
        return math.sqrt(min((steps + root) ** 2, likely))

    @property
    def l1(self) -> float:
        return min(self.l2**2, math.sqrt(self.dimension) * self.l2)  # integers: |x| <= x^2

    @property
    def linf(self) -> float:
        return float(math.ceil(self.clip / self.spacing))

    def round(self, row: Floats, stream: Stream) -> Ints:
        """`row` (float64, clipped) in grid steps, rounded at random; unbiased except for the rejections."""
        steps = row / self.spacing
        low = np.floor(steps)
        for _ in range(1000):
            rounded = (low + (stream.random(len(row)) < steps - low)).astype(np.int64)
            if float(np.square(rounded, dtype=np.float64).sum()) <= self.l2**2:
                return rounded
        return np.trunc(steps).astype(np.int64)  # towards zero, so never longer than the clip


def _to_grid(value: Params, grid: Grid, streams: Sequence[Stream]) -> list[Ints]:
    check_streams(value, streams)
    flat = flatten(clip_rows(value, grid.clip)).double().cpu().numpy()
    if flat.shape[1] != grid.dimension:
        raise InputError(
            "dimension", grid.dimension, f"the update has {flat.shape[1]} values", f"Use {flat.shape[1]}."
        )
    return [grid.round(row, stream) for row, stream in zip(flat, streams, strict=True)]


def _from_grid(levels: Tensor, spacing: float, like: Params) -> Params:
    first = next(iter(like.values()))
    return unflatten((levels.double() * spacing).to(first), like)


@dataclass(frozen=True)
class DiscreteGaussian:
    """Clip, round to a grid, add exact discrete Gaussian noise: clients send integers times `spacing`.

    The noise has `multiplier` times the L2 sensitivity after rounding. Per client it is 1/(2 multiplier^2)-zCDP
    (Canonne, Kamath, Steinke 2020, Theorem 14), without floating-point error.

    Args:
        clip: The largest L2 norm before rounding.
        multiplier: Standard deviation of the noise, in units of the sensitivity after rounding.
        spacing: The step of the grid.
        dimension: Number of coordinates.

    Guarantees:
        Noise has the exact distribution (`test_discrete_gaussian_distribution`), and rounding stays within the stated
        sensitivity (`test_rounding_stays_within_the_stated_sensitivity_and_is_unbiased`).
    """

    clip: float
    multiplier: float
    spacing: float
    dimension: int

    def __post_init__(self) -> None:
        check_level("multiplier", self.multiplier)
        rational_variance(self.multiplier * self.grid.l2)

    @property
    def grid(self) -> Grid:
        return Grid(self.clip, self.spacing, self.dimension)

    @property
    def std(self) -> float:
        return self.multiplier * self.grid.l2 * self.spacing

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params:
        std = self.multiplier * self.grid.l2
        noisy = [
            noise.add_discrete_gaussian(row, std, stream)
            for row, stream in zip(_to_grid(value, self.grid, streams), streams, strict=True)
        ]
        return _from_grid(torch.from_numpy(np.stack(noisy)), self.spacing, value)

    def protection(self) -> ZeroConcentratedDP:
        return ZeroConcentratedDP(0.5 / self.multiplier**2)


@dataclass(frozen=True)
class BinomialShare:
    """One client's share of the trials of a sum: clip, round to a grid, add Binomial(`trials`, 1/2) - `trials`/2.

    A single share gives no guarantee; the sum of all shares is a `Binomial`.
    """

    grid: Grid
    trials: int

    @property
    def largest(self) -> float:
        """The largest magnitude of a coordinate of an upload, in grid steps."""
        return self.trials / 2 + self.grid.linf

    def levels(self, value: Params, streams: Sequence[Stream]) -> Tensor:
        """The rounded and noisy rows `[K, d]` in grid steps."""
        noisy = [
            noise.add_binomial(row, self.trials, stream)
            for row, stream in zip(_to_grid(value, self.grid, streams), streams, strict=True)
        ]
        return torch.from_numpy(np.stack(noisy))

    def perturb(self, total: Params, streams: Sequence[Stream]) -> Params:
        """Add noise to a sum of rounded contributions `[K, ...]`, in grid steps; no noise if there are no trials."""
        if self.trials == 0:
            return total
        return {name: self._noisy(leaf, streams) for name, leaf in total.items()}

    def _noisy(self, levels: Tensor, streams: Sequence[Stream]) -> Tensor:
        rows = zip(levels.flatten(1).cpu().numpy(), streams, strict=True)
        noisy = [noise.add_binomial(row, self.trials, stream) for row, stream in rows]
        return torch.from_numpy(np.stack(noisy)).reshape(levels.shape).to(levels.device)

    def times(self, count: int) -> BinomialShare:
        """The noise of `count` such shares together."""
        return replace(self, trials=count * self.trials)


def least_trials(grid: Grid, delta: float) -> int:
    """The smallest number of trials, a multiple of 8, that meets the condition of cpSGD's Theorem 1 at p = 1/2."""
    return 8 * math.ceil(max(23 * math.log(10 * grid.dimension / delta), 2 * grid.linf) / 2)


@dataclass(frozen=True)
class Binomial:
    """Clip, round to a grid, add Binomial(`trials`, 1/2) - `trials`/2 to each coordinate (cpSGD).

    (epsilon, `delta`)-DP by Theorem 1 of Agarwal et al. 2018 with p = 1/2; refused where its condition on
    the number of trials does not hold.

    Args:
        clip: The largest L2 norm before rounding.
        trials: Number of trials of each coordinate.
        spacing: The step of the grid.
        dimension: Number of coordinates.
        delta: The delta of one release.

    Guarantees:
        The stated epsilon bounds the exact divergence
        (`test_the_binomial_theorem_bounds_the_exact_divergence_in_one_dimension`).
    """

    clip: float
    trials: int
    spacing: float
    dimension: int
    delta: float

    def __post_init__(self) -> None:
        if self.trials < 8 or self.trials % 8:
            raise InputError("trials", self.trials, "is not a multiple of 8", "Use 8, 16, 24, ...")
        if not 0 < self.delta < 1:
            raise InputError("delta", self.delta, "is not a probability", "Use a number in (0, 1).")
        if self.trials < self.least_trials:
            raise InputError(
                "trials", self.trials, "are too few for the theorem", f"Use at least {self.least_trials}."
            )

    @property
    def grid(self) -> Grid:
        return Grid(self.clip, self.spacing, self.dimension)

    @property
    def least_trials(self) -> int:
        return least_trials(self.grid, self.delta)

    @property
    def std(self) -> float:
        return math.sqrt(self.trials) / 2 * self.spacing

    @property
    def epsilon(self) -> float:
        variance = self.trials / 4
        log_125, log_10 = math.log(1.25 / self.delta), math.log(10 / self.delta)
        b, c, d = 1 / 3, math.sqrt(2) * 7 / 4, 2 / 3  # b_p, c_p, d_p of the theorem at p = 1/2
        grid = self.grid
        first = grid.l2 * math.sqrt(2 * log_125) / math.sqrt(variance)
        second = (grid.l2 * c * math.sqrt(log_10) + grid.l1 * b) / (variance * (1 - self.delta / 10))
        tails = 2 / 3 * log_125 + d * math.log(20 * self.dimension / self.delta) * log_10
        return first + second + grid.linf * tails / variance

    def share(self, trials: int) -> BinomialShare:
        """The share of this noise with this number of trials."""
        return BinomialShare(self.grid, trials)

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params:
        return _from_grid(self.share(self.trials).levels(value, streams), self.spacing, value)

    def protection(self) -> ApproximateDP:
        return ApproximateDP(self.epsilon, self.delta)


@lru_cache(maxsize=64)
def least_binomial(clip: float, spacing: float, dimension: int, epsilon: float, delta: float) -> Binomial:
    """The mechanism with the fewest trials, in multiples of 8, whose proven epsilon does not exceed `epsilon`."""

    def made(eighths: int) -> Binomial:
        return Binomial(clip, 8 * eighths, spacing, dimension, delta)

    low = least_trials(Grid(clip, spacing, dimension), delta) // 8
    if made(low).epsilon <= epsilon:
        return made(low)
    high = 2 * low
    while made(high).epsilon > epsilon:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if made(middle).epsilon <= epsilon else (middle, high)
    return made(high)


@dataclass(frozen=True)
class CalibratedBinomial:
    """Binomial noise with a stated guarantee for vectors of any dimension, which determines the grid and the trials.

    After a random rotation the coordinates of a vector of norm `clip` are below clip * sqrt(2 ln(4 d) / d) with high
    probability; `levels` grid points cover that range.
    """

    clip: float
    levels: int
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_clip(self.clip)
        check_level("epsilon", self.epsilon)

    def spacing(self, dimension: int) -> float:
        """The distance between two levels."""
        reach = self.clip * math.sqrt(2 * math.log(4 * dimension) / dimension)
        return 2 * reach / (self.levels - 1)

    def of(self, dimension: int) -> Binomial:
        """The mechanism for vectors of this dimension, whose epsilon is at most `epsilon`."""
        return least_binomial(self.clip, self.spacing(dimension), dimension, self.epsilon, self.delta)

    def protection(self) -> ApproximateDP:
        return ApproximateDP(self.epsilon, self.delta)
