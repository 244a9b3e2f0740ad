"""Images that the library draws itself, from which feature maps take their constants: no data is looked at.

"strokes": smooth pen strokes on black, like digits and letters (quadratic Bezier curves).
"glyphs": thicker strokes with softer edges, centred and scaled to a box as scanned characters are.
"leaves": the dead-leaves model, discs and rectangles of all sizes that cover one another, whose edges and scales are
distributed like those of photographs (Lee, Mumford, Huang: Occlusion Models for Natural Images. IJCV 2001).
"scenes": dead leaves with the blur, contrast and muted colours of photographs. Strong edges everywhere would move the
mean of the features away from that of photographs, and the common part of all records then hides what differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from fedveil.lazy_torch import torch
from fedveil.streams import named_stream

if TYPE_CHECKING:
    from torch import Tensor

SyntheticImages = Literal["strokes", "glyphs", "leaves", "scenes"]

_SEED = 0
_STROKES, _POINTS, _LEAVES = 3, 16, 60
_GLYPH_STROKES = 4
_BOX = 0.62  # side of the box that glyphs fill, of the image's side
_FAR = 9.0  # where strokes lie that are not drawn: out of sight
_REACH = 5  # pixels of a blur to each side
_CHUNK = 256


def draw(kind: SyntheticImages, count: int, channels: int, height: int, width: int) -> Tensor:
    """`count` images `[n, channels, height, width]` of brightness 0 to 1, always the same ones."""
    rng = named_stream(_SEED, "synthetic images", kind)
    if kind == "leaves":
        return _leaves(rng, count, channels, height, width)
    if kind == "scenes":
        return _softened(rng, _leaves(rng, count, channels, height, width))
    one = _strokes if kind == "strokes" else _glyphs
    parts = [one(rng, min(_CHUNK, count - start), height, width) for start in range(0, count, _CHUNK)]
    return torch.cat(parts).unsqueeze(1).expand(-1, channels, -1, -1).contiguous()


def _uniform(rng: np.random.Generator, low: float, high: float, *shape: int) -> Tensor:
    return torch.from_numpy(rng.uniform(low, high, shape)).float()


def _grid(height: int, width: int) -> tuple[Tensor, Tensor]:
    """The positions of the pixels, from 0 to 1 along the shorter side."""
    side = min(height, width)
    return torch.arange(height)[:, None] / side, torch.arange(width)[None] / side


def _strokes(rng: np.random.Generator, count: int, height: int, width: int) -> Tensor:
    """One to three curves each, in the middle of the image, with soft edges."""
    ends = _uniform(rng, 0.2, 0.8, count, _STROKES, 3, 2)
    joined = torch.from_numpy(rng.random(count) < 0.7)
    for stroke in range(1, _STROKES):  # most strokes begin where the last one ended
        ends[joined, stroke, 0] = ends[joined, stroke - 1, 2]
    curve = _curves(ends)
    drawn = torch.from_numpy(rng.integers(1, _STROKES + 1, count))
    absent = torch.arange(_STROKES) >= drawn[:, None]
    curve[absent] = _FAR
    radius = _uniform(rng, 0.025, 0.065, count, 1, 1)
    return _inked(curve, radius, height, width, soft=1)


def _glyphs(rng: np.random.Generator, count: int, height: int, width: int) -> Tensor:
    """One to four curves each, moved to the middle and scaled to the box."""
    ends = _uniform(rng, 0.2, 0.8, count, _GLYPH_STROKES, 3, 2)
    joined = torch.from_numpy(rng.random((count, _GLYPH_STROKES)) < 0.7)
    for stroke in range(1, _GLYPH_STROKES):
        follows = joined[:, stroke]
        ends[follows, stroke, 0] = ends[follows, stroke - 1, 2]
    curve = _curves(ends)
    drawn = torch.from_numpy(rng.integers(1, _GLYPH_STROKES + 1, count))
    absent = (torch.arange(_GLYPH_STROKES) >= drawn[:, None])[:, :, None, None]
    low = curve.masked_fill(absent, _FAR).amin((1, 2), keepdim=True)
    high = curve.masked_fill(absent, -_FAR).amax((1, 2), keepdim=True)
    size = (high - low).amax(-1, keepdim=True).clamp(min=0.2)
    middle = torch.tensor([height, width]) / (2 * min(height, width))
    curve = (curve - (low + high) / 2) * (_BOX / size) + middle
    radius = _uniform(rng, 0.045, 0.085, count, 1, 1)
    return _inked(curve.masked_fill(absent, _FAR), radius, height, width, soft=2)


def _curves(ends: Tensor) -> Tensor:
    """Points `[n, strokes, points, 2]` along quadratic Bezier curves with these ends and middles."""
    t = torch.linspace(0, 1, _POINTS)[:, None]
    return (
        (1 - t) ** 2 * ends[:, :, None, 0]
        + 2 * t * (1 - t) * ends[:, :, None, 1]
        + t**2 * ends[:, :, None, 2]
    )


def _inked(curve: Tensor, radius: Tensor, height: int, width: int, soft: int) -> Tensor:
    """Images of pens that follow the curves; ink fades out over so many pixels."""
    rows, columns = _grid(height, width)
    pixels = torch.stack(torch.broadcast_tensors(rows, columns), -1).reshape(1, -1, 2)
    count = len(curve)
    distance = torch.cdist(pixels.expand(count, -1, -1), curve.reshape(count, -1, 2)).amin(-1)
    pixel = 1.0 / min(height, width)
    return (1 - (distance.reshape(count, height, width) - radius) / (soft * pixel)).clamp(0, 1)


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


def _softened(rng: np.random.Generator, images: Tensor) -> Tensor:
    """Each image blurred, with fainter colours, less contrast and a brightness of its own."""
    count = len(images)
    images = _blurred(images, _uniform(rng, 0.4, 1.6, count))
    grey = images.mean(1, keepdim=True)
    images = grey + (images - grey) * _uniform(rng, 0.0, 1.0, count, 1, 1, 1)
    middle = images.mean((1, 2, 3), keepdim=True)
    contrast, brightness = _uniform(rng, 0.15, 0.8, count, 1, 1, 1), _uniform(rng, 0.2, 0.8, count, 1, 1, 1)
    return (brightness + (images - middle) * contrast).clamp(0, 1)


def _blurred(images: Tensor, sigma: Tensor) -> Tensor:
    """Images `[n, C, h, w]` under a Gaussian of `sigma [n]` pixels; borders are repeated."""
    places = torch.arange(-_REACH, _REACH + 1)
    kernel = torch.exp(-places.square() / (2 * sigma[:, None].square()))
    kernel = kernel / kernel.sum(1, keepdim=True)
    for axis in (2, 3):
        margins = (0, 0, _REACH, _REACH) if axis == 2 else (_REACH, _REACH, 0, 0)
        padded, size = torch.nn.functional.pad(images, margins, mode="replicate"), images.shape[axis]
        images = torch.zeros_like(images)
        for place in range(2 * _REACH + 1):
            images += kernel[:, place, None, None, None] * padded.narrow(axis, place, size)
    return images
