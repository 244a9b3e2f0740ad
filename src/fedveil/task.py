"""Model and loss as pure functions over the client axis.

Any `nn.Module` without batch statistics works. Networks of linear layers run stacked in closed form; any other
network runs client by client, or vectorised by `torch.func.vmap` where several clients share one call.

The *input space* of a task is where inputs are perturbed: `x` itself for images and tables, the token embeddings for
texts (see `text_model`). `perturbed`, `input_grad`, `no_offset` and `within` work in it, so that a method or an attack
that perturbs inputs works for both.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedveil.errors import InputError
from fedveil.lazy_torch import functional, nn, torch
from fedveil.linear_network import LinearNetwork, cross_entropy_gradient, mean_gradient
from fedveil.sequential import sequential_layers
from fedveil.tree import Params, concatenate, own_memory, with_axis

if TYPE_CHECKING:
    from torch import Tensor

ExampleLoss = Callable[["Tensor", "Tensor"], "Tensor"]

_STEPS_DRAWN_AT_ONCE = 16  # dropout masks of so many steps fit into the cache


@dataclass(frozen=True)
class Batch:
    """Examples of K clients.

    Args:
        x: Inputs `[K, B, ...]`; for texts, token ids `[K, B, L]`.
        y: Labels `[K, B]`; for a language model, a target for each token, `[K, B, L]`.
        mask: `[K, B]`, False on padding; None if there is none.
        offset: Added to the embeddings of texts, `[K, B, L, E]`; None for none.
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
        """The weight of each example in its client's mean, `[K, B]`; zeros for a client without examples."""
        k, b = self.y.shape[:2]
        if self.mask is None:
            return torch.full((k, b), 1.0 / max(b, 1), dtype=dtype, device=self.x.device)
        mask = self.mask.to(dtype)
        return mask / mask.sum(1, keepdim=True).clamp(min=1)


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of each example."""
    return functional.cross_entropy(outputs, y, reduction="none")


class Task:
    """One learning problem: a model, its loss, and their gradients for many clients.

    Args:
        model: The module, or a function that builds it.
        loss: The loss of each example, from outputs and labels.
        device: The device of all tensors.
        frozen_statistics: Accept batch norm with constant running statistics; for attacks, not for training.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        *,
        loss: ExampleLoss = cross_entropy,
        device: str | torch.device = "cpu",
        frozen_statistics: bool = False,
    ) -> None:
        """Build the task; see the class for the arguments."""
        from fedveil.stream_dropout import own_dropouts
        from fedveil.text_model import TextModel

        self._make = None if isinstance(model, nn.Module) else model
        template = copy.deepcopy(model) if isinstance(model, nn.Module) else _build(model, seed=0)
        _require_trainable(template)
        if not frozen_statistics:
            _refuse_batch_statistics(template)
        self.module = template.eval().requires_grad_(False).to(device)
        self.example_loss = loss
        self.device = torch.device(device)
        self.linear = LinearNetwork.recognise(template) if loss is cross_entropy else None
        self.layers = sequential_layers(template)
        """Of a plain sequence of known layers; None for any other model."""
        self.channels_last = bool(getattr(template, "channels_last", False))
        self.text = template if isinstance(template, TextModel) else None
        self.stacks = self.text is None or self.text.stacks
        self.memory: Callable[[Params, int], Params] = own_memory
        """Uninitialised memory for the parameters of K clients; an engine may supply memory that it reads later."""
        self._dropouts = own_dropouts(self.module)
        self._dropout_shapes: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def init(self, seed: int) -> Params:
        """The initial parameters for this seed; a model given as an instance keeps its own weights."""
        module = self.module if self._make is None else _build(self._make, seed)
        return {
            name: parameter.detach().clone().to(self.device) for name, parameter in module.named_parameters()
        }

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    def multiplications(self, shape: Sequence[int]) -> int:
        """Of weights with inputs, for one example: a convolution uses its weights at every position."""
        if self.layers is None:
            return self.parameter_count
        found, h = 0, next(self.module.parameters()).new_zeros(1, *shape)
        for layer in self.layers:
            h = layer.module(h)
            positions = h[0, 0].numel() if isinstance(layer.module, nn.Conv2d) else 1
            found += positions * sum(leaf.numel() for leaf in layer.module.parameters())
        return found

    def outputs(
        self, w: Params, x: Tensor, drop: Sequence[Tensor] | None = None, offset: Tensor | None = None
    ) -> Tensor:
        """Class scores `[K, B, ...]`; `drop` holds the masks of `dropout_masks`, `offset` is that of a `Batch`."""
        if self.linear is not None:
            return self.linear.forward(w, x, drop)[0]
        if x.shape[0] == 1 or not self.stacks:
            rows = [
                self._call(_row(w, k), x[k], _row_of(drop, k), None if offset is None else offset[k])
                for k in range(x.shape[0])
            ]
            return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)
        in_dims = (0, 0, None if drop is None else 0, None if offset is None else 0)
        return torch.func.vmap(self._call, in_dims=in_dims)(w, x, drop, offset)

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
        if self.linear is not None:
            scores, tape = self.linear.forward(w, batch.x, drop)
            g = cross_entropy_gradient(scores, batch.y)
            factors = self.linear.backward(w, batch.x, tape, g, drop)
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
        stacked: Params = torch.func.vmap(torch.func.grad(self._weighted_loss), in_dims=in_dims)(
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
        """The batch with `offset` added in the input space."""
        if self.text is None:
            return Batch(batch.x + offset, batch.y, batch.mask)
        moved = offset if batch.offset is None else batch.offset + offset
        return Batch(batch.x, batch.y, batch.mask, moved)

    def within(self, batch: Batch, offset: Tensor) -> Tensor:
        """`offset`, zero where it has no effect: for texts, on padding."""
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
        if self.linear is not None:
            weights = batch.weights(batch.x.dtype)
            scores, tape = self.linear.forward(w, batch.x)
            g = cross_entropy_gradient(scores, batch.y) * weights.unsqueeze(-1)
            first = self.linear.backward(w, batch.x, tape, g, None)[-1]
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
        stacked: Tensor = torch.func.vmap(
            torch.func.grad(self._weighted_loss, argnums=argument), in_dims=in_dims
        )(w, batch.x, batch.y, weights, None, batch.offset)
        return stacked

    @property
    def has_dropout(self) -> bool:
        return bool(self._dropouts)

    def dropout_masks(self, batch: Batch, rng: Sequence[np.random.Generator] | None) -> list[Tensor] | None:
        """Masks scaled to mean 1, `[K, B, ...]` per dropout layer, client k's from stream k.

        Padding draws nothing, so a client's masks do not depend on whom it shares the stack with.
        """
        if rng is None or not self._dropouts:
            return None
        k, b = batch.y.shape[:2]
        counts = np.full((1, k), b) if batch.mask is None else batch.mask.sum(1, keepdim=True).T.cpu().numpy()
        like = batch.x if batch.x.is_floating_point() else torch.empty(0, device=self.device)
        shapes = self.dropout_shapes(batch.x[0, :1])
        masks = next(self.masks_of_steps(counts, b, [math.prod(shape) for shape in shapes], like, rng))
        return [mask.reshape(k, b, *shape) for mask, shape in zip(masks, shapes, strict=True)]

    def masks_of_steps(
        self,
        counts: npt.NDArray[np.int64],
        width: int,
        sizes: Sequence[int],
        like: Tensor,
        rng: Sequence[np.random.Generator],
    ) -> Iterator[list[Tensor]]:
        """The masks `[K, width, size]` of consecutive steps, where client k has `counts[s, k]` examples in step s.

        The same as `dropout_masks` step by step, but several steps are drawn at once.
        """
        for first in range(0, len(counts), _STEPS_DRAWN_AT_ONCE):
            taken = counts[first : first + _STEPS_DRAWN_AT_ONCE]
            kept = [np.zeros((*taken.shape, width * size), dtype=np.uint8) for size in sizes]
            # Clients with the same numbers are drawn together, each from its own stream.
            alike = bool((taken == taken[:, :1]).all())
            groups = [slice(None)] if alike else [slice(k, k + 1) for k in range(taken.shape[1])]
            for group in groups if sizes else ():
                steps = taken[:, group][:, 0].tolist()
                self._draw_kept(rng[group], steps, sizes, [units[:, group] for units in kept])
            masks = [
                torch.from_numpy(units).to(like.device, like.dtype).mul_(1 / (1 - layer.p)).unbind()
                for units, layer in zip(kept, self._dropouts, strict=True)
            ]
            for s in range(len(taken)):
                yield [
                    steps[s].view(taken.shape[1], width, size)
                    for steps, size in zip(masks, sizes, strict=True)
                ]

    def _draw_kept(
        self,
        streams: Sequence[np.random.Generator],
        counts: Sequence[int],
        sizes: Sequence[int],
        kept: Sequence[npt.NDArray[np.uint8]],
    ) -> None:
        """Fill `kept[layer][step, client]` for clients with `counts[step]` examples in each step."""
        first = 0
        for count, run in groupby(counts):
            end = first + len(list(run))
            numbers = [count * size for size in sizes]
            bits = self._kept(streams, end - first, numbers).swapaxes(0, 1)
            for units, n, last in zip(kept, numbers, accumulate(numbers), strict=True):
                units[first:end, :, :n] = bits[:, :, last - n : last]
            first = end

    def _kept(
        self, streams: Sequence[np.random.Generator], steps: int, numbers: Sequence[int]
    ) -> npt.NDArray[np.uint8]:
        """1 with probability 1 - p, else 0: for each stream and step `numbers[i]` units of dropout layer i."""
        if all(layer.p == 0.5 for layer in self._dropouts) and all(n % 64 == 0 for n in numbers):
            # The same bits as below, without copying through bytes objects.
            words = [stream.bit_generator.random_raw(steps * sum(numbers) // 64) for stream in streams]
            return np.unpackbits(np.stack(words).view(np.uint8)).reshape(len(streams), steps, -1)
        parts = [
            _kept(stream, n, layer.p)
            for stream in streams
            for _ in range(steps)
            for n, layer in zip(numbers, self._dropouts, strict=True)
        ]
        return np.concatenate(parts).reshape(len(streams), steps, -1)

    def dropout_shapes(self, example: Tensor) -> list[tuple[int, ...]]:
        """The shape of one example's mask in every dropout layer, for inputs like `example [1, ...]`."""
        key = tuple(example.shape[1:])
        if key not in self._dropout_shapes:
            shapes: dict[int, tuple[int, ...]] = {}
            hooks = [
                layer.register_forward_hook(
                    lambda module, _, out: shapes.__setitem__(module.index, tuple(out.shape[1:]))
                )
                for layer in self._dropouts
            ]
            dtype = next(self.module.parameters()).dtype
            self.module(example.to(dtype) if example.is_floating_point() else example)
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
            out: Tensor = torch.func.functional_call(self.module, w, (x,) if offset is None else (x, offset))
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
    if p == 0.5 and count % 64 == 0:
        return np.unpackbits(stream.bit_generator.random_raw(count // 64).view(np.uint8))
    if p == 0.5:
        return np.unpackbits(np.frombuffer(stream.bytes((count + 7) // 8), dtype=np.uint8), count=count)
    words = np.frombuffer(stream.bytes(2 * count), dtype=np.uint16)
    return (words >= round(p * 65536)).astype(np.uint8)


def _build(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The model of this seed, leaving the global generator as it was."""
    if not callable(make):
        raise InputError(
            "model", make, "is not a model", "Give an nn.Module, or a function that returns one."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _require_trainable(model: object) -> None:
    if not isinstance(model, nn.Module) or not any(True for _ in model.parameters()):
        what = type(model).__name__
        raise InputError("model", what, "has no trainable parameter", "Give an nn.Module with parameters.")


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
