"""Terms of an attack's loss with gradients in closed form, which need fewer passes over memory than autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fedveil.training.second_order import Network
from fedveil.tree import Params, flatten


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


class NetworkCosine:
    """The cosine distance of a network's gradients from the observed ones, and its derivative without a graph."""

    def __init__(self, network: Network, w: Params, observed: Params, labels: Tensor) -> None:
        """`observed` leaves are `[N, ...]`, `labels [N, B]`."""
        self._network = network
        self._w = {name: leaf.detach() for name, leaf in w.items()}
        self._wanted = flatten({name: observed[name] for name in network.names})
        self._length = torch.linalg.vector_norm(self._wanted, dim=1).clamp(min=1e-15)
        last = w[network.names[-1]]
        self._labels = functional.one_hot(labels, last.shape[0]).to(last.dtype)
        self._sizes = [w[name].numel() for name in network.names]

    def __call__(self, x: Tensor) -> Tensor:
        """The distance of each row of `x [N, B, ...]`, once differentiable."""
        seen = flatten(self._network.gradients(self._w, x, self._labels))
        distance: Tensor = Cosine.apply(seen, self._wanted, self._length)  # type: ignore[no-untyped-call]
        return distance

    def with_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The distances `[N]` and their gradients, shaped as `x`."""
        passes, scores, found = self._network.begin(self._w, x, self._labels)
        seen = torch.cat([leaf.flatten(1) for leaf in found], dim=1)
        product = torch.linalg.vecdot(seen, self._wanted)
        square = torch.linalg.vecdot(seen, seen).clamp_(min=1e-30)
        scale = (square.sqrt() * self._length).clamp_(min=1e-30)
        cosine = product / scale
        along = seen.mul_((cosine / square).unsqueeze(1)).addcdiv_(self._wanted, scale.unsqueeze(1), value=-1)
        parts = zip(found, along.split(self._sizes, dim=1), strict=True)
        v = [part.view(leaf.shape) for leaf, part in parts]
        return 1 - cosine, self._network.moved(passes, scores, self._labels, v)[0].reshape(x.shape)


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
