"""Differentiable siamese augmentation: one random change, the same for real and synthetic images.

Zhao, Bilen: Dataset Condensation with Differentiable Siamese Augmentation. ICML 2021. Each time one of the named
changes is drawn, with one set of values for the whole batch, and applied to both sides before their gradients
are compared. The draw does not depend on the data, so it does not affect privacy, and it comes from a separate stream,
never from that of the privacy noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from fedveil.errors import InputError
from fedveil.lazy_torch import functional, torch

if TYPE_CHECKING:
    from torch import Tensor

Change = Literal["brightness", "saturation", "contrast", "crop", "cutout", "flip", "scale", "rotate"]
CHANGES: tuple[Change, ...] = get_args(Change)

_SHIFT = 0.125  # largest shift of a crop, as a share of the side
_HOLE = 0.5  # side of a cutout, as a share of the side
_SCALE = 1.2
_DEGREES = 15.0


@dataclass(frozen=True)
class View:
    """One drawn change of images `[n, channels, height, width]`; the identity if `kind` is None."""

    kind: Change | None = None
    first: float = 0.0
    second: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """The changed images: affine in `x`, so it can be differentiated any number of times."""
        if self.kind is None:
            return x
        if self.kind == "brightness":
            return x + (self.first - 0.5)
        if self.kind == "saturation":
            mean = x.mean(1, keepdim=True)
            return (x - mean) * (2 * self.first) + mean
        if self.kind == "contrast":
            mean = x.mean((1, 2, 3), keepdim=True)
            return (x - mean) * (self.first + 0.5) + mean
        if self.kind == "flip":
            return x.flip(3) if self.first < 0.5 else x
        if self.kind == "crop":
            return self._crop(x)
        if self.kind == "cutout":
            return x * self._hole(x)
        return functional.grid_sample(x, self._grid(x), padding_mode="zeros", align_corners=False)

    def _crop(self, x: Tensor) -> Tensor:
        """Shift by up to an eighth of the side, padding with zeros."""
        reach = [round(side * _SHIFT) for side in x.shape[2:]]
        padded = functional.pad(x, (reach[1], reach[1], reach[0], reach[0]))
        top = round(self.first * 2 * reach[0])
        left = round(self.second * 2 * reach[1])
        return padded[:, :, top : top + x.shape[2], left : left + x.shape[3]]

    def _hole(self, x: Tensor) -> Tensor:
        keep = torch.ones(x.shape[2:], dtype=x.dtype, device=x.device)
        size = [max(1, round(side * _HOLE)) for side in x.shape[2:]]
        start = [
            round(value * (side - length))
            for value, side, length in zip((self.first, self.second), x.shape[2:], size, strict=True)
        ]
        keep[start[0] : start[0] + size[0], start[1] : start[1] + size[1]] = 0
        return keep

    def _grid(self, x: Tensor) -> Tensor:
        if self.kind == "scale":
            matrix = [[_stretch(self.first), 0.0, 0.0], [0.0, _stretch(self.second), 0.0]]
        else:
            angle = math.radians((2 * self.first - 1) * _DEGREES)
            matrix = [
                [math.cos(angle), -math.sin(angle), 0.0],
                [math.sin(angle), math.cos(angle), 0.0],
            ]
        theta = torch.tensor(matrix, dtype=x.dtype, device=x.device).expand(len(x), 2, 3)
        return functional.affine_grid(theta, list(x.shape), align_corners=False)


def _stretch(value: float) -> float:
    """A factor from 1 / 1.2 to 1.2."""
    return 1 / _SCALE + value * (_SCALE - 1 / _SCALE)


def draw_view(changes: Sequence[Change], stream: np.random.Generator) -> View:
    """Draw one of the changes with its values; without changes nothing is drawn."""
    if not changes:
        return View()
    kind = changes[int(stream.integers(len(changes)))]
    first, second = stream.random(2)
    return View(kind, float(first), float(second))


def check_images(changes: Sequence[Change], shape: Sequence[int]) -> None:
    """Refuse augmentation of anything but images."""
    if changes and len(shape) != 3:
        raise InputError(
            "method.augment",
            list(changes),
            f"the examples have the shape {tuple(shape)}, not channels x height x width",
            "Leave augment empty for data other than images.",
        )
