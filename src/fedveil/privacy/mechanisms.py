"""Mechanisms: each bounds a value, perturbs it and states its protection.

The clip is the sensitivity and the noise derives from it; no mechanism takes both numbers. A release is accounted for
by the `protection()` of the same object that adds its noise. Noise is drawn from the given streams, one per client:
`ClientStreams.noise()`, which on a deployed node is the system's entropy.

There are two entry points. `mechanism(value, streams)` clips each row and perturbs it. `mechanism.perturb(total,
streams)` perturbs a sum of contributions that were each clipped to `mechanism.clip`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.privacy import noise
from fedveil.privacy.clipping import check_clip, check_level, check_streams, clip_rows, clip_rows_l1
from fedveil.privacy.integer_mechanisms import Binomial, DiscreteGaussian, Grid
from fedveil.privacy.noise.grid import FINENESS
from fedveil.privacy.releases import (
    GaussianNoise,
    LaplaceNoise,
    Protection,
    PureDP,
    Unprotected,
    ZeroConcentratedDP,
)
from fedveil.streams import Stream
from fedveil.tree import Params, flatten, unflatten

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Binomial",
    "DiscreteGaussian",
    "Gaussian",
    "Grid",
    "GumbelTopK",
    "Laplace",
    "Mechanism",
    "SparseVector",
    "SumMechanism",
    "TopKGaussian",
    "Unnoised",
    "clip_rows",
    "clip_rows_l1",
    "gaussian",
]


class Mechanism(Protocol):
    """Bounds and perturbs the clients' values `[K, ...]`, row k with stream k, and states their protection."""

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params: ...

    def protection(self) -> Protection:
        """The protection of one access to one client under zero-out, as used in a `Release`."""


class SumMechanism(Mechanism, Protocol):
    """A mechanism that also perturbs sums `[K, ...]` of terms that were each clipped to an L2 norm of `clip`."""

    @property
    def clip(self) -> float: ...

    @property
    def std(self) -> float:
        """The standard deviation of the noise in each entry."""

    @property
    def step(self) -> float:
        """The step of the grid on which results lie; 0 if there is no grid."""

    def perturb(self, total: Params, streams: Sequence[Stream]) -> Params:
        """Add noise to sums of clipped contributions, row k from stream k."""


@dataclass(frozen=True)
class Gaussian:
    """Clip to an L2 norm of `clip`, add normal noise of standard deviation `clip * multiplier`.

    Args:
        clip: The largest L2 norm, which is the sensitivity.
        multiplier: Standard deviation of the noise, in units of `clip`.
        fineness: Results lie on a grid whose step is a power of two between std / 2^fineness and half of that.

    Guarantees:
        No clipped row is longer than `clip` (`test_clipping_never_leaves_the_ball`). Noise has the standard deviation
        that is charged (`test_gaussian_moments_and_independence`, `test_the_guarantee_is_that_of_the_noise`).
    """

    clip: float
    multiplier: float
    fineness: int = FINENESS

    def __post_init__(self) -> None:
        check_clip(self.clip)
        check_level("multiplier", self.multiplier)

    @property
    def std(self) -> float:
        return self.clip * self.multiplier

    @property
    def step(self) -> float:
        return noise.grid_step(self.std, self.fineness)

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params:
        return self.perturb(clip_rows(value, self.clip), streams)

    def perturb(self, total: Params, streams: Sequence[Stream]) -> Params:
        check_streams(total, streams)
        return noise.add_gaussian(total, self.std, streams, self.step)

    def protection(self) -> GaussianNoise:
        return GaussianNoise(self.multiplier)


@dataclass(frozen=True)
class Unnoised:
    """Clip to an L2 norm of `clip`, which may be infinite, without noise."""

    clip: float = math.inf
    reason: str = "no noise is added"

    @property
    def std(self) -> float:
        return 0.0

    @property
    def step(self) -> float:
        return 0.0

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params:
        return clip_rows(value, self.clip) if math.isfinite(self.clip) else value

    def perturb(self, total: Params, streams: Sequence[Stream]) -> Params:
        return total

    def protection(self) -> Unprotected:
        return Unprotected(self.reason)


def gaussian(clip: float, multiplier: float, fineness: int = FINENESS) -> Gaussian | Unnoised:
    """A `Gaussian`, or an `Unnoised` mechanism without protection where there is no clip or no noise.

    Args:
        clip: As for `Gaussian`; infinite: no clipping.
        multiplier: As for `Gaussian`; 0: no noise.
        fineness: As for `Gaussian`.

    Returns:
        The mechanism.

    Guarantees:
        Without clip or noise nothing is guaranteed
        (`test_without_clip_or_noise_nothing_is_guaranteed_and_nothing_added`).
    """
    if multiplier == 0:
        return Unnoised(clip, "no noise is added (noise_multiplier = 0)")
    if math.isinf(clip):
        return Unnoised(clip, "contributions are not clipped (clip = inf)")
    return Gaussian(clip, multiplier, fineness)


@dataclass(frozen=True)
class Laplace:
    """Clip to an L1 norm of `clip`, add Laplace noise of scale `clip / epsilon`.

    Args:
        clip: The largest L1 norm, which is the sensitivity.
        epsilon: The epsilon of one release.

    Guarantees:
        Pure epsilon-DP; clip and scale of the noise are those of the proof (`test_laplace_moments_and_l1_clip`).
    """

    clip: float
    epsilon: float

    def __post_init__(self) -> None:
        check_clip(self.clip)
        check_level("epsilon", self.epsilon)

    @property
    def scale(self) -> float:
        return self.clip / self.epsilon

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params:
        check_streams(value, streams)
        return noise.add_laplace(clip_rows_l1(value, self.clip), self.scale, streams)

    def protection(self) -> LaplaceNoise:
        return LaplaceNoise(self.epsilon)


@dataclass(frozen=True)
class SparseVector:
    """Release at most `releases` coordinates whose noisy magnitude reaches a public threshold; the others are zero.

    Coordinates are queried in a public order, random in each use. The threshold gets Laplace noise
    clip/e1, each query 2 c clip/e2, each answer c clip/e3, where c = `releases`: pure (e1 + e2 + e3)-DP
    (Lyu, Su, Li 2017). A coordinate changes by at most `clip` under zero-out.

    Args:
        clip: The largest magnitude of a coordinate.
        threshold: The public threshold.
        releases: Largest number of released coordinates.
        epsilon_threshold: Spent on the threshold.
        epsilon_questions: Spent on the comparisons.
        epsilon_answers: Spent on the values.

    Guarantees:
        No more coordinates are released than are charged
        (`test_sparse_vector_releases_at_most_what_it_charges_for`), with the scales of the proof
        (`test_sparse_vector_noise_scales`).
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
            check_level(field, getattr(self, field))
        if self.releases < 1:
            raise InputError("releases", self.releases, "nothing would be released", "Use at least 1.")

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params:
        check_streams(value, streams)
        flat = flatten(clip_rows(value, self.clip)).double()
        out = torch.zeros_like(flat)
        for row, (values, stream) in enumerate(zip(flat, streams, strict=True)):
            order = torch.from_numpy(np.argsort(stream.random(len(values))))
            scales = (
                self.clip / self.epsilon_threshold,
                2 * self.releases * self.clip / self.epsilon_questions,
            )
            above = noise.reaching(values.abs(), self.threshold, scales, order, self.releases, stream)
            if len(above):
                answer = {"values": values[above].unsqueeze(0)}
                scale = self.releases * self.clip / self.epsilon_answers
                out[row, above] = noise.add_laplace(answer, scale, [stream])["values"][0]
        first = next(iter(value.values()))
        return unflatten(out.to(first.dtype), value)

    def protection(self) -> PureDP:
        return PureDP(self.epsilon_threshold + self.epsilon_questions + self.epsilon_answers)


@dataclass(frozen=True)
class GumbelTopK:
    """The `count` coordinates with the largest noisy magnitude, selected in one shot.

    Gumbel noise of scale 2 clip / `epsilon` makes this equal to `count` rounds of the exponential mechanism
    (Durfee, Rogers 2019), each `epsilon`-bounded in range: count * epsilon^2 / 8 zCDP. Only the choice is
    private: the chosen values need separate noise.

    Args:
        clip: The largest magnitude of a coordinate.
        count: Number of chosen coordinates.
        epsilon: The epsilon of each choice.

    Guarantees:
        The choice has the distribution of the exponential mechanism
        (`test_gumbel_selection_is_the_exponential_mechanism`).
    """

    clip: float
    count: int
    epsilon: float

    def __post_init__(self) -> None:
        check_clip(self.clip)
        check_level("epsilon", self.epsilon)
        if self.count < 1:
            raise InputError("count", self.count, "nothing would be chosen", "Use at least 1.")

    def chosen(self, value: Params, streams: Sequence[Stream]) -> Tensor:
        """Which coordinates were chosen, `[K, d]`, `count` in each row."""
        check_streams(value, streams)
        magnitude = flatten(clip_rows(value, self.clip)).double().abs()
        if magnitude.shape[1] < self.count:
            raise InputError("count", self.count, f"there are {magnitude.shape[1]} coordinates", "Use fewer.")
        index = noise.largest(magnitude, 2 * self.clip / self.epsilon, self.count, streams)
        return torch.zeros_like(magnitude, dtype=torch.bool).scatter_(1, index, True)

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params:
        """1 where a coordinate was chosen, else 0."""
        first = next(iter(value.values()))
        return unflatten(self.chosen(value, streams).to(first.dtype), value)

    def protection(self) -> ZeroConcentratedDP:
        return ZeroConcentratedDP(self.count * self.epsilon**2 / 8)


@dataclass(frozen=True)
class TopKGaussian:
    """Choose coordinates by `GumbelTopK`, clip their values and add Gaussian noise; the others are zero."""

    clip: float
    count: int
    selection_epsilon: float
    multiplier: float

    def __post_init__(self) -> None:
        GumbelTopK(self.clip, self.count, self.selection_epsilon)
        Gaussian(self.clip, self.multiplier)

    @property
    def choice(self) -> GumbelTopK:
        return GumbelTopK(self.clip, self.count, self.selection_epsilon)

    @property
    def values(self) -> Gaussian:
        return Gaussian(self.clip, self.multiplier)

    def select(
        self, flat: Tensor, choosing: Sequence[Stream], streams: Sequence[Stream]
    ) -> tuple[Tensor, Tensor]:
        """The noisy values and the ascending positions of the chosen coordinates of `flat` `[K, d]`, both `[K, count]`.

        The choice is drawn from `choosing`, the noise of the values from `streams`.
        """
        chosen = self.choice.chosen({"flat": flat}, choosing)
        places = chosen.nonzero()[:, 1].reshape(len(flat), self.count)
        return self.values({"values": flat.gather(1, places)}, streams)["values"], places

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params:
        flat = flatten(value)
        noisy, places = self.select(flat, streams, streams)
        return unflatten(torch.zeros_like(flat).scatter(1, places, noisy), value)

    def protection(self) -> ZeroConcentratedDP:
        """rho = k eps0^2 / 8 + 1 / (2 multiplier^2)."""
        return ZeroConcentratedDP(self.choice.protection().rho + 0.5 / self.values.multiplier**2)
