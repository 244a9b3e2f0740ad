"""Normalisation constants of feature maps, computed from synthetic images, never from data."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedveil.features.blocks import in_blocks
from fedveil.features.scattering import Scattering
from fedveil.features.synthetic_images import SyntheticImages, draw
from fedveil.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

COUNT = 4000
_SMALLEST = (
    1e-3  # of a channel's deviation and of an eigenvalue: what synthetic images do not move is not blown up
)


Centring = Literal["channel", "place"]


@dataclass(frozen=True)
class Maps:
    """From images to the maps that are normalised.

    Args:
        scattering: The coefficients of each colour channel.
        square_root: Whether their square roots are taken.
        mirror: Whether the maps of an image and of its mirror image are averaged. The average is symmetric, so half
            of its columns say everything.
    """

    scattering: Scattering
    square_root: bool = False
    mirror: bool = False

    @property
    def map_shape(self) -> tuple[int, int]:
        height, width = self.scattering.map_shape
        return height, (width + 1) // 2 if self.mirror else width

    def __call__(self, images: Tensor) -> Tensor:
        """The maps of all channels of images `[n, C, H, W]`, one after another: `[n, C * paths, h, w]`."""
        maps = self.scattering(images.flatten(0, 1))
        if self.square_root:
            # Averages of moduli are not negative, but rounding can make them so. A root is rounded correctly, so it
            # is the same in a block of any size.
            maps = maps.clamp(min=0).sqrt()
        if self.mirror:
            maps = self._halved(maps)
        return maps.reshape(images.shape[0], -1, *maps.shape[2:])

    def _halved(self, maps: Tensor) -> Tensor:
        """The left half of the symmetric average; lengths are those of the whole."""
        both = (maps + maps[:, self.scattering.mirrored()].flip(-1)) / 2
        half = both[..., : self.map_shape[1]]
        weights = torch.full((half.shape[-1],), math.sqrt(2), dtype=maps.dtype)
        weights[maps.shape[-1] // 2 :] = 1.0  # the middle column of an odd width stands for itself
        return half * weights


@dataclass(frozen=True)
class Normalisation:
    """`matrix @ (maps - mean)` for maps `[n, channels, ...]`, then each record to unit norm.

    Guarantees: a record's features depend on no other record
    (`test_a_records_features_do_not_depend_on_other_records`) and on no data set
    (`test_constants_are_drawn_without_data`).
    """

    mean: Tensor
    """`[channels, 1]`, or `[channels, places]`."""
    matrix: Tensor

    def __call__(self, maps: Tensor) -> Tensor:
        """The features `[n, d]`; a record whose maps equal the mean has zeros."""
        centred = maps.flatten(2) - self.mean
        flat = torch.bmm(self.matrix.expand(centred.shape[0], -1, -1), centred).flatten(1)
        lengths: Tensor = flat.norm(dim=1, keepdim=True)
        return flat / lengths.clamp(min=1e-12)


@functools.lru_cache(maxsize=4)
def constants(
    maps: Maps, channels: int, synthetic: SyntheticImages, whitening: float, centring: Centring = "channel"
) -> Normalisation:
    """Mean, deviation and correlation R of each channel over synthetic images and places.

    Channels are divided by their deviation and multiplied by R^(-whitening / 2): 0 leaves them as correlated as they
    are, 1 decorrelates them on synthetic images. The mean that is subtracted is the channel's, or that of each of its
    places.
    """
    scattering = maps.scattering
    images = draw(synthetic, COUNT, channels, scattering.height, scattering.width)
    found = in_blocks(maps, images, max(1, scattering.block // channels))
    values = found.transpose(0, 1).flatten(1).double()
    mean = values.mean(1)
    std = values.std(1).clamp(min=_SMALLEST * float(values.std(1).max()))
    standard = (values - mean[:, None]) / std[:, None]
    correlation = standard @ standard.T / standard.shape[1]
    scales, axes = torch.linalg.eigh(correlation)
    factors = scales.clamp(min=_SMALLEST * float(scales.max())).pow(-whitening / 2)
    matrix = (axes * factors) @ axes.T / std
    subtracted = found.flatten(2).double().mean(0) if centring == "place" else mean[:, None]
    return Normalisation(subtracted.float(), matrix.float())
