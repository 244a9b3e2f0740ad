"""Terms of an attack's loss with gradients in closed form, which need fewer passes over memory than autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Cosine(torch.autograd.Function):
    """`1 - cos(seen, wanted)` of each row, with its gradient in two passes over the row."""

    @staticmethod
    def forward(ctx: Any, seen: Tensor, wanted: Tensor, length: Tensor) -> Tensor:
        product, square = torch.linalg.vecdot(seen, wanted), torch.linalg.vecdot(seen, seen).clamp(min=1e-30)
        scale = (square.sqrt() * length).clamp(min=1e-30)
        cosine: Tensor = product / scale
        ctx.save_for_backward(seen, wanted, scale, cosine, square)
        return 1 - cosine

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, pull: Tensor) -> tuple[Tensor, None, None]:
        seen, wanted, scale, cosine, square = ctx.saved_tensors
        along = seen * (pull * cosine / square).unsqueeze(1)
        return along.addcmul_(wanted, (-pull / scale).unsqueeze(1)), None, None


class Variation(torch.autograd.Function):
    """`total_variation`, whose gradient consists of signs of differences."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        value, ctx.along = variation_with_gradient(x)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, pull: Tensor) -> Tensor:
        found: Tensor = ctx.along * pull.reshape(-1, *([1] * (ctx.along.dim() - 1)))
        return found


def variation_with_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
    """The `total_variation` of each row, and its gradient."""
    (of_down, down), (of_across, across) = _steps(x, -2), _steps(x, -1)
    return of_down.add_(of_across), down.add_(across)


def _steps(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The mean absolute difference of neighbours along an axis of each row, and its gradient."""
    size = x.shape[axis]
    # With a zero before the first and after the last difference, each pixel lies between two.
    steps = x.new_zeros(*x.shape[:axis], size + 1, *x.shape[axis:][1:])
    torch.sub(x.narrow(axis, 1, size - 1), x.narrow(axis, 0, size - 1), out=steps.narrow(axis, 1, size - 1))
    count = max(1, x[0].numel() // size * (size - 1))
    value = torch.linalg.vector_norm(steps.flatten(1), ord=1, dim=1).div_(count)
    steps.sign_()
    return value, (steps.narrow(axis, 0, size) - steps.narrow(axis, 1, size)).div_(count)
