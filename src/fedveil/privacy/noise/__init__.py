"""The only package that draws privacy noise. Mechanisms and distortions use it; nothing else does.

Each entry point `add_...` takes the value, the scale of the noise and the streams it is drawn from, and returns the
noisy value: no function returns noise alone. Normal and Laplace noise is exact on a grid
(`grid`), choices compare real numbers (`choice`), integers are drawn exactly (`integers`). Proofs: docs/noise.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedveil.lazy_torch import torch
from fedveil.privacy.noise import choice, grid
from fedveil.privacy.noise.grid import grid_step
from fedveil.privacy.noise.integers import add_binomial, add_discrete_gaussian
from fedveil.streams import Stream, normal
from fedveil.tree import Params

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "add_binomial",
    "add_direction",
    "add_discrete_gaussian",
    "add_gaussian",
    "add_laplace",
    "grid_step",
    "largest",
    "reaching",
]


def add_gaussian(value: Params, std: float, streams: Sequence[Stream], step: float | None = None) -> Params:
    """Normal noise of standard deviation `std` on values `[K, ...]`, row k from stream k.

    Guarantees: each result is the multiple of `step` nearest to the exact sum
    (`test_words_at_the_border_between_two_multiples_are_decided_exactly`), rounded to the type of `value`.

    Args:
        value: The values to protect.
        std: The standard deviation.
        streams: One for each row.
        step: The grid, a power of two; by default `grid_step(std)`.
    """
    chosen = grid_step(std) if step is None else step
    return _by_row(value, streams, lambda row, stream: grid.rounded_normal(row, std, chosen, stream))


def add_laplace(value: Params, scale: float, streams: Sequence[Stream]) -> Params:
    """Laplace noise of `scale` on values `[K, ...]`, row k from stream k, on the grid `grid_step(scale)`."""
    step = grid_step(scale)
    return _by_row(value, streams, lambda row, stream: grid.rounded_laplace(row, scale, step, stream))


def reaching(
    values: Tensor, threshold: float, scales: tuple[float, float], order: Tensor, most: int, stream: Stream
) -> Tensor:
    """The first `most` positions in `order` whose value `[d]` reaches the threshold, with Laplace noise on both.

    The threshold gets one draw of scale `scales[0]`, each value one of `scales[1]`.
    """
    row = values.double().cpu().numpy()
    found = choice.above_noisy_threshold(row, threshold, scales, order.cpu().numpy(), most, stream)
    return torch.from_numpy(found).to(order.device)


def largest(values: Tensor, scale: float, count: int, streams: Sequence[Stream]) -> Tensor:
    """The positions `[K, count]` of the largest values `[K, d]` with Gumbel noise of `scale`, row k from stream k."""
    rows = values.double().cpu().numpy()
    found = [
        choice.largest_by_gumbel(row, scale, count, stream) for row, stream in zip(rows, streams, strict=True)
    ]
    return torch.from_numpy(np.stack(found)).to(values.device)


def add_direction(value: Tensor, length: float, streams: Sequence[Stream]) -> Tensor:
    """Add a vector of fixed `length` and random direction to each row of `value` `[K, d]`; gives no guarantee."""
    drawn = normal(streams, value.shape[1:], value)
    unit: Tensor = drawn / drawn.norm(dim=1, keepdim=True)
    return value + length * unit


def _by_row(
    value: Params,
    streams: Sequence[Stream],
    draw: Callable[[npt.NDArray[np.floating], Stream], npt.NDArray[np.floating]],
) -> Params:
    """Apply `draw` to each row of each leaf; float32 and float64 rows are not converted."""
    noisy: Params = {}
    for name, leaf in value.items():
        kept = leaf.dtype if leaf.dtype in (torch.float32, torch.float64) else torch.float64
        rows = leaf.detach().to("cpu", kept).contiguous()
        found = torch.empty_like(rows)
        for k, stream in enumerate(streams):
            found[k] = torch.from_numpy(draw(rows[k].numpy().reshape(-1), stream)).reshape(rows[k].shape)
        noisy[name] = found.to(leaf)
    return noisy
