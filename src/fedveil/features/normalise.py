"""The constants that feature maps are normalised with, taken from synthetic images, never from data."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

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


@dataclass(frozen=True)
class Normalisation:
    """`matrix @ (maps - mean)` for maps `[n, channels, ...]`, then each record to unit norm.

    Guarantees: a record's features depend on no other record
    (`test_a_records_features_do_not_depend_on_other_records`) and on no data set
    (`test_constants_are_drawn_without_data`).
    """

    mean: Tensor
    matrix: Tensor

    def __call__(self, maps: Tensor) -> Tensor:
        """The features `[n, d]`; a record whose maps are all at the mean stays zero."""
        centred = maps.flatten(2) - self.mean[:, None]
        flat = torch.bmm(self.matrix.expand(centred.shape[0], -1, -1), centred).flatten(1)
        lengths: Tensor = flat.norm(dim=1, keepdim=True)
        return flat / lengths.clamp(min=1e-12)


@functools.lru_cache(maxsize=4)
def constants(
    scattering: Scattering,
    channels: int,
    synthetic: SyntheticImages,
    whitening: float,
    square_root: bool = False,
) -> Normalisation:
    """Mean, deviation and correlation R of each channel over synthetic images and places.

    Channels are divided by their deviation and multiplied by R^(-whitening / 2): 0 leaves them as correlated as they
    are, 1 decorrelates them on synthetic images.
    """
    images = draw(synthetic, COUNT, channels, scattering.height, scattering.width)
    block = max(1, scattering.block // channels)
    maps = in_blocks(functools.partial(scatter_channels, scattering, square_root=square_root), images, block)
    values = maps.transpose(0, 1).flatten(1).double()
    mean = values.mean(1)
    std = values.std(1).clamp(min=_SMALLEST * float(values.std(1).max()))
    standard = (values - mean[:, None]) / std[:, None]
    correlation = standard @ standard.T / standard.shape[1]
    scales, axes = torch.linalg.eigh(correlation)
    factors = scales.clamp(min=_SMALLEST * float(scales.max())).pow(-whitening / 2)
    matrix = (axes * factors) @ axes.T / std
    return Normalisation(mean.float(), matrix.float())


def scatter_channels(scattering: Scattering, images: Tensor, square_root: bool = False) -> Tensor:
    """The maps of all channels of images `[n, C, H, W]`, one after another: `[n, C * paths, h, w]`."""
    maps = scattering(images.flatten(0, 1))
    if square_root:
        # Averages of moduli are not negative, but rounding can make them so. A root is rounded correctly, so it is
        # the same in a block of any size.
        maps = maps.clamp(min=0).sqrt()
    return maps.reshape(images.shape[0], -1, *maps.shape[2:])
