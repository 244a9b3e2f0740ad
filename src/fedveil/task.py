"""Model and loss as pure functions over the client axis.

Any `nn.Module` without batch statistics works. Networks of linear layers run stacked in closed form; any other
network runs client by client, or vectorised by `torch.func.vmap` where several clients share one call.

The *input space* of a task is where inputs can be moved a little: `x` itself for images and tables, the token
embeddings for texts (see `text_model`). `perturbed`, `input_grad`, `no_offset` and `within` speak of it, so that a
method or an attack that moves inputs need not know which of the two it has.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from fedveil.chain import Chain, cross_entropy_gradient, mean_gradient
from fedveil.errors import InputError
from fedveil.text_model import TextModel
from fedveil.tree import Params, concatenate, with_axis

ExampleLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """Examples of K clients: `x [K, B, ...]`, `y [K, B]`; `mask [K, B]` is False on padding, None if there is none.

    Texts are token ids `x [K, B, L]`; `offset [K, B, L, E]` is what is added to their embeddings, None for nothing.
    A language model has a target for each token, `y [K, B, L]`.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None = None
    offset: Tensor | None = None

    def row(self, k: int) -> Batch:
        """The batch of client k alone."""
        one = slice(k, k + 1)
        return Batch(
            self.x[one],
            self.y[one],
            None if self.mask is None else self.mask[one],
            None if self.offset is None else self.offset[one],
        )

    def weights(self, dtype: torch.dtype) -> Tensor:
        """What each example counts in its client's mean, `[K, B]`; a client without examples gets zeros."""
        k, b = self.y.shape[:2]
        if self.mask is None:
            return torch.full((k, b), 1.0 / b, dtype=dtype, device=self.x.device)
        mask = self.mask.to(dtype)
        return mask / mask.sum(1, keepdim=True).clamp(min=1)


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of each example."""
    return functional.cross_entropy(outputs, y, reduction="none")


class _StreamDropout(nn.Dropout):
    """Dropout whose masks are handed in, so that they come from the client's own stream."""

    masks: Sequence[Tensor] | None = None
    index: int = 0

    def forward(self, x: Tensor) -> Tensor:
        return x if self.masks is None else x * self.masks[self.index]


class Task:
    """One learning problem: a model, its loss, and how to differentiate both for many clients."""

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        *,
        loss: ExampleLoss = cross_entropy,
        device: str | torch.device = "cpu",
        frozen_statistics: bool = False,
    ) -> None:
        """`frozen_statistics` accepts batch norm with its running statistics as constants: to attack, not to train."""
        self._make = None if isinstance(model, nn.Module) else model
        template = copy.deepcopy(model) if isinstance(model, nn.Module) else _build(model, seed=0)
        if not frozen_statistics:
            _refuse_batch_statistics(template)
        self.module = template.eval().requires_grad_(False).to(device)
        self.example_loss = loss
        self.device = torch.device(device)
        self.chain = Chain.recognise(template) if loss is cross_entropy else None
        self.channels_last = bool(getattr(template, "channels_last", False))
        self.text = template if isinstance(template, TextModel) else None
        self.stacks = self.text is None or self.text.stacks
        self._dropouts = _own_dropouts(self.module)
        self._dropout_shapes: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def init(self, seed: int) -> Params:
        """The starting parameters of this seed; a model given as an instance starts from its own weights."""
        module = self.module if self._make is None else _build(self._make, seed)
        return {
            name: parameter.detach().clone().to(self.device) for name, parameter in module.named_parameters()
        }

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    def outputs(
        self, w: Params, x: Tensor, drop: Sequence[Tensor] | None = None, offset: Tensor | None = None
    ) -> Tensor:
        """Class scores `[K, B, ...]`; `drop` holds the masks of `dropout_masks`, `offset` is that of a `Batch`."""
        if self.chain is not None:
            return self.chain.forward(w, x, drop)[0]
        if x.shape[0] == 1 or not self.stacks:
            rows = [
                self._call(_row(w, k), x[k], _row_of(drop, k), None if offset is None else offset[k])
                for k in range(x.shape[0])
            ]
            return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)
        in_dims = (0, 0, None if drop is None else 0, None if offset is None else 0)
        return vmap(self._call, in_dims=in_dims)(w, x, drop, offset)

    def losses(self, w: Params, batch: Batch, drop: Sequence[Tensor] | None = None) -> Tensor:
        """The loss of every example, `[K, B]`."""
        scores = self.outputs(w, batch.x, drop, batch.offset)
        return torch.stack([self.example_loss(s, y) for s, y in zip(scores, batch.y, strict=True)])

    def loss(self, w: Params, batch: Batch, rng: Sequence[np.random.Generator] | None = None) -> Tensor:
        """The mean loss of each client, `[K]`; without `rng` in evaluation mode (no dropout)."""
        losses = self.losses(w, batch, self.dropout_masks(batch, rng))
        return (losses * batch.weights(losses.dtype)).sum(1)

    def grad(self, w: Params, batch: Batch, rng: Sequence[np.random.Generator] | None = None) -> Params:
        """The gradient of each client's mean loss, `[K, ...]`."""
        drop = self.dropout_masks(batch, rng)
        if self.chain is not None:
            scores, tape = self.chain.forward(w, batch.x, drop)
            g = cross_entropy_gradient(scores, batch.y)
            factors = self.chain.backward(w, batch.x, tape, g, drop)
            gradient = mean_gradient(factors, batch.weights(g.dtype))
            return {name: gradient[name] for name in w}
        weights = batch.weights(next(iter(w.values())).dtype)
        if batch.x.shape[0] == 1 or not self.stacks:
            parts = [
                self._one_grad(_row(w, k), batch.row(k), weights[k], _row_of(drop, k))
                for k in range(batch.x.shape[0])
            ]
            return parts[0] if len(parts) == 1 else concatenate(parts)
        in_dims = (0, 0, 0, 0, None if drop is None else 0, None if batch.offset is None else 0)
        stacked: Params = vmap(grad(self._weighted_loss), in_dims=in_dims)(
            w, batch.x, batch.y, weights, drop, batch.offset
        )
        return stacked

    def _one_grad(self, w: Params, batch: Batch, weights: Tensor, drop: Sequence[Tensor] | None) -> Params:
        """The gradient of one client's mean loss, as a stack of one."""
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in w.items()}
        offset = None if batch.offset is None else batch.offset[0]
        total = self._weighted_loss(leaves, batch.x[0], batch.y[0], weights, drop, offset)
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        found = {
            name: torch.zeros_like(leaf) if g is None else g
            for (name, leaf), g in zip(leaves.items(), grads, strict=True)
        }
        return with_axis(found)

    def no_offset(self, x: Tensor, count: int) -> Tensor:
        """Zeros `[K, count, ...]` of the input space of `x [K, n, ...]`."""
        if self.text is None:
            return x.new_zeros(x.shape[0], count, *x.shape[2:])
        table = self.text.embedding_table()
        return table.new_zeros(x.shape[0], count, *x.shape[2:], table.shape[1])

    def perturbed(self, batch: Batch, offset: Tensor) -> Batch:
        """The batch moved by `offset` in the input space."""
        if self.text is None:
            return Batch(batch.x + offset, batch.y, batch.mask)
        moved = offset if batch.offset is None else batch.offset + offset
        return Batch(batch.x, batch.y, batch.mask, moved)

    def within(self, batch: Batch, offset: Tensor) -> Tensor:
        """The part of `offset` that can matter to these examples: of a text what stands on a token, else all."""
        return offset if self.text is None else offset * self.text.mask(batch.x).unsqueeze(-1)

    def input_grad(self, w: Params, batch: Batch) -> Tensor:
        """The gradient of each client's mean loss in the input space, `[K, B, ...]`, in evaluation mode.

        Padding gets zeros. Inputs that are neither real numbers nor texts have no gradient and are refused.
        """
        if self.text is not None:
            start = self.no_offset(batch.x, batch.x.shape[1]) if batch.offset is None else batch.offset
            return self._input_grad(w, Batch(batch.x, batch.y, batch.mask, start), argument=5)
        if not batch.x.is_floating_point():
            raise InputError(
                "inputs",
                str(batch.x.dtype),
                "only real-valued inputs have a gradient",
                "Use images, tables or a model of texts.",
            )
        if self.chain is not None:
            weights = batch.weights(batch.x.dtype)
            scores, tape = self.chain.forward(w, batch.x)
            g = cross_entropy_gradient(scores, batch.y) * weights.unsqueeze(-1)
            first = self.chain.backward(w, batch.x, tape, g, None)[-1]
            return torch.bmm(first.g, w[first.layer.weight]).reshape(batch.x.shape)
        return self._input_grad(w, batch, argument=1)

    def _input_grad(self, w: Params, batch: Batch, argument: int) -> Tensor:
        """The gradient with respect to this argument of `_weighted_loss`."""
        weights = batch.weights(next(iter(w.values())).dtype)
        if batch.x.shape[0] == 1 or not self.stacks:
            found = []
            for k in range(batch.x.shape[0]):
                offset = None if batch.offset is None else batch.offset[k]
                inputs: list[Any] = [_row(w, k), batch.x[k], batch.y[k], weights[k], None, offset]
                inputs[argument] = inputs[argument].detach().requires_grad_()
                total = self._weighted_loss(*inputs)
                found.append(torch.autograd.grad(total, inputs[argument])[0])
            return torch.stack(found)
        in_dims = (0, 0, 0, 0, None, None if batch.offset is None else 0)
        stacked: Tensor = vmap(grad(self._weighted_loss, argnums=argument), in_dims=in_dims)(
            w, batch.x, batch.y, weights, None, batch.offset
        )
        return stacked

    def per_example_grad(self, w: Params, batch: Batch) -> Params:
        """The gradient of every example's own loss, `[K, B, ...]`, in evaluation mode."""

        def example_loss(leaves: Params, x: Tensor, y: Tensor) -> Tensor:
            return self.example_loss(self._call(leaves, x.unsqueeze(0), None), y.unsqueeze(0))[0]

        over_examples = vmap(grad(example_loss), in_dims=(None, 0, 0))
        gradients: Params = vmap(over_examples)(w, batch.x, batch.y)
        if batch.mask is None:
            return gradients
        mask = batch.mask
        return {
            name: leaf * mask.reshape(*mask.shape, *([1] * (leaf.dim() - 2))).to(leaf.dtype)
            for name, leaf in gradients.items()
        }

    def dropout_masks(self, batch: Batch, rng: Sequence[np.random.Generator] | None) -> list[Tensor] | None:
        """Masks scaled to mean 1, `[K, B, ...]` per dropout layer, client k's from stream k.

        Padding draws nothing, so a client's masks do not depend on whom it shares the stack with.
        """
        if rng is None or not self._dropouts:
            return None
        shapes = self._shapes_of_dropouts(batch.x)
        k, b = batch.y.shape[:2]
        counts = [b] * k if batch.mask is None else batch.mask.sum(1).tolist()
        dtype = batch.x.dtype if batch.x.is_floating_point() else torch.get_default_dtype()
        masks = []
        for layer, shape in zip(self._dropouts, shapes, strict=True):
            size = math.prod(shape)
            kept = np.zeros((k, b * size), dtype=np.uint8)
            for row, stream, count in zip(kept, rng, counts, strict=True):
                row[: count * size] = _kept(stream, count * size, layer.p)
            mask = torch.from_numpy(kept).to(self.device, dtype).mul_(1 / (1 - layer.p))
            masks.append(mask.reshape(k, b, *shape))
        return masks

    def _shapes_of_dropouts(self, x: Tensor) -> list[tuple[int, ...]]:
        key = tuple(x.shape[2:])
        if key not in self._dropout_shapes:
            shapes: dict[int, tuple[int, ...]] = {}
            hooks = [
                layer.register_forward_hook(
                    lambda module, _, out: shapes.__setitem__(module.index, tuple(out.shape[1:]))
                )
                for layer in self._dropouts
            ]
            one = x[0, :1]
            self.module(one.to(next(self.module.parameters()).dtype) if one.is_floating_point() else one)
            for hook in hooks:
                hook.remove()
            self._dropout_shapes[key] = [shapes[layer.index] for layer in self._dropouts]
        return self._dropout_shapes[key]

    def _call(
        self, w: Params, x: Tensor, drop: Sequence[Tensor] | None, offset: Tensor | None = None
    ) -> Tensor:
        if self.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        for layer in self._dropouts:
            layer.masks = drop
        try:
            out: Tensor = functional_call(self.module, w, (x,) if offset is None else (x, offset))
        finally:
            for layer in self._dropouts:
                layer.masks = None
        return out

    def _weighted_loss(
        self,
        w: Params,
        x: Tensor,
        y: Tensor,
        weights: Tensor,
        drop: Sequence[Tensor] | None,
        offset: Tensor | None,
    ) -> Tensor:
        return (self.example_loss(self._call(w, x, drop, offset), y) * weights).sum()


def _row(w: Params, k: int) -> Params:
    """The model of client k of a stack, or the one model that all share."""
    return {name: leaf[k if leaf.shape[0] > 1 else 0] for name, leaf in w.items()}


def _row_of(drop: Sequence[Tensor] | None, k: int) -> list[Tensor] | None:
    return None if drop is None else [mask[k] for mask in drop]


def _kept(stream: np.random.Generator, count: int, p: float) -> npt.NDArray[np.uint8]:
    """1 with probability 1 - p, else 0: one random bit each for p = 1/2, else sixteen."""
    if p == 0.5 and count % 64 == 0:  # the same bits as below, without the detour through a bytes object
        return np.unpackbits(stream.bit_generator.random_raw(count // 64).view(np.uint8))
    if p == 0.5:
        return np.unpackbits(np.frombuffer(stream.bytes((count + 7) // 8), dtype=np.uint8), count=count)
    words = np.frombuffer(stream.bytes(2 * count), dtype=np.uint16)
    return (words >= round(p * 65536)).astype(np.uint8)


def _build(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The model of this seed, leaving the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _refuse_batch_statistics(model: nn.Module) -> None:
    kinds: tuple[Any, ...] = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    for name, layer in model.named_modules():
        if isinstance(layer, kinds[0]) or (isinstance(layer, kinds[1]) and layer.track_running_stats):
            raise InputError(
                f"model layer {name!r}",
                type(layer).__name__,
                "its statistics mix the examples of a batch, so one example's influence cannot be bounded",
                "Replace it by torch.nn.GroupNorm.",
            )


def _own_dropouts(module: nn.Module) -> list[_StreamDropout]:
    """Every dropout layer replaced in place by one that takes its masks from us, in order of definition."""
    found: list[_StreamDropout] = []
    for parent in module.modules():
        for name, child in parent.named_children():
            if isinstance(child, (nn.modules.dropout._DropoutNd)):
                layer = _StreamDropout(child.p)
                layer.index = len(found)
                found.append(layer)
                setattr(parent, name, layer)
    return found
