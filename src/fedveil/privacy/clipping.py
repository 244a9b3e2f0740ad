"""Clipping: bounds on the contribution of one client or example, from which the sensitivity follows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from fedveil.errors import DivergedError, InputError
from fedveil.lazy_torch import torch
from fedveil.streams import Stream
from fedveil.tree import Params, flat_rows

if TYPE_CHECKING:
    from torch import Tensor

# Rounding of the factor and of the scaled row may increase the norm by less than this share, so it is subtracted in
# advance. The margin also covers the rounding errors of a float64 sum of up to 2^15 rows.
_MARGIN = {
    "torch.float64": 2.0**-21,
    "torch.float32": 2.0**-21,
    "torch.float16": 2.0**-9,
    "torch.bfloat16": 2.0**-6,
}
_UNIT = 2.0**-52
_SMALLEST_FACTOR = 1e-30
_SMALLEST_CLIP = 1e-30  # float32 has too few digits for shorter rows
_SMALLEST_UPDATE = 1e-150  # shorter updates lose their direction when scaled: they count as zero
_NOT_FINITE = "a client's update is not finite: it cannot be clipped, so it is not released"
_HIDDEN: ContextVar[list[int] | None] = ContextVar("hidden divergence", default=None)


@contextmanager
def hidden_divergence() -> Iterator[list[int]]:
    """In this context a contribution that is not finite counts as zero instead of raising `DivergedError`.

    The error would disclose something about the data without noise, and a server could choose a model that provokes
    it. Zero satisfies every clip. The yielded list informs the owner of the data how often this happened.
    """
    happened: list[int] = []
    token = _HIDDEN.set(happened)
    try:
        yield happened
    finally:
        _HIDDEN.reset(token)


def hide(not_finite: int) -> bool:
    """Whether this number of contributions that are not finite counts as zero; if false, they are an error."""
    happened = _HIDDEN.get()
    if happened is None:
        return False
    happened.append(not_finite)
    return True


def _finite(params: Params) -> Params:
    """`params` with rows that are not finite (over all leaves) set to zero, where `hidden_divergence` is active."""
    if _HIDDEN.get() is None:
        return params
    whole = torch.stack([flat_rows(leaf).isfinite().all(-1) for leaf in params.values()]).all(0)
    if bool(whole.all()):
        return params
    hide(int((~whole).sum()))
    return {
        name: leaf.where(whole.reshape(-1, *(1 for _ in leaf.shape[1:])), 0) for name, leaf in params.items()
    }


def check_clip(clip: float) -> float:
    if not (math.isfinite(clip) and clip >= _SMALLEST_CLIP):
        raise InputError("clip", clip, "is not a bound", f"Use a finite number, {_SMALLEST_CLIP:g} or more.")
    return clip


def check_level(field: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InputError(field, value, "is not a noise level", "Use a positive finite number.")


def check_streams(value: Params, streams: Sequence[Stream]) -> None:
    rows = next(iter(value.values())).shape[0]
    if len(streams) != rows:
        raise InputError("streams", len(streams), f"there are {rows} clients", "Give one stream per client.")


def row_norms(leaves: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each row of all leaves together, in float64.

    Huge values do not overflow and denormal values do not underflow: rows are scaled by their largest value if needed.
    """
    flat = [flat_rows(leaf.detach()) for leaf in leaves]
    norm = torch.stack([part.double().square().sum(-1) for part in flat]).sum(0).sqrt()
    if bool(((norm > 1e-150) & (norm < 1e150)).all()):
        return norm
    largest = torch.stack([part.abs().amax(-1).double() for part in flat]).amax(0)
    if not bool(torch.isfinite(largest).all()):
        raise DivergedError(_NOT_FINITE, field="update")
    unit = torch.where(largest > 0, largest, torch.ones_like(largest))
    squares = [(part.double() / unit.unsqueeze(-1)).square().sum(-1) for part in flat]
    return torch.stack(squares).sum(0).sqrt() * largest


def _shrink(leaf: Tensor, norm: Tensor, clip: float, entries: int) -> Tensor:
    """`leaf` scaled so that row norms are at most `clip`; `norm` is the norm of rows with `entries` values, in float64.

    The error of a sum of n squares or magnitudes in float64 is below n units in the last place.
    """
    bound = check_clip(clip) * (1 - _MARGIN[str(leaf.dtype)] - (entries + 16) * _UNIT)
    if bool((norm <= bound).all()):
        return leaf
    factor = torch.where(norm > bound, bound / norm, torch.ones_like(norm))
    shape = factor.shape + (1,) * (leaf.dim() - factor.dim())
    if bool((factor < _SMALLEST_FACTOR).any()):  # the factor itself would be denormal in float32
        return (leaf.double() * factor.reshape(shape)).to(leaf.dtype)
    return leaf * factor.to(leaf.dtype).reshape(shape)


def clip_rows(params: Params, clip: float) -> Params:
    """Clip each client's parameters, taken as one vector, to an L2 norm of at most `clip`.

    Rows clearly within the bound are returned unchanged; the others end within a millionth below it.

    Args:
        params: Leaves `[K, ...]`.
        clip: The largest norm.

    Returns:
        The clipped parameters.

    Guarantees:
        No row is longer than `clip` in exact arithmetic
        (`test_no_clipped_row_is_longer_than_the_clip_in_exact_arithmetic`).
    """
    params = _finite(params)
    norm = row_norms(list(params.values()))
    entries = _entries(params)
    return {name: _shrink(leaf, norm, clip, entries) for name, leaf in params.items()}


def _entries(params: Params) -> int:
    return sum(math.prod(leaf.shape[1:]) for leaf in params.values())


def clip_rows_l1(params: Params, clip: float) -> Params:
    """Each client's parameters, taken as one vector, to an L1 norm of at most `clip`."""
    params = _finite(params)
    norm = torch.stack([flat_rows(leaf.detach()).double().abs().sum(1) for leaf in params.values()]).sum(0)
    overflows = not bool(torch.isfinite(norm).all())  # finite rows whose norm overflows are scaled to zero
    if overflows and not all(bool(leaf.isfinite().all()) for leaf in params.values()):
        raise DivergedError(_NOT_FINITE, field="update")
    entries = _entries(params)
    return {name: _shrink(leaf, norm, clip, entries) for name, leaf in params.items()}


def normalise_rows(params: Params, norm: float) -> Params:
    """Each client's parameters `[K, ...]`, taken as one vector, to an L2 norm of `norm`; zero stays zero.

    Every client then contributes equally, whatever the norm of its update.

    Guarantees: no row is longer than `norm` in exact arithmetic, so that the sensitivity is that of a clip to `norm`
    (`test_no_normalised_row_is_longer_than_the_clip_in_exact_arithmetic`), and clipping does not change it.
    """
    params, norm = _finite(params), check_clip(norm)
    length, entries = row_norms(list(params.values())), _entries(params)
    nothing = length < _SMALLEST_UPDATE
    scaled = {}
    for name, leaf in params.items():
        bound = norm * (1 - 2 * _MARGIN[str(leaf.dtype)] - 2 * (entries + 16) * _UNIT)
        factor = torch.where(nothing, 0.0, bound / length.where(~nothing, 1.0))
        scaled[name] = (leaf.double() * factor.reshape(factor.shape + (1,) * (leaf.dim() - 1))).to(leaf.dtype)
    return scaled
