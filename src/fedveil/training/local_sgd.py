"""Local SGD over the client axis, written once for every method that trains on its clients.

The step is that of `fedveil.training.updates`. Clients of unequal size share a stack, sorted by descending number of
steps; a client that has finished leaves the stack.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from fedveil.data.client_data import ClientData
from fedveil.lazy_torch import torch
from fedveil.streams import ClientStreams
from fedveil.task import Batch, Task
from fedveil.training.batching import LastBatch, batch_sizes
from fedveil.training.linear_sgd import LinearSteps, clients_per_block
from fedveil.training.updates import Running, Update, adding
from fedveil.tree import Params, rows

if TYPE_CHECKING:
    from torch import Tensor

Schedule = Literal["constant", "cosine"]


def scheduled_lr(lr: float, schedule: Schedule, round: int, rounds: int, floor: float = 0.0) -> float:
    """The learning rate of round 1..rounds; cosine falls from `lr` in round 1 towards `floor`."""
    if schedule == "constant" or rounds <= 1:
        return lr
    return floor + 0.5 * (lr - floor) * (1 + math.cos(math.pi * (round - 1) / rounds))


@dataclass(frozen=True)
class Trained:
    """The result of local training."""

    params: Params
    steps: Tensor
    loss: Tensor | None
    """The training loss of each client, averaged over an epoch and summed over epochs, if it was tracked."""


@dataclass(frozen=True)
class _Walk:
    """The batches of the clients of a stack, the client with the most steps first.

    `rows[s, k]` are the indices of client k's batch s in the stack's concatenated examples, of which the first
    `counts[s, k]` are not padding. `whole`: every batch is all of a client's examples in order, without padding.
    """

    order: list[int]
    rows: Tensor
    counts: npt.NDArray[np.int64]
    whole: bool
    per_epoch: list[int]
    """The number of examples of a client in one epoch."""


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
    last_batch: LastBatch = "merge",
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    proximal: float = 0.0,
    correction: Params | None = None,
    track_loss: bool = False,
    trainable: Collection[str] | None = None,
) -> Trained:
    """Each client's parameters after `epochs` passes (or `steps` steps) over its own examples.

    Every pass has a fresh random order, unless all examples fit into one batch, whose mean does not depend on their
    order. `w` are the initial parameters, `[1, ...]` or `[K, ...]`, and is not changed. A client without examples
    keeps them. Only the parameters named in `trainable` are trained, all if it is None.
    """
    walk = _walk(data, batch_size, last_batch, epochs, steps, streams)
    k, widest = data.count, walk.rows.shape[2]
    x, y = data.x.flatten(0, 1), data.y.flatten(0, 1)
    params = task.memory(w, k)
    losses = torch.zeros(k, dtype=torch.float64) if track_loss else None
    update = Update(lr, momentum, weight_decay, proximal, frozenset(w if trainable is None else trainable))
    size, linear = k, None
    if task.linear is not None and x.is_floating_point():
        if len(walk.rows) > 1:  # a single step does not benefit from the cache
            size = clients_per_block(w, x, widest)
        linear = LinearSteps(task, task.linear, w, x, min(size, k), widest)

    for first in range(0, k, size):
        block = slice(first, min(first + size, k))
        order = walk.order[block]
        anchor = {name: _own_rows(leaf, order) for name, leaf in w.items()}
        own = {name: leaf[block].copy_(anchor[name]) for name, leaf in params.items()}
        velocity = {name: torch.zeros_like(leaf) for name, leaf in own.items()} if momentum else None
        state = Running(own, anchor, velocity, None if correction is None else rows(correction, order))
        dropout = streams.rows(order).of_round("dropout")
        contiguous = x[first * widest : (first + len(order)) * widest] if walk.whole else None
        seen = losses[block] if losses is not None else None
        _take_steps(
            task,
            state,
            update,
            _batches(x, y, walk, block, linear),
            seen,
            dropout,
            linear,
            walk.counts[:, block],
            contiguous,
        )

    return _in_clients_order(params, losses, walk, data)


def _in_clients_order(params: Params, losses: Tensor | None, walk: _Walk, data: ClientData) -> Trained:
    """The results of a walk, in the clients' original order."""
    back = np.argsort(np.asarray(walk.order))
    in_order = walk.order == list(range(data.count))
    trained = {name: leaf if in_order else leaf[back] for name, leaf in params.items()}
    if losses is not None:
        losses = losses[back] / torch.tensor(walk.per_epoch).clamp(min=1)
    steps = torch.from_numpy((walk.counts > 0).sum(0)[back]).to(data.x.device)
    return Trained(trained, steps, None if losses is None else losses.to(data.x.device))


def _take_steps(
    task: Task,
    state: Running,
    update: Update,
    batches: Iterator[tuple[Batch, list[int]]],
    losses: Tensor | None,
    dropout: list[np.random.Generator],
    linear: LinearSteps | None,
    counts: npt.NDArray[np.int64],
    contiguous: Tensor | None,
) -> None:
    """Take all steps of a block of clients, in place: in closed form for a linear network, else by autograd.

    Each client's summed loss is added to `losses`, if given; `contiguous` are examples that need not be gathered.
    """
    masks: Iterator[list[Tensor]] = iter(())
    if linear is not None:
        linear.start(state, update, contiguous)
        masks = linear.dropout_masks(counts, dropout)
    for batch, taken in batches:
        active = batch.y.shape[0]
        if active != state.count:
            state = state.first(active)
        if losses is not None:
            losses[:active] += task.loss(state.w, batch).double().cpu() * torch.tensor(taken)
        if linear is not None:
            linear.step(batch, next(masks))
        else:
            gradient = task.grad(state.w, batch, dropout[:active])
            for name in update.trainable:
                update.apply(state, name, adding(gradient[name]))


def _batches(
    x: Tensor, y: Tensor, walk: _Walk, block: slice, linear: LinearSteps | None
) -> Iterator[tuple[Batch, list[int]]]:
    """The batches of a block of clients with their sizes; clients that have finished are left out."""
    rows = walk.rows[:, block]
    labels = y.index_select(0, rows.reshape(-1)).reshape(*rows.shape, *y.shape[1:])
    for taken, places, classes in zip(
        walk.counts[:, block].tolist(), rows.unbind(), labels.unbind(), strict=True
    ):
        counts = [count for count in taken if count]
        if not counts:
            return
        active, width = len(counts), max(counts)
        if (active, width) != places.shape:
            places, classes = places[:active, :width], classes[:active, :width]
        mask = None
        if min(counts) != width:
            mask = torch.arange(width, device=x.device) < torch.tensor(counts, device=x.device).unsqueeze(1)
        if linear is not None:
            yield Batch(linear.gather(places), classes, mask), counts
        else:
            seen = x.index_select(0, places.reshape(-1)).reshape(active, width, *x.shape[1:])
            yield Batch(seen, classes, mask), counts


def _walk(
    data: ClientData,
    batch_size: int,
    last_batch: LastBatch,
    epochs: int,
    steps: int | None,
    streams: ClientStreams,
) -> _Walk:
    """A new shuffle per epoch for each client with several batches."""
    sizes = data.sizes.tolist()
    cuts = {n: batch_sizes(n, batch_size, last_batch) for n in set(sizes)}
    total = [epochs * len(cuts[n]) if steps is None else steps if n else 0 for n in sizes]
    order = sorted(range(len(sizes)), key=lambda i: (-total[i], i))
    widest = max((max(cut) for cut in cuts.values() if cut), default=0)
    rows = np.zeros((max(total, default=0), len(sizes), widest), dtype=np.int64)
    counts = np.zeros(rows.shape[:2], dtype=np.int64)
    for n in cuts.keys() - {0}:  # clients of equal size are processed together
        places = [place for place, i in enumerate(order) if sizes[i] == n]
        cut, end = cuts[n], total[order[places[0]]]
        shuffled = np.empty((math.ceil(end / len(cut)), len(places), n), dtype=np.int64)
        if cut == [n]:
            shuffled[:] = np.arange(n)
        else:
            shuffles = streams.rows([order[place] for place in places]).of_round("batches")
            for column, stream in enumerate(shuffles):
                for epoch in range(len(shuffled)):
                    shuffled[epoch, column] = stream.permutation(n)
        first = 0
        for number, size in enumerate(cut):
            steps_of = slice(number, end, len(cut))
            rows[steps_of, places, :size] = shuffled[: len(range(end)[steps_of]), :, first : first + size]
            counts[steps_of, places] = size
            first += size
    rows += (np.array(order, dtype=np.int64) * data.largest)[:, None]
    whole = set(sizes) == {data.largest} and widest == data.largest
    per_epoch = [sum(cuts[n]) for n in sizes]
    return _Walk(order, torch.from_numpy(rows).to(data.x.device), counts, whole, per_epoch)


def _own_rows(leaf: Tensor, order: Sequence[int]) -> Tensor:
    if leaf.shape[0] == 1:
        return leaf.expand(len(order), *leaf.shape[1:])
    return leaf.index_select(0, torch.as_tensor(order, device=leaf.device))
