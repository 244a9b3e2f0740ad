"""Images that the library draws itself, from which feature maps take their constants: no data is looked at.

"strokes": smooth pen strokes on black, like digits and letters (quadratic Bezier curves).
"leaves": the dead-leaves model, discs and rectangles of all sizes that cover one another, whose edges and scales are
distributed like those of photographs (Lee, Mumford, Huang: Occlusion Models for Natural Images. IJCV 2001).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from fedveil.lazy_torch import torch
from fedveil.streams import named_stream

if TYPE_CHECKING:
    from torch import Tensor

SyntheticImages = Literal["strokes", "leaves"]

_SEED = 0
_STROKES, _POINTS, _LEAVES = 3, 16, 60
_CHUNK = 256


def draw(kind: SyntheticImages, count: int, channels: int, height: int, width: int) -> Tensor:
    """`count` images `[n, channels, height, width]` of brightness 0 to 1, always the same ones."""
    rng = named_stream(_SEED, "synthetic images", kind)
    if kind == "leaves":
        return _leaves(rng, count, channels, height, width)
    parts = [_strokes(rng, min(_CHUNK, count - start), height, width) for start in range(0, count, _CHUNK)]
    return torch.cat(parts).unsqueeze(1).expand(-1, channels, -1, -1).contiguous()


def _uniform(rng: np.random.Generator, low: float, high: float, *shape: int) -> Tensor:
    return torch.from_numpy(rng.uniform(low, high, shape)).float()


def _grid(height: int, width: int) -> tuple[Tensor, Tensor]:
    """The places of the pixels, from 0 to 1 along the shorter side."""
    side = min(height, width)
    return torch.arange(height)[:, None] / side, torch.arange(width)[None] / side


def _strokes(rng: np.random.Generator, count: int, height: int, width: int) -> Tensor:
    """One to three curves each, in the middle of the image, with soft edges."""
    ends = _uniform(rng, 0.2, 0.8, count, _STROKES, 3, 2)
    joined = torch.from_numpy(rng.random(count) < 0.7)
    for stroke in range(1, _STROKES):  # most strokes begin where the last one ended
        ends[joined, stroke, 0] = ends[joined, stroke - 1, 2]
    t = torch.linspace(0, 1, _POINTS)[:, None]
    curve = (
        (1 - t) ** 2 * ends[:, :, None, 0]
        + 2 * t * (1 - t) * ends[:, :, None, 1]
        + t**2 * ends[:, :, None, 2]
    )
    drawn = torch.from_numpy(rng.integers(1, _STROKES + 1, count))
    absent = torch.arange(_STROKES) >= drawn[:, None]
    curve[absent] = 9.0  # out of sight
    radius = _uniform(rng, 0.025, 0.065, count, 1, 1)
    rows, columns = _grid(height, width)
    pixels = torch.stack(torch.broadcast_tensors(rows, columns), -1).reshape(1, -1, 2)
    distance = torch.cdist(pixels.expand(count, -1, -1), curve.reshape(count, -1, 2)).amin(-1)
    soft = 1.0 / min(height, width)
    return (1 - (distance.reshape(count, height, width) - radius) / soft).clamp(0, 1)


def _leaves(rng: np.random.Generator, count: int, channels: int, height: int, width: int) -> Tensor:
    """Sizes follow a power law of exponent -3; a leaf's colours vary around its brightness."""
    rows, columns = _grid(height, width)
    images = torch.zeros(count, channels, height, width)
    smallest, largest = 0.03, 1.0
    for _ in range(_LEAVES):
        size = _uniform(rng, largest**-2, smallest**-2, count, 1, 1).rsqrt() * 0.5 + 0.05
        size = torch.maximum(size, _uniform(rng, 0.0, 0.6, count, 1, 1).pow(3))
        dx = rows - _uniform(rng, -0.1, 1.1, count, 1, 1)
        dy = columns - _uniform(rng, -0.1, 1.1, count, 1, 1)
        angle, aspect = _uniform(rng, 0.0, 3.1416, count, 1, 1), _uniform(rng, 0.3, 1.0, count, 1, 1)
        u, v = angle.cos() * dx + angle.sin() * dy, (angle.cos() * dy - angle.sin() * dx) / aspect
        round_ = torch.from_numpy(rng.random((count, 1, 1)) < 0.5)
        inside = torch.where(round_, (u * u + v * v).sqrt(), torch.maximum(u.abs(), v.abs())) < size
        brightness = _uniform(rng, 0.0, 1.0, count, 1, 1, 1)
        colour = brightness + 0.15 * torch.from_numpy(rng.standard_normal((count, channels, 1, 1))).float()
        images = torch.where(inside[:, None], colour.clamp(0, 1), images)
    return images
