"""Mechanisms: each bounds a value, perturbs it and knows its price.

The clip states the sensitivity and the noise derives from it; no mechanism takes both numbers. Noise comes
from the streams it is given, one per client: `ClientStreams.noise()`, which on a deployed node is the
system's entropy.

Continuous noise is drawn in double precision. Like every floating-point sampler it only approximates its
distribution in the last bits; `DiscreteGaussian` and `Binomial` are exact, for those to whom that matters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import InputError
from fedveil.privacy import integers
from fedveil.privacy.clipping import (
    AdaptiveClip,
    add_rows,
    check_clip,
    clip_rows,
    clip_rows_l1,
)
from fedveil.privacy.releases import (
    ApproximateDP,
    GaussianNoise,
    LaplaceNoise,
    Protection,
    PureDP,
    ZeroConcentratedDP,
)
from fedveil.streams import Stream, laplace, normal
from fedveil.tree import Params, flatten, unflatten

if TYPE_CHECKING:
    import dp_accounting

__all__ = [
    "AdaptiveClip",
    "Binomial",
    "DiscreteGaussian",
    "Gaussian",
    "GumbelTopK",
    "Laplace",
    "Mechanism",
    "SparseVector",
    "TopKGaussian",
    "add_noise",
    "clip_rows",
    "clip_rows_l1",
]


Floats = np.ndarray[Any, np.dtype[np.float64]]


class Mechanism(Protocol):
    """Bounds, perturbs and prices the clients' values `[K, ...]`, row k with stream k."""

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params: ...

    def event(self) -> dp_accounting.DpEvent | None:
        """The price of one use on one client under zero-out; None: dp-accounting has no event for it."""

    def protection(self) -> Protection:
        """The same price in the words of a `Release`."""


def _check_multiplier(field: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InputError(field, value, "is not a noise level", "Use a positive finite number.")


def add_noise(params: Params, std: float, streams: Sequence[Stream]) -> Params:
    """Normal noise of `std` on the clients' values `[K, ...]`, row k from stream k."""
    return {name: leaf + std * normal(streams, leaf.shape[1:], leaf) for name, leaf in params.items()}


def _check_streams(value: Params, streams: Sequence[Stream]) -> None:
    rows = next(iter(value.values())).shape[0]
    if len(streams) != rows:
        raise InputError("streams", len(streams), f"there are {rows} clients", "Give one stream per client.")


@dataclass(frozen=True)
class Gaussian:
    """Clip to an L2 norm of `clip`, add normal noise of standard deviation `clip * multiplier`."""

    clip: float
    multiplier: float

    def __post_init__(self) -> None:
        check_clip(self.clip)
        _check_multiplier("multiplier", self.multiplier)

    @property
    def std(self) -> float:
        return self.clip * self.multiplier

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params:
        _check_streams(value, streams)
        return self.perturb(clip_rows(value, self.clip), streams)

    def perturb(self, clipped: Params, streams: Sequence[Stream]) -> Params:
        """Noise on what was bounded already, such as a sum of clipped examples `[K, ...]`."""
        return add_noise(clipped, self.std, streams)

    def event(self) -> dp_accounting.DpEvent:
        import dp_accounting

        return dp_accounting.GaussianDpEvent(self.multiplier)

    def protection(self) -> GaussianNoise:
        return GaussianNoise(self.multiplier)


@dataclass(frozen=True)
class Laplace:
    """Clip to an L1 norm of `clip`, add Laplace noise of scale `clip / epsilon`."""

    clip: float
    epsilon: float

    def __post_init__(self) -> None:
        check_clip(self.clip)
        _check_multiplier("epsilon", self.epsilon)

    @property
    def scale(self) -> float:
        return self.clip / self.epsilon

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params:
        _check_streams(value, streams)
        bounded = clip_rows_l1(value, self.clip)
        return {
            name: leaf + self.scale * laplace(streams, leaf.shape[1:], leaf) for name, leaf in bounded.items()
        }

    def event(self) -> dp_accounting.DpEvent:
        import dp_accounting

        return dp_accounting.LaplaceDpEvent(1 / self.epsilon)

    def protection(self) -> LaplaceNoise:
        return LaplaceNoise(self.epsilon)


@dataclass(frozen=True)
class Grid:
    """Unbiased rounding of clipped vectors to multiples of `spacing`, with a bound on the rounded norm.

    Rounding up or down at random can lengthen a vector. Draws longer than `l2` are drawn again (conditional
    rounding, Kairouz, Liu, Steinke 2021), so `l2`, `l1` and `linf` hold always; they count grid steps, and
    zero rounds to zero, so they are the sensitivities under zero-out.
    """

    clip: float
    spacing: float
    dimension: int

    def __post_init__(self) -> None:
        check_clip(self.clip)
        check_clip(self.spacing)
        if self.dimension < 1:
            raise InputError("dimension", self.dimension, "is not a length", "Use the number of parameters.")

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

    def round(self, row: Floats, stream: Stream) -> integers.Ints:
        """`row` (float64, clipped) in grid steps, rounded at random without bias but for the rejections."""
        steps = row / self.spacing
        low = np.floor(steps)
        for _ in range(1000):
            rounded: integers.Ints = (low + (stream.random(len(low)) < steps - low)).astype(np.int64)
            if float(np.square(rounded, dtype=np.float64).sum()) <= self.l2**2:
                return rounded
        return np.trunc(steps).astype(np.int64)  # towards zero: never longer than the clip


def _to_grid(value: Params, grid: Grid, streams: Sequence[Stream]) -> list[integers.Ints]:
    _check_streams(value, streams)
    flat = flatten(clip_rows(value, grid.clip)).double().numpy()
    if flat.shape[1] != grid.dimension:
        raise InputError("dimension", grid.dimension, f"the update has {flat.shape[1]} values", "Use that.")
    return [grid.round(row, stream) for row, stream in zip(flat, streams, strict=True)]


def _from_grid(rows: Sequence[integers.Ints], spacing: float, like: Params) -> Params:
    flat = torch.from_numpy(np.stack(rows)).double() * spacing
    first = next(iter(like.values()))
    return unflatten(flat.to(first.dtype), like)


@dataclass(frozen=True)
class DiscreteGaussian:
    """Clip, round to a grid, add exact discrete Gaussian noise: integers times `spacing` leave the client.

    Noise has `multiplier` times the L2 sensitivity after rounding. Per client it is 1/(2 multiplier^2)-zCDP
    (Canonne, Kamath, Steinke 2020, Theorem 14), with nothing lost to floating point.
    """

    clip: float
    multiplier: float
    spacing: float
    dimension: int

    def __post_init__(self) -> None:
        _check_multiplier("multiplier", self.multiplier)
        integers.rational_variance(self.multiplier * self.grid.l2)

    @property
    def grid(self) -> Grid:
        return Grid(self.clip, self.spacing, self.dimension)

    @property
    def std(self) -> float:
        return self.multiplier * self.grid.l2 * self.spacing

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params:
        std = self.multiplier * self.grid.l2
        noisy = [
            row + integers.discrete_gaussian(std, len(row), stream)
            for row, stream in zip(_to_grid(value, self.grid, streams), streams, strict=True)
        ]
        return _from_grid(noisy, self.spacing, value)

    def event(self) -> dp_accounting.DpEvent:
        import dp_accounting

        return dp_accounting.ZCDpEvent(self.protection().rho)

    def protection(self) -> ZeroConcentratedDP:
        return ZeroConcentratedDP(0.5 / self.multiplier**2)


def least_trials(grid: Grid, delta: float) -> int:
    """The fewest trials, a multiple of 8, that meet the condition of cpSGD's Theorem 1 at p = 1/2."""
    return 8 * math.ceil(max(23 * math.log(10 * grid.dimension / delta), 2 * grid.linf) / 2)


@dataclass(frozen=True)
class Binomial:
    """Clip, round to a grid, add Binomial(`trials`, 1/2) - `trials`/2 to each coordinate (cpSGD).

    (epsilon, `delta`)-DP by Theorem 1 of Agarwal et al. 2018 with p = 1/2; refused where its condition on
    the number of trials does not hold.
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
                "trials", self.trials, "too few for the theorem", f"Use at least {self.least_trials}."
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

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params:
        noisy = [
            row + integers.centred_binomial(self.trials, len(row), stream)
            for row, stream in zip(_to_grid(value, self.grid, streams), streams, strict=True)
        ]
        return _from_grid(noisy, self.spacing, value)

    def event(self) -> dp_accounting.DpEvent | None:
        return None

    def protection(self) -> ApproximateDP:
        return ApproximateDP(self.epsilon, self.delta)


@dataclass(frozen=True)
class SparseVector:
    """Release at most `releases` coordinates whose noisy magnitude reaches a public threshold; else zero.

    Coordinates are asked in an order that is public and random in each use. The threshold gets Laplace noise
    clip/e1, each question 2 c clip/e2, each answer c clip/e3, where c = `releases`: pure (e1 + e2 + e3)-DP
    (Lyu, Su, Li 2017). A coordinate moves by at most `clip` under zero-out.
    """

    clip: float
    threshold: float
    releases: int
    epsilon_threshold: float
    epsilon_questions: float
    epsilon_answers: float

    def __post_init__(self) -> None:
        check_clip(self.clip)
        for field in ("epsilon_threshold", "epsilon_questions", "epsilon_answers"):
            _check_multiplier(field, getattr(self, field))
        if self.releases < 1:
            raise InputError("releases", self.releases, "nothing would be released", "Use at least 1.")

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params:
        _check_streams(value, streams)
        flat = flatten(clip_rows(value, self.clip)).double().numpy()
        out = np.zeros_like(flat)
        c = self.releases
        for row, (values, stream) in enumerate(zip(flat, streams, strict=True)):
            order = np.argsort(stream.random(len(values)))
            bar = self.threshold + stream.laplace(0.0, self.clip / self.epsilon_threshold, 1)[0]
            asked = stream.laplace(0.0, 2 * c * self.clip / self.epsilon_questions, len(values))
            answers = stream.laplace(0.0, c * self.clip / self.epsilon_answers, len(values))
            above = order[np.abs(values[order]) + asked[order] >= bar][:c]
            out[row, above] = values[above] + answers[above]
        first = next(iter(value.values()))
        return unflatten(torch.from_numpy(out).to(first.dtype), value)

    def event(self) -> dp_accounting.DpEvent | None:
        return None

    def protection(self) -> PureDP:
        return PureDP(self.epsilon_threshold + self.epsilon_questions + self.epsilon_answers)


@dataclass(frozen=True)
class GumbelTopK:
    """The `count` coordinates of largest noisy magnitude, in one shot.

    Gumbel noise of scale 2 clip / `epsilon` makes this equal to `count` rounds of the exponential mechanism
    (Durfee, Rogers 2019), each `epsilon`-bounded in range: count * epsilon^2 / 8 zCDP. Only the choice is
    private: the chosen values still need noise of their own.
    """

    clip: float
    count: int
    epsilon: float

    def __post_init__(self) -> None:
        check_clip(self.clip)
        _check_multiplier("epsilon", self.epsilon)
        if self.count < 1:
            raise InputError("count", self.count, "nothing would be chosen", "Use at least 1.")

    def chosen(self, value: Params, streams: Sequence[Stream]) -> Tensor:
        """Which coordinates were chosen, `[K, d]`, `count` in each row."""
        _check_streams(value, streams)
        magnitude = flatten(clip_rows(value, self.clip)).double().abs()
        if magnitude.shape[1] < self.count:
            raise InputError("count", self.count, f"there are {magnitude.shape[1]} coordinates", "Use fewer.")
        scale = 2 * self.clip / self.epsilon
        noise = np.stack([stream.gumbel(0.0, scale, magnitude.shape[1]) for stream in streams])
        index = (magnitude + torch.from_numpy(noise)).topk(self.count, dim=1).indices
        return torch.zeros_like(magnitude, dtype=torch.bool).scatter_(1, index, True)

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params:
        """1 where a coordinate was chosen, else 0."""
        first = next(iter(value.values()))
        return unflatten(self.chosen(value, streams).to(first.dtype), value)

    def event(self) -> dp_accounting.DpEvent:
        import dp_accounting

        return dp_accounting.ZCDpEvent(self.protection().rho)

    def protection(self) -> ZeroConcentratedDP:
        return ZeroConcentratedDP(self.count * self.epsilon**2 / 8)


@dataclass(frozen=True)
class TopKGaussian:
    """Choose coordinates by `GumbelTopK`, clip what was chosen, add Gaussian noise there, zero elsewhere."""

    clip: float
    count: int
    selection_epsilon: float
    multiplier: float

    def __post_init__(self) -> None:
        GumbelTopK(self.clip, self.count, self.selection_epsilon)
        Gaussian(self.clip, self.multiplier)

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params:
        choose = GumbelTopK(self.clip, self.count, self.selection_epsilon)
        mask = choose.chosen(value, streams)
        kept = unflatten(flatten(clip_rows(value, self.clip)) * mask, value)
        noise = self.clip * self.multiplier * normal(streams, (mask.shape[1],), flatten(kept))
        return add_rows(clip_rows(kept, self.clip), noise * mask)

    def event(self) -> dp_accounting.DpEvent:
        import dp_accounting

        return dp_accounting.ZCDpEvent(self.protection().rho)

    def protection(self) -> ZeroConcentratedDP:
        """rho = k eps0^2 / 8 + 1 / (2 multiplier^2)."""
        choice = self.count * self.selection_epsilon**2 / 8
        return ZeroConcentratedDP(choice + 0.5 / self.multiplier**2)
