"""Gradients of examples that can be differentiated with respect to the examples, in closed form.

Attacks optimise candidates `x` until their gradient `s(x)` is the observed one: with `v` the gradient of a distance
with respect to `s`, they need the gradient of `<v, s(x)>` with respect to `x`. That is the derivative of the loss'
input gradient in the direction `v` of the weights: one more forward and one more backward pass with tangents (forward
over reverse). Autograd does the same through a graph of the backward pass, whose overhead dominates for small images.

Symbols: `h` inputs of a layer, `g` gradient with respect to its outputs, `dh` and `dg` their changes along `v`.
N rows of B examples each share the weights `w`; gradients and `v` are each row's own, `[N, ...]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fedveil.sequential import Activation, NamedLayer, activation, sequential_layers
from fedveil.tree import Params


class Pass(ABC):
    """The intermediate values of one layer in one pass over N rows of B examples."""

    @abstractmethod
    def forward(self, h: Tensor) -> Tensor: ...

    @abstractmethod
    def backward(self, g: Tensor, *, further: bool) -> tuple[Tensor | None, list[Tensor]]:
        """The gradient with respect to the inputs (None unless it is needed `further` on) and to each parameter."""

    @abstractmethod
    def moved(self, dh: Tensor | None, v: Sequence[Tensor]) -> Tensor | None:
        """The tangent of the outputs; None for the examples themselves, whose tangent is zero."""

    @abstractmethod
    def moved_back(self, dg: Tensor, v: Sequence[Tensor]) -> Tensor:
        """The tangent of the gradient with respect to the inputs."""


class _Affine(Pass):
    """`weight @ h + bias` for `h [N * B, in, P]`: a linear layer (P = 1), or a convolution of unfolded images."""

    def __init__(self, rows: int, weight: Tensor, bias: Tensor | None) -> None:
        self._rows = rows
        self._shape = weight.shape
        self._weight = weight.flatten(1)
        self._bias = bias

    def unfolded(self, h: Tensor) -> Tensor:
        return h.unsqueeze(-1)

    def folded(self, columns: Tensor) -> Tensor:
        return columns.squeeze(-1)

    def shaped(self, out: Tensor) -> Tensor:
        return out.squeeze(-1)

    def forward(self, h: Tensor) -> Tensor:
        self._columns = self.unfolded(h)
        out = self._times(self._weight, self._columns)
        return self.shaped(out if self._bias is None else out.add_(self._bias.unsqueeze(-1)))

    def backward(self, g: Tensor, *, further: bool) -> tuple[Tensor | None, list[Tensor]]:
        self._g = g.reshape(g.shape[0], self._shape[0], -1)
        each = torch.bmm(self._g, self._columns.transpose(1, 2))
        found = [self._of_rows(each).reshape(-1, *self._shape)]
        if self._bias is not None:
            found.append(self._of_rows(self._g.sum(-1)))
        return self.folded(self._times(self._weight.T, self._g)) if further else None, found

    def moved(self, dh: Tensor | None, v: Sequence[Tensor]) -> Tensor:
        self._v = self._of_examples(v[0].flatten(2))
        if dh is None:
            out = torch.bmm(self._v, self._columns)
        else:
            out = self._times(self._weight, self.unfolded(dh)).baddbmm_(self._v, self._columns)
        return self.shaped(out if self._bias is None else out.add_(self._of_examples(v[1]).unsqueeze(-1)))

    def moved_back(self, dg: Tensor, v: Sequence[Tensor]) -> Tensor:
        along = self._times(self._weight.T, dg.reshape(self._g.shape))
        return self.folded(along.baddbmm_(self._v.transpose(1, 2), self._g))

    def _times(self, matrix: Tensor, columns: Tensor) -> Tensor:
        return torch.bmm(matrix.expand(columns.shape[0], *matrix.shape), columns)

    def _of_rows(self, each: Tensor) -> Tensor:
        """The sum over each row's examples."""
        if each.shape[0] == self._rows:
            return each
        return each.reshape(self._rows, -1, *each.shape[1:]).sum(1)

    def _of_examples(self, row: Tensor) -> Tensor:
        """Each row's value for each of its examples."""
        examples = self._columns.shape[0] // self._rows
        return row if examples == 1 else row.repeat_interleave(examples, dim=0)


class _Convolution(_Affine):
    def __init__(self, rows: int, layer: nn.Conv2d, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(rows, weight, bias)
        padding = layer.padding
        assert isinstance(padding, tuple)
        self._kernel = layer.kernel_size
        self._how = {"stride": layer.stride, "padding": padding, "dilation": layer.dilation}
        self._layer = layer

    def forward(self, h: Tensor) -> Tensor:
        self._size = (h.shape[2], h.shape[3])
        reach = [d * (k - 1) + 1 for d, k in zip(self._layer.dilation, self._layer.kernel_size, strict=True)]
        self._out = tuple(
            (size + 2 * p - r) // s + 1
            for size, p, r, s in zip(self._size, self._how["padding"], reach, self._layer.stride, strict=True)
        )
        return super().forward(h)

    def unfolded(self, h: Tensor) -> Tensor:
        return functional.unfold(h, self._kernel, **self._how)

    def folded(self, columns: Tensor) -> Tensor:
        return functional.fold(columns, self._size, self._kernel, **self._how)

    def shaped(self, out: Tensor) -> Tensor:
        return out.view(*out.shape[:2], *self._out)


class _Activation(Pass):
    def __init__(self, kind: Activation) -> None:
        self._kind = kind

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = getattr(torch, self._kind)(h)
        self._out = out
        if self._kind == "relu":
            self._slope = (out > 0).to(out.dtype)
        else:
            self._slope = torch.addcmul(out, out, out, value=-1) if self._kind == "sigmoid" else 1 - out * out
        return out

    def backward(self, g: Tensor, *, further: bool) -> tuple[Tensor | None, list[Tensor]]:
        self._g = g
        return g * self._slope if further else None, []

    def moved(self, dh: Tensor | None, v: Sequence[Tensor]) -> Tensor:
        assert dh is not None
        self._moved = dh * self._slope
        return self._moved

    def moved_back(self, dg: Tensor, v: Sequence[Tensor]) -> Tensor:
        along = dg * self._slope
        if self._kind == "relu":  # its slope does not change
            return along
        bend = self._g * self._moved
        if self._kind == "sigmoid":
            along.add_(bend)
        return along.addcmul_(bend, self._out, value=-2)


class _Flatten(Pass):
    def forward(self, h: Tensor) -> Tensor:
        self._shape = h.shape
        return h.flatten(1)

    def backward(self, g: Tensor, *, further: bool) -> tuple[Tensor | None, list[Tensor]]:
        return g.reshape(self._shape), []

    def moved(self, dh: Tensor | None, v: Sequence[Tensor]) -> Tensor | None:
        return None if dh is None else dh.flatten(1)

    def moved_back(self, dg: Tensor, v: Sequence[Tensor]) -> Tensor:
        return dg.reshape(self._shape)


def _begin(layer: NamedLayer, rows: int, w: Params) -> Pass:
    if isinstance(layer.module, nn.Flatten):
        return _Flatten()
    if (kind := activation(layer.module)) is not None:
        return _Activation(kind)
    weight, bias = w[layer.names[0]], w[layer.names[1]] if len(layer.names) > 1 else None
    if isinstance(layer.module, nn.Conv2d):
        return _Convolution(rows, layer.module, weight, bias)
    return _Affine(rows, weight, bias)


class Network:
    """A `nn.Sequential` of small convolutions, linear layers, activations and flatten that ends in class scores."""

    def __init__(self, layers: Sequence[NamedLayer]) -> None:
        self._layers = tuple(layers)
        self.names = tuple(name for layer in layers for name in layer.names)
        self._first = next(i for i, layer in enumerate(layers) if layer.names)

    @classmethod
    def recognise(cls, model: nn.Module) -> Network | None:
        """The network of this model in evaluation mode, or None if it is anything else."""
        layers = sequential_layers(model)
        if layers is None:
            return None
        first = next(i for i, layer in enumerate(layers) if layer.names)
        return cls(layers) if all(type(layer.module) is nn.Flatten for layer in layers[:first]) else None

    def gradients(self, w: Params, x: Tensor, y: Tensor) -> Params:
        """The gradient of each row's mean cross-entropy, `[N, ...]`: once differentiable in `x` and in soft labels.

        `x` is `[N, B, ...]`; `y` is `[N, B]` classes or `[N, B, C]` probabilities.
        """
        if not y.is_floating_point():
            y = functional.one_hot(y, w[self.names[-1]].shape[0]).to(x.dtype)
        found = _Gradients.apply(self, w, x, y)  # type: ignore[no-untyped-call]
        return dict(zip(self.names, found, strict=True))

    def begin(self, w: Params, x: Tensor, y: Tensor) -> tuple[list[Pass], Tensor, list[Tensor]]:
        """All layers' passes, the probabilities `[N * B, C]`, and the gradients by `names`."""
        passes = [_begin(layer, x.shape[0], w) for layer in self._layers]
        h = x.flatten(0, 1)
        for one in passes:
            h = one.forward(h)
        scores = torch.softmax(h, dim=-1)
        labels = y.flatten(0, 1)
        g: Tensor | None = (scores * labels.sum(-1, keepdim=True)).sub_(labels).div_(x.shape[1])
        found: list[list[Tensor]] = []
        for number in range(len(passes) - 1, self._first - 1, -1):
            assert g is not None
            g, own = passes[number].backward(g, further=number > self._first)
            found.append(own)
        return passes, scores, [leaf for own in reversed(found) for leaf in own]

    def moved(
        self, passes: Sequence[Pass], scores: Tensor, y: Tensor, v: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The gradients of `<v, gradients>` with respect to the examples `[N * B, ...]` and to soft labels."""
        left = list(v)
        own = [[left.pop(0) for _ in layer.names] for layer in self._layers]
        dh: Tensor | None = None
        for one, pull in zip(passes, own, strict=True):
            dh = one.moved(dh, pull)
        assert dh is not None
        centred = dh - (scores * dh).sum(-1, keepdim=True)
        labels, examples = y.flatten(0, 1), y.shape[1]
        dg = (scores * centred).mul_(labels.sum(-1, keepdim=True)).div_(examples)
        for one, pull in zip(reversed(passes), reversed(own), strict=True):
            dg = one.moved_back(dg, pull)
        return dg, centred.div_(-examples).reshape(y.shape)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, network: Network, w: Params, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        ctx.network, ctx.shape, ctx.y = network, x.shape, y
        ctx.passes, ctx.scores, found = network.begin(w, x, y)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *v: Tensor) -> tuple[None, None, Tensor, Tensor]:
        of_x, of_y = ctx.network.moved(ctx.passes, ctx.scores, ctx.y, v)
        return None, None, of_x.reshape(ctx.shape), of_y
