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
        steps = [x.diff(dim=axis) for axis in (-2, -1)]
        ctx.signs = [step.sign() for step in steps]
        return torch.stack([step.abs_().flatten(1).mean(1) for step in steps]).sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, pull: Tensor) -> Tensor:
        down, across = ctx.signs
        pull = pull.reshape(-1, *([1] * (down.dim() - 1)))
        found = pull.new_zeros(*across.shape[:-1], down.shape[-1])
        down = down * (pull / down[0].numel())
        found[..., 1:, :] += down
        found[..., :-1, :] -= down
        across = across * (pull / across[0].numel())
        found[..., 1:] += across
        found[..., :-1] -= across
        return found
