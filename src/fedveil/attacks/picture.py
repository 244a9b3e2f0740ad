"""The figure of an attack: the client's images, the steps of the search, and the scores of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from fedveil.evaluation.image_quality import Brightness, Quality

_MOST_ROWS = 8
_CELL, _HEAD = 1.15, 0.88  # inches
_LETTERS = 11  # font size in points; the figure is shown at less than half its size
_INK, _SOFT = "#1b3a5c", "#57606a"


@dataclass(frozen=True)
class Strip:
    """One image: the original, the perturbed input if any, and the reconstruction at each step."""

    original: Tensor
    trained_on: Tensor | None
    path: Sequence[Tensor]


def reconstruction_figure(
    strips: Sequence[Strip],
    steps: Sequence[int],
    quality: Quality,
    brightness: Brightness,
    *,
    title: str,
    subtitle: str,
) -> Figure:
    """A row for each image (at most eight): original, FedEM's perturbation with full contrast, steps, scores."""
    shown = strips[:_MOST_ROWS]
    perturbed = shown[0].trained_on is not None
    heads = ["original", *(["trained on", "perturbation"] if perturbed else []), *_step_names(steps)]
    width = 0.2 + _CELL * (len(heads) + 1.2)
    height = _HEAD + 0.04 + (_CELL + 0.02) * len(shown)
    figure = Figure(figsize=(width, height), dpi=150)
    left, right = 0.1 / width, 1 - (1.15 * _CELL) / width
    grid = figure.add_gridspec(
        len(shown),
        len(heads),
        left=left,
        right=right,
        top=1 - _HEAD / height,
        bottom=0.04 / height,
        wspace=0.06,
        hspace=0.06,
    )
    for row, strip in enumerate(shown):
        images: list[np.ndarray] = [_pixels(strip.original, brightness)]
        if strip.trained_on is not None:
            images += [_pixels(strip.trained_on, brightness), _stretched(strip.trained_on - strip.original)]
        images += [_pixels(x, brightness) for x in strip.path]
        for column, image in enumerate(images):
            axes = figure.add_subplot(grid[row, column])
            _show(axes, image, strong=column in (0, len(heads) - 1))
            if row == 0:
                axes.set_title(heads[column], fontsize=_LETTERS, color=_INK if column == 0 else _SOFT, pad=3)
        _scores(figure, quality, row, right + 0.06 / width, _middle(grid, figure, row))
    figure.text(left, 1 - 0.12 / height, title, fontsize=13, color=_INK, weight="bold", va="top")
    figure.text(left, 1 - 0.38 / height, subtitle, fontsize=_LETTERS, color=_SOFT, va="top")
    return figure


def _step_names(steps: Sequence[int]) -> list[str]:
    return ["random start" if step == 0 else f"step {step}" for step in steps]


def _middle(grid: object, figure: Figure, row: int) -> float:
    bottoms, tops, _, _ = grid.get_grid_positions(figure)  # type: ignore[attr-defined]
    return float(bottoms[row] + tops[row]) / 2


def _scores(figure: Figure, quality: Quality, row: int, x: float, y: float) -> None:
    lines = [f"PSNR {quality.psnr[row]:.1f} dB", f"MSE {quality.mse[row]:.3g}"]
    if quality.ssim is not None:
        lines.append(f"SSIM {quality.ssim[row]:.2f}")
    if quality.lpips is not None:
        lines.append(f"LPIPS {quality.lpips[row]:.2f}")
    figure.text(x, y, "\n".join(lines), fontsize=_LETTERS, va="center", linespacing=1.3, color=_INK)


def _pixels(x: Tensor, brightness: Brightness) -> np.ndarray:
    """An image `[C, H, W]` as an array of brightness."""
    pixels: np.ndarray = brightness(x[None])[0].clamp(0, 1).permute(1, 2, 0).numpy()
    return pixels


def _stretched(difference: Tensor) -> np.ndarray:
    """A difference scaled to full contrast around middle grey."""
    scaled = 0.5 + difference / (2 * difference.abs().max().clamp(min=1e-12))
    pixels: np.ndarray = scaled.permute(1, 2, 0).numpy()
    return pixels


def _show(axes: Axes, image: np.ndarray, *, strong: bool) -> None:
    if image.shape[2] == 3:
        axes.imshow(image, interpolation="nearest")
    else:
        axes.imshow(image[..., 0], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(_INK if strong else "#c8ccd2")
        spine.set_linewidth(1.2 if strong else 0.6)
