"""Gradients of small batches, many clients at once: one grouped convolution for all, the backward pass without a graph.

A convolution of eight small images is too little work for a call of its own. As a group of one large convolution each
client keeps its own weights, and the calls and their preparation are shared.

What a client gets depends on its own examples alone, down to the last bit: clients share a call only where they have
equally many examples, a client alone takes the place of two (a convolution of one group is computed otherwise), in
products of linear layers each client's memory is aligned alike, and activations are computed in whole vectors.

Layout: K clients, B examples: images `[B, K * C, H, W]` in channels-last memory, features `[K, B, F]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from fedveil.lazy_torch import functional, nn, torch
from fedveil.linear_network import cross_entropy_gradient
from fedveil.sequential import NamedLayer, activation
from fedveil.task import Batch, Task, cross_entropy
from fedveil.tree import Params

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_MOST_EXAMPLES = 16  # of a client: more keep a convolution of its own busy
_TOGETHER = 64  # examples whose activations are held at a time
_FEW_CHANNELS = 8
_ALIGNMENT = 64  # bytes: a cache line
_VECTOR = 64  # elements: more than any processor takes at a time


class Differentiator(Protocol):
    """Gradients of clients' mean losses; `Task` is one."""

    def grad(self, w: Params, batch: Batch, rng: Sequence[np.random.Generator] | None = None) -> Params: ...

    def input_grad(self, w: Params, batch: Batch) -> Tensor: ...


def differentiator(task: Task, batch: Batch) -> Differentiator:
    """What differentiates batches of the shape and mask of this one fastest: the task itself, or `SmallBatches`."""
    if task.layers is None or not is_known(task, batch.y.shape[1]):
        return task
    return SmallBatches(task.layers, batch)


def is_known(task: Task, examples: int) -> bool:
    """Whether `SmallBatches` knows this model and loss, and so many examples of a client are a small batch."""
    if task.layers is None or task.has_dropout or task.example_loss is not cross_entropy:
        return False
    return isinstance(task.layers[0].module, nn.Conv2d) and 0 < examples <= _MOST_EXAMPLES


class SmallBatches:
    """What `Task.grad` and `Task.input_grad` give for batches of one shape and mask, sooner."""

    def __init__(self, layers: Sequence[NamedLayer], batch: Batch) -> None:
        self._layers = layers
        width = batch.y.shape[1]
        counts = [width] * len(batch.y) if batch.mask is None else batch.mask.sum(1).tolist()
        self._parts: list[tuple[list[int], int]] = []
        for count in sorted(set(counts) - {0}):
            rows = [row for row, n in enumerate(counts) if n == count]
            size = max(2, _TOGETHER // count)
            self._parts += [(rows[i : i + size], count) for i in range(0, len(rows), size)]
        self._whole = len(counts) > 1 and self._parts == [(list(range(len(counts))), width)]

    def grad(self, w: Params, batch: Batch, rng: Sequence[np.random.Generator] | None = None) -> Params:
        """The gradient of each client's mean loss, `[K, ...]`; zero without examples. Nothing is drawn from `rng`."""
        if self._whole:
            found = _gradients(self._layers, w, batch.x, batch.y)
            return {name: found[name] for name in w}
        out = {name: leaf.new_zeros(len(batch.y), *leaf.shape[1:]) for name, leaf in w.items()}
        for rows, count in self._parts:
            found = _gradients(self._layers, *_taken(rows, count, w, batch))
            for name, leaf in out.items():
                leaf[rows] = found[name][: len(rows)]
        return out

    def input_grad(self, w: Params, batch: Batch) -> Tensor:
        """The gradient of each client's mean loss with respect to its examples; zero on padding."""
        if self._whole:
            return _input_gradients(self._layers, w, batch.x, batch.y)
        out = torch.zeros_like(batch.x)
        for rows, count in self._parts:
            found = _input_gradients(self._layers, *_taken(rows, count, w, batch))
            out[rows, :count] = found[: len(rows)]
        return out


def _taken(rows: Sequence[int], count: int, w: Params, batch: Batch) -> tuple[Params, Tensor, Tensor]:
    """Weights, examples and labels of these clients; of one alone twice."""
    index = torch.tensor([*rows, *rows] if len(rows) == 1 else rows, device=batch.x.device)
    own = {name: leaf.index_select(0, index) for name, leaf in w.items()}
    return own, batch.x[index, :count], batch.y[index, :count]


def _gradients(layers: Sequence[NamedLayer], w: Params, x: Tensor, y: Tensor) -> Params:
    found: Params = {}
    _passes(layers, w, x, y, found)
    return found


def _input_gradients(layers: Sequence[NamedLayer], w: Params, x: Tensor, y: Tensor) -> Tensor:
    g = _passes(layers, w, x, y, None)
    return g.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)


def _passes(layers: Sequence[NamedLayer], w: Params, x: Tensor, y: Tensor, found: Params | None) -> Tensor:
    """Forwards and backwards: gradients with respect to `x`, or those with respect to parameters into `found`."""
    h = x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)
    w = _prepared(layers, w)
    kept: list[Tensor] = []
    for layer in layers:
        kept.append(h)
        h = _forward(layer, w, h, x.shape[0])
    g = cross_entropy_gradient(h, y).div_(y.shape[1])
    out = h
    for number in range(len(layers) - 1, -1, -1):
        g = _backward(layers[number], w, kept[number], out, g, found, further=found is None or number > 0)
        out = kept[number]
    return g


def _forward(layer: NamedLayer, w: Params, h: Tensor, k: int) -> Tensor:
    module = layer.module
    if isinstance(module, nn.Conv2d):
        weight, bias = _own(layer, w)
        return functional.conv2d(h, weight, bias, module.stride, module.padding, module.dilation, k)
    if isinstance(module, nn.Linear):
        weight, bias = _own(layer, w)
        out = torch.bmm(_aligned(h), weight.mT)
        return out if bias is None else out.add_(bias.unsqueeze(1))
    if (kind := activation(module)) is not None:
        return _in_whole_vectors(getattr(torch, kind), h)
    return h if h.dim() == 3 else h.reshape(h.shape[0], k, -1).transpose(0, 1).contiguous()


def _backward(
    layer: NamedLayer, w: Params, h: Tensor, out: Tensor, g: Tensor, found: Params | None, *, further: bool
) -> Tensor:
    """From the gradient with respect to the outputs that with respect to the inputs, if it is needed `further` on."""
    module = layer.module
    if isinstance(module, nn.Conv2d):
        return _convolution_backward(layer, w, h, g, found, further=further)
    if isinstance(module, nn.Linear):
        g = _aligned(g)
        if found is not None:
            found[layer.names[0]] = torch.bmm(g.mT, _aligned(h))
            found.update({name: g.sum(1) for name in layer.names[1:]})
        return torch.bmm(g, w[layer.names[0]]) if further else g
    kind = activation(module)
    if kind is None:
        return g if h.dim() == 3 else _as_images(g, h)
    if kind == "relu":
        return torch.where(out > 0, g, 0)
    slope = torch.ops.aten.sigmoid_backward if kind == "sigmoid" else torch.ops.aten.tanh_backward
    return _in_whole_vectors(slope, g, out)


def _convolution_backward(
    layer: NamedLayer, w: Params, h: Tensor, g: Tensor, found: Params | None, *, further: bool
) -> Tensor:
    module = layer.module
    assert isinstance(module, nn.Conv2d)
    weight, bias = _own(layer, w)
    strided = further and _goes_by_phases(module)
    wanted = (further and not strided, found is not None, found is not None and bias is not None)
    groups = weight.shape[0] // module.out_channels
    if any(wanted):
        sizes = None if bias is None else [bias.shape[0]]
        how = (sizes, module.stride, module.padding, module.dilation, False, (0, 0))
        back, *own = torch.ops.aten.convolution_backward(g, h, weight, *how, groups, wanted)
        for name, leaf in zip(layer.names if found is not None else (), own, strict=False):
            assert found is not None
            found[name] = leaf.contiguous().view(groups, -1, *leaf.shape[1:])
    if strided:
        return _by_phases(module, weight.unflatten(0, (groups, -1)), g, h)
    return back if further else g


def _goes_by_phases(module: nn.Conv2d) -> bool:
    """Images of few channels, where torch's own backward pass takes three times as long."""
    assert isinstance(module.padding, tuple)
    reached = max(module.padding) < min(module.kernel_size)
    even = module.stride[0] == module.stride[1] > 1 and module.dilation == (1, 1)
    return module.in_channels < _FEW_CHANNELS and even and reached


def _by_phases(module: nn.Conv2d, weight: Tensor, g: Tensor, like: Tensor) -> Tensor:
    """The gradient with respect to the inputs `like` of a convolution of stride s > 1.

    Input s * j + a (counted with padding) is the sum over t of `g[j - t] * weight[a + s * t]`: for each phase a a
    convolution of `g`, all phases in one call.
    """
    s, (height, width) = module.stride[0], like.shape[2:]
    kernel = tuple(-(-size // s) for size in module.kernel_size)
    room = [0, s * kernel[1] - module.kernel_size[1], 0, s * kernel[0] - module.kernel_size[0]]
    phases = functional.pad(weight, room).unflatten(4, (kernel[1], s)).unflatten(3, (kernel[0], s)).flip(3, 5)
    k, outputs, inputs = weight.shape[:3]
    phases = (
        phases.permute(0, 2, 4, 6, 3, 5, 1).reshape(k * inputs * s * s, *kernel, outputs).permute(0, 3, 1, 2)
    )
    assert isinstance(module.padding, tuple)
    padding = [size - 1 - p // s for size, p in zip(kernel, module.padding, strict=True)]
    found = functional.pixel_shuffle(functional.conv2d(g, phases, padding=padding, groups=k), s)
    top, left = (p % s for p in module.padding)
    found = found[:, :, top : top + height, left : left + width]
    short = (0, width - found.shape[3], 0, height - found.shape[2])
    return functional.pad(found, short) if any(short) else found


def _prepared(layers: Sequence[NamedLayer], w: Params) -> Params:
    """Convolutions' parameters as those of one convolution of K groups, linear layers' aligned."""
    found = dict(w)
    for layer in layers:
        for name in layer.names:
            leaf = w[name]
            if isinstance(layer.module, nn.Linear):
                found[name] = _aligned(leaf) if leaf.dim() == 3 else leaf
            else:
                leaf = leaf.flatten(0, 1)
                found[name] = leaf.contiguous(memory_format=torch.channels_last) if leaf.dim() == 4 else leaf
    return found


def _own(layer: NamedLayer, w: Params) -> tuple[Tensor, Tensor | None]:
    return w[layer.names[0]], w[layer.names[1]] if len(layer.names) > 1 else None


def _in_whole_vectors(f: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """`f` of every element: torch rounds the last few, which fill no vector of the processor, otherwise."""
    images = values[0].dim() == 4
    lines = [(value.permute(0, 2, 3, 1) if images else value).contiguous() for value in values]
    size, shape = lines[0].numel(), lines[0].shape
    if missing := -size % _VECTOR:
        out = f(*(functional.pad(line.flatten(), (0, missing)) for line in lines))[:size].view(shape)
    else:
        out = f(*lines)
    return out.permute(0, 3, 1, 2) if images else out


def _as_images(g: Tensor, like: Tensor) -> Tensor:
    """`[K, B, C * H * W]` as `[B, K * C, H, W]`."""
    k, b = g.shape[:2]
    images = g.reshape(k, b, like.shape[1] // k, *like.shape[2:]).transpose(0, 1).flatten(1, 2)
    return images.contiguous(memory_format=torch.channels_last)


def _aligned(leaf: Tensor) -> Tensor:
    """`leaf [K, m, n]` with every client's matrix at an aligned address: else products round them differently."""
    k, m, n = leaf.shape
    unit = _ALIGNMENT // leaf.element_size()
    if m * n % unit == 0 and leaf.data_ptr() % _ALIGNMENT == 0 and leaf.is_contiguous():
        return leaf
    row = math.ceil(m * n / unit) * unit
    return leaf.new_empty(k, row).as_strided((k, m, n), (row, n, 1)).copy_(leaf)
