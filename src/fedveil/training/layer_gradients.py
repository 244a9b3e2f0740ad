"""Per-example gradients in closed form, layer by layer, stored in the cheapest form.

With layer input `a_i` and output gradient `g_i` of example i, a linear layer has the gradient `g_i a_i^T`, whose norm
is `|g_i| |a_i|` and whose weighted sum over examples is one matrix product; convolutions unfold their input and
multiply; norms and biases sum over positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedveil.lazy_torch import nn, torch
from fedveil.tree import Params, flat_rows

if TYPE_CHECKING:
    from torch import Tensor

_UNFOLDED_BYTES = (
    2**20
)  # unfolded inputs of a convolution in memory at a time, so that they stay in the cache


class Part(ABC):
    """The per-example gradients of some parameters, stored in the cheapest form."""

    @abstractmethod
    def squares(self) -> Tensor:
        """Squared norms `[b]` in float64."""

    @abstractmethod
    def weighted_sum(self, factors: Tensor) -> Params:
        """`sum_i factors[i] * g_i`, in float64."""

    @abstractmethod
    def gradients(self) -> Params:
        """All per-example gradients, `[b, ...]`."""

    def only(self, chosen: Tensor) -> Part:
        """The gradients of the chosen examples `[b]`; the others are zero."""
        return Explicit(
            {
                name: leaf.where(chosen.reshape(-1, *([1] * (leaf.dim() - 1))), 0)
                for name, leaf in self.gradients().items()
            }
        )


@dataclass
class Explicit(Part):
    """Gradients `[b, ...]` stored explicitly."""

    leaves: Params

    def squares(self) -> Tensor:
        return torch.stack([_square(leaf) for leaf in self.leaves.values()]).sum(0)

    def weighted_sum(self, factors: Tensor) -> Params:
        return {
            name: torch.mv(flat_rows(leaf).double().mT, factors).reshape(leaf.shape[1:])
            for name, leaf in self.leaves.items()
        }

    def gradients(self) -> Params:
        return self.leaves


@dataclass
class Outer(Part):
    """Gradients `g_i a_i^T` of a linear weight, stored as the two factors."""

    name: str
    inputs: Tensor
    outputs: Tensor

    def squares(self) -> Tensor:
        return _square(self.inputs) * _square(self.outputs)

    def weighted_sum(self, factors: Tensor) -> Params:
        return {self.name: (self.outputs.double() * factors[:, None]).mT @ self.inputs.double()}

    def gradients(self) -> Params:
        return {self.name: self.outputs[:, :, None] * self.inputs[:, None, :]}


@dataclass
class ChannelsLast(Part):
    """Gradients of a convolution's weight, stored as `[b, o, kh, kw, i]`."""

    name: str
    leaf: Tensor

    def squares(self) -> Tensor:
        return _square(self.leaf)

    def weighted_sum(self, factors: Tensor) -> Params:
        summed = torch.mv(self.leaf.flatten(1).double().mT, factors)
        return {self.name: summed.reshape(self.leaf.shape[1:]).permute(0, 3, 1, 2)}

    def gradients(self) -> Params:
        return {self.name: self.leaf.permute(0, 1, 4, 2, 3)}


def _square(leaf: Tensor) -> Tensor:
    """Squared norms of the rows in float64."""
    norm: Tensor = torch.linalg.vector_norm(flat_rows(leaf), dim=1, dtype=torch.float64)
    return norm.square()


@dataclass(frozen=True)
class Layer:
    """A layer with closed-form gradients, and the names of its parameters that need them."""

    module: nn.Linear | nn.Conv2d | nn.GroupNorm
    weight: str | None
    bias: str | None


def is_known(layer: nn.Module) -> bool:
    if type(layer) is nn.Conv2d:  # not a subclass, which may compute something else
        plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        return plain and not isinstance(layer.padding, str)
    return type(layer) in (nn.Linear, nn.GroupNorm)


def layer_parts(layer: Layer, a: Tensor, g: Tensor) -> list[Part]:
    kind = layer.module
    parts: list[Part] = []
    if isinstance(kind, nn.Linear):
        a, g = (a.flatten(1, -2), g.flatten(1, -2)) if a.dim() > 2 else (a, g)
        if layer.weight and a.dim() == 2:
            parts.append(Outer(layer.weight, a, g))
        elif layer.weight:
            parts.append(Explicit({layer.weight: g.mT @ a}))
        if layer.bias:
            parts.append(Explicit({layer.bias: g if g.dim() == 2 else g.sum(1)}))
        return parts
    if isinstance(kind, nn.Conv2d):
        if layer.weight:
            parts.append(ChannelsLast(layer.weight, _convolution(kind, a, g)))
    elif layer.weight:
        unit = nn.functional.group_norm(a, kind.num_groups, eps=kind.eps)
        leaf = torch.einsum("bcl,bcl->bc", g.flatten(2), unit.flatten(2)) if g.dim() > 2 else g * unit
        parts.append(Explicit({layer.weight: leaf}))
    if layer.bias:
        parts.append(Explicit({layer.bias: g.flatten(2).sum(2) if g.dim() > 2 else g}))
    return parts


def _convolution(layer: nn.Conv2d, a: Tensor, g: Tensor) -> Tensor:
    """The weight's gradient of every example, `[b, o, kh, kw, i]`.

    With channels last, a row of the kernel's window is contiguous, so unfolding is a plain copy.
    """
    (kh, kw), (sh, sw) = layer.kernel_size, layer.stride
    assert not isinstance(layer.padding, str)
    ph, pw = layer.padding
    batch, channels = a.shape[:2]
    oh, ow = g.shape[2:]
    out = g.new_empty(batch, g.shape[1], kh * kw * channels)
    step = max(1, _UNFOLDED_BYTES // (oh * ow * kh * kw * channels * a.element_size()))
    for start in range(0, batch, step):
        part = slice(start, start + step)
        image = nn.functional.pad(a[part].permute(0, 2, 3, 1), (0, 0, pw, pw, ph, ph)).contiguous()
        line = image.shape[2] * channels
        windows = image.as_strided(
            (image.shape[0], oh, ow, kh, kw * channels),
            (image.shape[1] * line, sh * line, sw * channels, line, 1),
        )
        columns = windows.reshape(image.shape[0], oh * ow, kh * kw * channels)
        torch.bmm(g[part].flatten(2), columns, out=out[part])
    return out.reshape(batch, g.shape[1], kh, kw, channels)
