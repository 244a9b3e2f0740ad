"""Steps of SGD on linear networks, in preallocated memory.

A block of clients takes all its steps before the next block starts, so that its weights and batches stay in the cache.
A step is a list of operations on fixed memory, built once per shape: steps allocate no memory and have little
interpreter overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedveil.lazy_torch import torch
from fedveil.linear_network import Activation, Dropout, Linear, LinearNetwork
from fedveil.task import Batch, Task
from fedveil.training.updates import Running, Update, adding_product, adding_sum
from fedveil.tree import Params

if TYPE_CHECKING:
    from torch import Tensor

_CACHE = 1 << 23  # bytes of weights and examples that fit into a core's cache


def clients_per_block(w: Params, x: Tensor, examples: int) -> int:
    """The number of clients whose weights and batches of so many examples fit into a core's cache; else all."""
    if x.device.type != "cpu":
        return 1 << 31
    numbers = sum(leaf[0].numel() for leaf in w.values()) + examples * x[:1].numel()
    return max(1, _CACHE // (numbers * x.element_size()))


@dataclass(frozen=True)
class _Views:
    """Views of the memory for a step with a number of clients and examples, `[K, B, width]`."""

    x: Tensor
    outputs: list[Tensor]
    gradients: dict[int, Tensor]
    masks: list[Tensor]
    minus_one: Tensor


@dataclass(frozen=True)
class _Program:
    """The operations of a step before and after the gradient of the scores."""

    views: _Views
    forward: list[Callable[[], object]]
    backward: list[Callable[[], object]]


class LinearSteps:
    """Takes steps of local SGD for up to `clients` clients and batches of up to `examples` examples."""

    def __init__(
        self, task: Task, network: LinearNetwork, w: Params, x: Tensor, clients: int, examples: int
    ) -> None:
        """`x [N, ...]` are the examples of all clients, `w` parameters that give the shapes."""
        self._task = task
        self._network = network
        self._examples = examples
        self._dropout_sizes = [prod(shape) for shape in task.dropout_shapes(x[:1])]
        self._x = x = x.flatten(1)
        self._widths: list[int] = []  # the output width of every layer
        width = x.shape[1]
        for step in network.steps:
            width = w[step.weight].shape[1] if isinstance(step, Linear) else width
            self._widths.append(width)
        room = clients * examples
        self._batch = x.new_empty(room * x.shape[1])
        self._outputs = [x.new_empty(room * width) for width in self._widths]
        linear = [i for i, step in enumerate(network.steps) if isinstance(step, Linear)]
        self._linear_below = dict(zip(linear[1:], linear, strict=False))
        self._gradients = {i: x.new_empty(room * self._widths[i]) for i in linear}
        self._masks = [x.new_empty(room * size) for size in self._dropout_sizes]
        self._minus_one = x.new_full((room,), -1)
        self._views: dict[tuple[int, int], _Views] = {}
        self._programs: dict[tuple[int, int], _Program] = {}

    def start(self, state: Running, update: Update, contiguous: Tensor | None = None) -> None:
        """Set the initial state that the following steps change.

        `contiguous [K * B, ...]` are the examples of all following batches, if they need not be gathered.
        """
        self._state = state
        self._contiguous = None if contiguous is None else contiguous.flatten(1)
        self._update = update
        self._programs = {}
        self._at_start = True

    def dropout_masks(
        self, counts: npt.NDArray[np.int64], rng: Sequence[np.random.Generator]
    ) -> Iterator[list[Tensor]]:
        """The masks of consecutive steps of a block whose clients have `counts[s, k]` examples in step s."""
        return self._task.masks_of_steps(counts, self._examples, self._dropout_sizes, self._x, rng)

    def gather(self, rows: Tensor) -> Tensor:
        """The examples `[K, B, inputs]` of these rows `[K, B]`; valid until the next call."""
        if self._contiguous is not None:
            return self._contiguous.view(*rows.shape, -1)
        x = self._cut(*rows.shape).x
        torch.index_select(self._x, 0, rows.reshape(-1), out=_merged(x))
        return x

    def step(self, batch: Batch, masks: Sequence[Tensor]) -> None:
        """One step in place on the batch of the last `gather`, with dropout masks `[K, B, size]` per layer."""
        clients, examples = shape = (batch.y.shape[0], batch.y.shape[1])
        if self._at_start or shape not in self._programs:
            self._put_together(clients, examples)
        program = self._programs[shape]
        for memory, mask in zip(program.views.masks, masks, strict=True):
            memory.copy_(mask[:clients, :examples])
        for operation in program.forward:
            operation()
        g = program.views.gradients[len(self._network.steps) - 1]
        g.scatter_add_(-1, batch.y.unsqueeze(-1), program.views.minus_one)
        if batch.mask is None:
            g.div_(float(examples))
        else:
            g.mul_(batch.weights(g.dtype).unsqueeze(-1))
        for operation in program.backward:
            operation()
        if self._at_start:
            self._at_start = False
            del self._programs[shape]

    def _put_together(self, clients: int, examples: int) -> None:
        views = self._cut(clients, examples)
        if self._contiguous is not None:
            views = replace(views, x=self._contiguous.view(clients, examples, -1))
        state = self._state.first(clients)
        # In the first step each client has the anchor's weights, which are usually the same for all clients.
        forward = self._forward(views, state.anchor if self._at_start else state.w)
        self._programs[clients, examples] = _Program(views, forward, self._backward(views, state))

    def _forward(self, views: _Views, w: Params) -> list[Callable[[], object]]:
        """From the examples to the softmax of the scores."""
        todo: list[Callable[[], object]] = []
        h = views.x
        for step, out in zip(self._network.steps, views.outputs, strict=True):
            if isinstance(step, Dropout):
                todo.append(partial(torch.mul, h, views.masks[step.index], out=out))
            elif isinstance(step, Activation):
                todo.append(partial(_ACTIVATIONS[step.kind], h, out=out))
            elif step.bias is None and w[step.weight].stride(0) == 0:
                # All clients share the weights: one large product.
                todo.append(partial(torch.mm, _merged(h), w[step.weight][0].T, out=_merged(out)))
            elif step.bias is None:
                todo.append(partial(torch.bmm, h, w[step.weight].transpose(1, 2), out=out))
            else:
                bias, weight = w[step.bias].unsqueeze(1), w[step.weight].transpose(1, 2)
                todo.append(partial(torch.baddbmm, bias, h, weight, out=out))
            h = out
        todo.append(partial(torch.softmax, h, dim=-1, out=views.gradients[len(self._network.steps) - 1]))
        return todo

    def _backward(self, views: _Views, state: Running) -> list[Callable[[], object]]:
        """From the gradient of the scores to the first layer; a layer is updated after propagating its gradient."""
        todo: list[Callable[[], object]] = []
        steps, move, trainable = self._network.steps, self._update.apply, self._update.trainable
        g = views.gradients[len(steps) - 1]
        for i in range(len(steps) - 1, self._network.first - 1, -1):
            step, out = steps[i], views.outputs[i]
            if isinstance(step, Dropout):
                todo.append(partial(g.mul_, views.masks[step.index]))
            elif isinstance(step, Activation):
                todo += [*_SLOPES[step.kind](out), partial(g.mul_, out)]
            else:
                here = g
                if i != self._network.first:
                    g = views.gradients[self._linear_below[i]]
                    todo.append(partial(torch.bmm, here, state.w[step.weight], out=g))
                if step.weight in trainable:
                    product = adding_product(here.transpose(1, 2), views.outputs[i - 1] if i else views.x)
                    todo.append(partial(move, state, step.weight, product))
                if step.bias is not None and step.bias in trainable:
                    todo.append(partial(move, state, step.bias, adding_sum(here)))
        return todo

    def _cut(self, clients: int, examples: int) -> _Views:
        key = (clients, examples)
        if key not in self._views:

            def cut(memory: Tensor, width: int) -> Tensor:
                return memory[: clients * examples * width].view(clients, examples, width)

            self._views[key] = _Views(
                cut(self._batch, self._x.shape[1]),
                [cut(memory, width) for memory, width in zip(self._outputs, self._widths, strict=True)],
                {i: cut(memory, self._widths[i]) for i, memory in self._gradients.items()},
                [cut(memory, size) for memory, size in zip(self._masks, self._dropout_sizes, strict=True)],
                cut(self._minus_one, 1),
            )
        return self._views[key]


def _merged(stack: Tensor) -> Tensor:
    """`[K, B, width]` as a view `[K * B, width]`."""
    return stack.view(-1, stack.shape[2])


_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": lambda h, out: torch.clamp_min(h, min=0, out=out),
    "sigmoid": lambda h, out: torch.sigmoid(h, out=out),
    "tanh": lambda h, out: torch.tanh(h, out=out),
}


def _relu_slope(out: Tensor) -> list[Callable[[], object]]:
    return [out.sign_]


def _sigmoid_slope(out: Tensor) -> list[Callable[[], object]]:
    return [lambda: out.addcmul_(out, out, value=-1)]


def _tanh_slope(out: Tensor) -> list[Callable[[], object]]:
    return [lambda: out.square_().neg_().add_(1)]


# The derivative of an activation, written over its output, which is not needed any more.
_SLOPES = {"relu": _relu_slope, "sigmoid": _sigmoid_slope, "tanh": _tanh_slope}
