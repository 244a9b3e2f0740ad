"""Noise without a privacy guarantee: the perturbed value is not bounded, or not everything that is sent is perturbed.

Defences and methods of this kind declare their releases as unprotected; attacks measure them. Their noise is drawn
by the same package as privacy noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedveil.lazy_torch import torch
from fedveil.privacy import noise
from fedveil.streams import Stream
from fedveil.tree import Params

if TYPE_CHECKING:
    from torch import Tensor

NoiseKind = Literal["laplace", "gaussian"]


@dataclass(frozen=True)
class Additive:
    """Noise on every coordinate of unbounded values `[K, ...]`.

    `scale` is the standard deviation of Gaussian noise and the scale of Laplace noise.
    """

    kind: NoiseKind
    scale: float

    def __call__(self, value: Params, streams: Sequence[Stream]) -> Params:
        if self.scale == 0:
            return value
        draw = noise.add_laplace if self.kind == "laplace" else noise.add_gaussian
        return draw(value, self.scale, streams)

    def where(self, chosen: Tensor, value: Tensor, streams: Sequence[Stream]) -> Tensor:
        """`value` `[K, d]` with noise on the `chosen` coordinates; the others are unchanged."""
        return torch.where(chosen, self({"value": value}, streams)["value"], value)


@dataclass(frozen=True)
class NoisyComparison:
    """Coordinates that reach a threshold, with Laplace noise of the two `scales` on each coordinate and the threshold.

    Scales (0, 0) compare exactly.
    """

    scales: tuple[float, float]

    def __call__(self, value: Tensor, threshold: Tensor, streams: Sequence[Stream]) -> Tensor:
        """`value` `[K, d]` against `threshold` `[K, 1]`."""
        if self.scales == (0.0, 0.0):
            return value >= threshold
        alpha, beta = self.scales
        noisy = noise.add_laplace({"value": value}, alpha, streams)["value"]
        bar = noise.add_laplace({"threshold": threshold.expand_as(value)}, beta, streams)["threshold"]
        return noisy >= bar


@dataclass(frozen=True)
class FixedLength:
    """A random vector of fixed length on each row `[K, d]`."""

    length: float

    def __call__(self, flat: Tensor, streams: Sequence[Stream]) -> Tensor:
        return noise.add_direction(flat, self.length, streams)
