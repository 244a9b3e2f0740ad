"""How far the gradients of synthetic data are from those of real data (FedLAP-DP, Eq. 16-17).

Symbols: `g` the (noisy) gradient on real data, `s` the gradient on synthetic data. Weights are seen as
matrices with one row per output node: a convolution `[o, i, kh, kw]` becomes `[o, i * kh * kw]`.

Deviations: vectors (biases, norm scales) are left out of the cosine term unless asked for. A bias in front
of a norm has a gradient of zero up to rounding, and the direction of rounding errors would steer the images.
A row that is zero on either side has no direction: it counts as cosine 0 and pulls nowhere.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedveil.errors import InputError
from fedveil.tree import Params


def matching_loss(
    real: Params,
    synthetic: Params,
    *,
    squared_weight: float = 0.1,
    reduce: Literal["sum", "mean"] = "sum",
    include_vectors: bool = False,
) -> Tensor:
    """`sum over layers of sum over rows (1 - cos(g_row, s_row)) + squared_weight * |g - s|^2`.

    `reduce` says whether the cosine term sums over a layer's rows (the paper) or averages them (its code).
    With `include_vectors` a vector joins the cosine term as a single row. The squared term covers every
    parameter. Twice differentiable where no row is zero; never NaN for finite input.
    """
    _check(real, synthetic, squared_weight, reduce)
    total = next(iter(synthetic.values())).new_zeros(())
    for name, s in synthetic.items():
        g = real[name].detach()
        if s.dim() > 1 or include_vectors:
            distance = 1 - _row_cosines(_as_rows(g), _as_rows(s))  # Eq. 17
            total = total + (distance.sum() if reduce == "sum" else distance.mean())
        if squared_weight:
            total = total + squared_weight * (g - s).square().sum()  # Eq. 16
    return total


def _as_rows(leaf: Tensor) -> Tensor:
    return leaf.flatten(1) if leaf.dim() > 1 else leaf.reshape(1, -1)


def _row_cosines(g: Tensor, s: Tensor) -> Tensor:
    """Cosines of the rows; 0, with gradient 0, where a row is zero."""
    unit = _unit_rows(g)
    scale = s.detach().abs().amax(1, keepdim=True)
    empty = scale == 0
    scaled = s / scale.masked_fill(empty, 1.0)  # squares of very small or large gradients stay in range
    length = scaled.square().sum(1, keepdim=True).masked_fill(empty, 1.0).sqrt()
    return (unit.masked_fill(empty, 0.0) * scaled / length).sum(1)


def _unit_rows(g: Tensor) -> Tensor:
    scale = g.abs().amax(1, keepdim=True)
    scaled = g / scale.masked_fill(scale == 0, 1.0)
    length = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    unit: Tensor = scaled / length.masked_fill(length == 0, 1.0)
    return unit


def _check(real: Params, synthetic: Params, squared_weight: float, reduce: str) -> None:
    if not synthetic or set(real) != set(synthetic):
        odd = sorted(set(real) ^ set(synthetic))
        raise InputError("synthetic", odd, "real and synthetic gradients differ in names", "Use one model.")
    for name, leaf in synthetic.items():
        if real[name].shape != leaf.shape:
            raise InputError(
                name, tuple(leaf.shape), f"differs from the real {tuple(real[name].shape)}", "Use one model."
            )
    if isinstance(squared_weight, bool) or not 0 <= squared_weight < float("inf"):
        raise InputError("squared_weight", squared_weight, "must be finite and not negative", "Use 0.1 or 0.")
    if reduce not in ("sum", "mean"):
        raise InputError("reduce", reduce, "is not a way to combine rows", "Use sum or mean.")
