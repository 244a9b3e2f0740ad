"""The cosine distance of gradients of linear networks, and its derivative, without forming a gradient.

The gradient S of a linear layer's weight is a sum of outer products of the gradients g with respect to the layer's
outputs and its inputs a, `S = sum_i g_i a_i^T`. With T the observed gradient,

    <S, T> = sum_i g_i^T (T a_i)    and    |S|^2 = sum_ij (g_i^T g_j) (a_i^T a_j).

The derivative of the cosine with respect to S is a multiple of `V = T - <S, T> / |S|^2 S`, whose products with a and g
follow from the same inner products. One more forward and one more backward pass with tangents along V give the
derivative with respect to the examples (see `fedveil.training.second_order`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fedveil.sequential import Activation, NamedLayer, activation, sequential_layers
from fedveil.tree import Params


@dataclass(frozen=True)
class _Layer:
    """An activation, None at the start, and the linear layer after it."""

    kind: Activation | None
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Pair:
    """The weight of a layer and the observed gradient of it, `[N, out, in]`; biases `[out]` and `[N, 1, out]`."""

    kind: Activation | None
    weight: Tensor
    wanted: Tensor
    bias: Tensor | None
    wanted_bias: Tensor | None

    def both(self) -> _Pair:
        """For a single row: the weight and the observed gradient as one matrix."""
        bias = None
        if self.bias is not None and self.wanted_bias is not None:
            bias = torch.cat([self.bias, self.wanted_bias[0, 0]])
        return _Pair(self.kind, torch.cat([self.weight, self.wanted[0]]), self.wanted, bias, None)


@dataclass
class _Pass:
    """The intermediate values of a layer: `[N, B, width]`, inner products `[N, B, B]`."""

    inputs: Tensor
    reached: Tensor
    """The observed gradient's product with the inputs."""
    of_inputs: Tensor
    slope: Tensor | None = None
    above: Tensor | None = None
    """The gradient with respect to the activation's outputs."""
    g: Tensor | None = None
    of_g: Tensor | None = None
    moved: Tensor | None = None


def linear_layers(model: nn.Module, input_shape: Sequence[int]) -> list[_Layer] | None:
    """The layers of a network of linear layers with at most one activation between two, or None for other models."""
    known = sequential_layers(model)
    if known is None:
        return None
    layers: list[_Layer] = []
    kind: Activation | None = None
    flat = len(input_shape) == 1
    for layer in known:
        own = activation(layer.module)
        if isinstance(layer.module, nn.Flatten):
            flat = True
        elif isinstance(layer.module, nn.Linear) and flat:
            layers.append(_Layer(kind, layer.names))
            kind = None
        elif own is not None and layers and kind is None:
            kind = own
        else:
            return None
    return layers if _reads(known, prod(input_shape)) else None


def _reads(known: Sequence[NamedLayer], inputs: int) -> bool:
    first = next(layer.module for layer in known if layer.names)
    return isinstance(first, nn.Linear) and first.in_features == inputs


class LinearMatching:
    """`1 - cos(gradient of each row's candidates, observed)`, over all parameters as one vector."""

    def __init__(self, layers: Sequence[_Layer], w: Params, observed: Params, labels: Tensor) -> None:
        """`observed` leaves are `[N, ...]`, `labels [N, B]`."""
        self._rows, self._examples = labels.shape
        pairs = [
            _Pair(
                layer.kind,
                w[layer.names[0]].detach(),
                observed[layer.names[0]],
                w[layer.names[1]].detach() if len(layer.names) > 1 else None,
                observed[layer.names[1]].unsqueeze(1) if len(layer.names) > 1 else None,
            )
            for layer in layers
        ]
        self._pairs = pairs
        self._both = [pair.both() for pair in pairs] if self._rows == 1 else None
        last = pairs[-1].weight
        self._labels = functional.one_hot(labels, last.shape[0]).to(last.dtype)
        leaves = [observed[name] for layer in layers for name in layer.names]
        squares = [leaf.flatten(1).square().sum(1) for leaf in leaves]
        self._length = torch.stack(squares).sum(0).clamp(min=1e-30).sqrt()

    def __call__(self, x: Tensor) -> Tensor:
        """The distance of each row of `x [N, B, ...]`, once differentiable."""
        distance: Tensor = _Distance.apply(self, x)  # type: ignore[no-untyped-call]
        return distance

    def with_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The distances `[N]` and their gradients, shaped as `x`."""
        passes, scores = self._forward(x.reshape(self._rows, self._examples, -1))
        g = (scores - self._labels).div_(self._examples) if self._examples > 1 else scores - self._labels
        self._backward(passes, g)
        product = _total(torch.linalg.vecdot(_flat(one.g), _flat(one.reached)) for one in passes)
        square = _total(torch.linalg.vecdot(_flat(one.of_g), _flat(one.of_inputs)) for one in passes)
        square = square.clamp_(min=1e-30)
        scale = (square.sqrt() * self._length).clamp_(min=1e-30)
        share = (product / square).neg_().view(-1, 1, 1)
        along = self._moved(passes, scores, share)
        along = along.div_(scale.neg().view(-1, 1, 1))
        return 1 - product / scale, along.view(x.shape)

    def _forward(self, h: Tensor) -> tuple[list[_Pass], Tensor]:
        """The layers' passes and the probabilities `[N, B, C]`."""
        passes = []
        for number, pair in enumerate(self._pairs):
            slope: Tensor | None = None
            if pair.kind is not None:
                h = getattr(torch, pair.kind)(h)
                slope = _slope(pair.kind, h)
            out, reached = self._times(number, h)
            of_inputs = torch.bmm(h, h.mT)
            passes.append(_Pass(h, reached, of_inputs if pair.bias is None else of_inputs.add_(1), slope))
            h = out
        return passes, torch.softmax(h, dim=-1)

    def _backward(self, passes: Sequence[_Pass], g: Tensor) -> None:
        for number in range(len(passes) - 1, -1, -1):
            one = passes[number]
            one.g, one.of_g = g, torch.bmm(g, g.mT)
            if number:
                one.above = g = _shared(g, self._pairs[number].weight)
                g = g if one.slope is None else g * one.slope

    def _moved(self, passes: Sequence[_Pass], scores: Tensor, share: Tensor) -> Tensor:
        """The gradient `[N, B, inputs]` of `<V, gradient>`."""
        out: Tensor | None = None
        for pair, one in zip(self._pairs, passes, strict=True):
            assert one.g is not None
            along = torch.baddbmm(one.reached, one.of_inputs.mul_(share), one.g)
            if out is not None:
                one.moved = out if one.slope is None else out.mul_(one.slope)
                along.add_(_shared(one.moved, pair.weight.T))
            out = along
        assert out is not None
        dg: Tensor = (out - torch.linalg.vecdot(scores, out).unsqueeze(-1)).mul_(scores)
        if self._examples > 1:
            dg.div_(self._examples)
        for number in range(len(passes) - 1, -1, -1):
            one = passes[number]
            assert one.of_g is not None
            dg = self._times_back(number, dg, one).baddbmm_(one.of_g.mul_(share), one.inputs)
            if one.slope is not None:
                dg = _bent(self._pairs[number].kind, dg, one)
        return dg

    def _times(self, number: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """The products of `h [N, B, in]` with the layer's weight and with the observed gradient."""
        if self._both is not None:
            both = self._both[number]
            out = functional.linear(h[0], both.weight, both.bias).unsqueeze(0)
            middle = out.shape[-1] // 2
            return out[..., :middle], out[..., middle:]
        pair = self._pairs[number]
        out = functional.linear(h.view(-1, h.shape[-1]), pair.weight, pair.bias)
        if pair.wanted_bias is None:
            return out.view(*h.shape[:2], -1), torch.bmm(h, pair.wanted.mT)
        return out.view(*h.shape[:2], -1), torch.baddbmm(pair.wanted_bias, h, pair.wanted.mT)

    def _times_back(self, number: int, dg: Tensor, one: _Pass) -> Tensor:
        """`dg @ weight + g @ observed`."""
        assert one.g is not None
        if self._both is not None:
            return torch.mm(torch.cat([dg[0], one.g[0]], dim=1), self._both[number].weight).unsqueeze(0)
        pair = self._pairs[number]
        return _shared(dg, pair.weight).baddbmm_(one.g, pair.wanted)


class _Distance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matching: LinearMatching, x: Tensor) -> Tensor:
        distance, ctx.along = matching.with_gradient(x)
        return distance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, pull: Tensor) -> tuple[None, Tensor]:
        return None, ctx.along * pull.view(-1, *([1] * (ctx.along.dim() - 1)))


def _slope(kind: Activation, out: Tensor) -> Tensor:
    if kind == "relu":
        return out.sign()
    return torch.addcmul(out, out, out, value=-1) if kind == "sigmoid" else 1 - out * out


def _bent(kind: Activation | None, dg: Tensor, one: _Pass) -> Tensor:
    """The tangent of the gradient with respect to the activation's inputs; the slope of a ReLU does not change."""
    assert one.slope is not None
    if kind == "relu":
        return dg.mul_(one.slope)
    assert one.above is not None
    assert one.moved is not None
    bend = one.above * one.moved
    along = dg.mul_(one.slope)
    if kind == "sigmoid":
        along.add_(bend)
    return along.addcmul_(bend, one.inputs, value=-2)


def _shared(h: Tensor, weight: Tensor) -> Tensor:
    """`h [N, B, k] @ weight [k, m]` as one product."""
    return torch.mm(h.reshape(-1, h.shape[-1]), weight).view(*h.shape[:2], -1)


def _flat(leaf: Tensor | None) -> Tensor:
    assert leaf is not None
    return leaf.reshape(leaf.shape[0], -1)


def _total(parts: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, parts)
