"""Local SGD over the client axis, written once for every method that trains on its clients.

`w <- w - lr * (gradient + weight_decay * w + proximal * (w - w0) + correction)`, with momentum if asked.
Clients of unequal size share a stack: the longest come first, and a client that is done leaves it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedveil.chain import cross_entropy_gradient
from fedveil.data.client_data import ClientData
from fedveil.streams import ClientStreams
from fedveil.task import Batch, Task
from fedveil.tree import Params, rows

Schedule = Literal["constant", "cosine"]


def scheduled_lr(lr: float, schedule: Schedule, round: int, rounds: int, floor: float = 0.0) -> float:
    """The learning rate of round 1..rounds; cosine falls from `lr` in round 1 towards `floor`."""
    if schedule == "constant" or rounds <= 1:
        return lr
    return floor + 0.5 * (lr - floor) * (1 + math.cos(math.pi * (round - 1) / rounds))


@dataclass(frozen=True)
class Trained:
    """What local training leaves behind."""

    params: Params
    steps: Tensor
    loss: Tensor | None
    """The training loss of each client, averaged over an epoch and summed over epochs, if it was tracked."""


@dataclass(frozen=True)
class _Step:
    """One step of a stack: the first `active` clients take a batch of up to `width` examples."""

    active: int
    width: int
    full: bool


@dataclass(frozen=True)
class _Walk:
    """The order in which the clients of a stack see their examples, longest client first.

    `rows[s, k]` are the places of client k's batch s in the stack's examples laid end to end.
    """

    order: list[int]
    rows: Tensor
    counts: npt.NDArray[np.int64]
    steps: list[_Step]


def local_sgd(
    task: Task,
    w: Params,
    data: ClientData,
    streams: ClientStreams,
    *,
    lr: float,
    batch_size: int,
    epochs: int = 1,
    steps: int | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    proximal: float = 0.0,
    correction: Params | None = None,
    track_loss: bool = False,
    trainable: Collection[str] | None = None,
) -> Trained:
    """Each client's parameters after `epochs` passes (or `steps` steps) over its own examples.

    `w` holds the starts, `[1, ...]` or `[K, ...]`, and is not changed. A client without examples keeps its start.
    Only the parameters named in `trainable` move, all if it is None.
    """
    walk = _walk(data, batch_size, epochs, steps, streams)
    k = data.count
    sorted_already = walk.order == list(range(k))
    back = np.argsort(np.asarray(walk.order))
    anchor = {name: _own_rows(leaf, walk.order) for name, leaf in w.items()}
    params = {name: leaf.clone(memory_format=torch.contiguous_format) for name, leaf in anchor.items()}
    velocity = {name: torch.zeros_like(leaf) for name, leaf in params.items()} if momentum else None
    shift = None if correction is None else rows(correction, walk.order)
    x, y = data.x.flatten(0, 1), data.y.flatten(0, 1)
    dropout = streams.rows(walk.order).of_round("dropout")
    losses = torch.zeros(k, dtype=torch.float64) if track_loss else None
    update = _Update(lr, momentum, weight_decay, proximal, frozenset(w if trainable is None else trainable))

    state = _Running(params, anchor, velocity, shift)
    active = k
    for number, step in enumerate(walk.steps):
        if step.active != active:
            active = step.active
            state = state.first(active)
        batch = _batch(x, y, walk, number, step)
        if losses is not None:
            counts = torch.from_numpy(walk.counts[number, :active])
            seen = task.loss(state.w, batch).double().cpu() * counts
            losses[:active] += seen / data.sizes.cpu()[walk.order[:active]]
        if task.chain is not None:
            # Before the first step every client still has its start, which most of the time is one and the same.
            _chain_step(
                task, batch, dropout[:active], state, update, at=state.anchor if number == 0 else state.w
            )
        else:
            update.apply(state, task.grad(state.w, batch, dropout[:active]))

    trained = {name: leaf if sorted_already else leaf[back] for name, leaf in params.items()}
    taken = torch.from_numpy((walk.counts > 0).sum(0)[back]) if len(walk.counts) else torch.zeros(k)
    return Trained(trained, taken.to(torch.int64), None if losses is None else losses[back])


@dataclass(frozen=True)
class _Running:
    """What a step reads and writes; all of it in the order of the walk."""

    w: Params
    anchor: Params
    velocity: Params | None
    shift: Params | None

    def first(self, active: int) -> _Running:
        """Views of the clients that are not done yet."""

        def cut(tree: Params) -> Params:
            return {name: leaf[:active] for name, leaf in tree.items()}

        return _Running(
            cut(self.w),
            cut(self.anchor),
            None if self.velocity is None else cut(self.velocity),
            None if self.shift is None else cut(self.shift),
        )


@dataclass(frozen=True)
class _Update:
    lr: float
    momentum: float
    weight_decay: float
    proximal: float
    trainable: frozenset[str]

    @property
    def shrink(self) -> float:
        """What weight decay and the proximal term leave of w in one step."""
        return 1 - self.lr * (self.weight_decay + self.proximal)

    def pull(self, state: _Running, name: str) -> None:
        """The parts of a plain step that do not depend on the gradient, except `shrink`."""
        if self.proximal:
            state.w[name].add_(state.anchor[name], alpha=self.lr * self.proximal)
        if state.shift is not None:
            state.w[name].sub_(state.shift[name], alpha=self.lr)

    def apply(self, state: _Running, gradient: Params) -> None:
        """One step in place, from a gradient that may be overwritten."""
        for name in self.trainable:
            w, g = state.w[name], gradient[name]
            if state.velocity is None:
                w.mul_(self.shrink) if self.shrink != 1 else None
                w.sub_(g, alpha=self.lr)
                self.pull(state, name)
                continue
            if self.weight_decay:
                g = g + self.weight_decay * w
            if self.proximal:
                g = g + self.proximal * (w - state.anchor[name])
            if state.shift is not None:
                g = g + state.shift[name]
            v = state.velocity[name].mul_(self.momentum).add_(g)
            w.sub_(v, alpha=self.lr)


def _chain_step(
    task: Task,
    batch: Batch,
    dropout: Sequence[np.random.Generator],
    state: _Running,
    update: _Update,
    at: Params,
) -> None:
    """One step of a network of linear layers; without momentum gradient and update are one product."""
    assert task.chain is not None
    drop = task.dropout_masks(batch, dropout)
    scores, tape = task.chain.forward(at, batch.x, drop)
    g = cross_entropy_gradient(scores, batch.y)
    if batch.mask is None:
        g.div_(batch.y.shape[1])
    else:
        g.mul_(batch.weights(g.dtype).unsqueeze(-1))
    factors = task.chain.backward(at, batch.x, tape, g, drop)
    if state.velocity is not None:
        gradient: Params = {}
        for factor in factors:
            gradient[factor.layer.weight] = torch.bmm(factor.g.transpose(1, 2), factor.a)
            if factor.layer.bias is not None:
                gradient[factor.layer.bias] = factor.g.sum(1)
        update.apply(state, gradient)
        return
    for factor in factors:
        if factor.layer.weight in update.trainable:
            weight = state.w[factor.layer.weight]
            weight.baddbmm_(factor.g.transpose(1, 2), factor.a, beta=update.shrink, alpha=-update.lr)
            update.pull(state, factor.layer.weight)
        if factor.layer.bias is not None and factor.layer.bias in update.trainable:
            bias = state.w[factor.layer.bias]
            bias.mul_(update.shrink) if update.shrink != 1 else None
            bias.sub_(factor.g.sum(1), alpha=update.lr)
            update.pull(state, factor.layer.bias)


def _batch(x: Tensor, y: Tensor, walk: _Walk, number: int, step: _Step) -> Batch:
    rows = walk.rows[number, : step.active, : step.width]
    flat = rows.reshape(-1)
    mask = None
    if not step.full:
        counts = torch.from_numpy(walk.counts[number, : step.active])
        mask = (torch.arange(step.width) < counts[:, None]).to(x.device)
    return Batch(
        x.index_select(0, flat).reshape(*rows.shape, *x.shape[1:]),
        y.index_select(0, flat).reshape(*rows.shape, *y.shape[1:]),
        mask,
    )


def _walk(data: ClientData, batch_size: int, epochs: int, steps: int | None, streams: ClientStreams) -> _Walk:
    """A fresh shuffle per epoch and client; the last batch of an epoch may be short."""
    sizes = data.sizes.tolist()
    orders: list[npt.NDArray[np.int64]] = []
    counts: list[npt.NDArray[np.int64]] = []
    for n, stream in zip(sizes, streams.of_round("batches"), strict=True):
        width = min(batch_size, n)
        per_epoch = math.ceil(n / width) if n else 0
        passes = epochs if steps is None else math.ceil(steps / per_epoch) if n else 0
        walks = np.zeros((passes, per_epoch * width), dtype=np.int64)
        for row in walks:
            row[:n] = stream.permutation(n)
        count = np.full((passes, per_epoch), width, dtype=np.int64)
        if per_epoch:
            count[:, -1] = n - (per_epoch - 1) * width
        orders.append(walks.reshape(passes * per_epoch, width)[:steps])
        counts.append(count.reshape(-1)[:steps])
    by_length = sorted(range(len(sizes)), key=lambda i: (-len(orders[i]), i))
    longest = max((len(order) for order in orders), default=0)
    widest = max((order.shape[1] for order in orders), default=0)
    rows = np.zeros((longest, len(sizes), widest), dtype=np.int64)
    taken = np.zeros((longest, len(sizes)), dtype=np.int64)
    for place, i in enumerate(by_length):
        rows[: len(orders[i]), place, : orders[i].shape[1]] = orders[i] + i * data.largest
        taken[: len(orders[i]), place] = counts[i]
    active = (taken > 0).sum(1)
    plan = [
        _Step(int(a), int(row[:a].max()), bool((row[:a] == row[0]).all()))
        for a, row in zip(active, taken, strict=True)
    ]
    return _Walk(by_length, torch.from_numpy(rows).to(data.x.device), taken, plan)


def _own_rows(leaf: Tensor, order: Sequence[int]) -> Tensor:
    if leaf.shape[0] == 1:
        return leaf.expand(len(order), *leaf.shape[1:])
    return leaf.index_select(0, torch.as_tensor(order, device=leaf.device))
