"""Approximation of a client's data by a few synthetic images with similar gradients near a model.

The client half (`approximate`, `measure_path`) and the server half (`descend`) of FedLAP-DP, Algorithms 1 and 2,
over the client axis. Private examples are read only by `poisson_batch`, once for each matched gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fedveil.data.client_data import ClientData
from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.privacy.mechanisms import SumMechanism, Unnoised
from fedveil.streams import ClientStreams, Stream, normal
from fedveil.task import Batch, Task
from fedveil.training.augmentation import Change, View, draw_view
from fedveil.training.gradient_matching import (
    Distance,
    matching_gradient,
    weighted_gradient,
    weighted_loss,
)
from fedveil.training.private_sgd import poisson_batch, private_gradient, sampling_streams
from fedveil.tree import Params, add, expand, norms, per_row, rows, sub, with_axis, without_axis

if TYPE_CHECKING:
    from torch import Tensor

PADDING = -1  # the label of a row without an image


@dataclass(frozen=True)
class Loops:
    """The numbers of iterations of the client's loops, and their step sizes."""

    trajectories: int  # R_i
    max_steps: int
    real_batches: int
    image_updates: int  # R_b
    model_updates: int  # R_l
    radius: float  # r
    batch_size: int  # B
    lr: float  # eta
    image_lr: float  # tau
    image_momentum: float
    distance: Distance
    augment: tuple[Change, ...] = ()
    mechanism: SumMechanism = field(default_factory=Unnoised)  # what perturbs the real gradients

    @property
    def accesses(self) -> int:
        """The largest number of batches of real examples that are read."""
        return self.trajectories * self.max_steps * self.real_batches


def class_count(task: Task, w: Params, data: ClientData) -> int:
    """The number of classes that the model scores."""
    if not data.x.is_floating_point():
        raise InputError(
            "task.dataset", str(data.x.dtype), "synthetic examples need real-valued features", "Use images."
        )
    one = rows(w, [0])
    with torch.no_grad():
        return int(task.outputs(one, data.x.new_zeros(1, 1, *data.x.shape[2:])).shape[-1])


def synthetic_labels(sets: Sequence[Sequence[int]], ipc: int, slots: int) -> Tensor:
    """Balanced labels `[K, slots * ipc]`: `ipc` of each class of a client's set, then padding."""
    labels = torch.full((len(sets), slots * ipc), PADDING, dtype=torch.long)
    for row, classes in zip(labels, sets, strict=True):
        row[: len(classes) * ipc] = torch.tensor(sorted(classes), dtype=torch.long).repeat_interleave(ipc)
    return labels


def own_classes(data: ClientData) -> list[list[int]]:
    """The classes that each client holds examples of."""
    return [sorted(set(y[:n].tolist())) for y, n in zip(data.y.cpu(), data.sizes.tolist(), strict=True)]


def set_weights(labels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Labels that can be used as indices, and the weight of each image in its client's mean, both `[K, n]`."""
    there = labels != PADDING
    weights = there.to(dtype) / there.sum(1, keepdim=True).clamp(min=1).to(dtype)
    return labels.clamp(min=0), weights


def noise_images(streams: Sequence[Stream], count: int, data: ClientData) -> Tensor:
    """Standard normal images `[K, count, ...]` shaped as the clients' examples."""
    return normal(streams, (count, *data.x.shape[2:]), data.x)


def class_batch(data: ClientData, label: int, size: int, stream: np.random.Generator) -> Batch | None:
    """Up to `size` examples of one class of the one client in `data`, without replacement; None if it has none."""
    held = (data.y[0, : int(data.sizes[0])] == label).nonzero()[:, 0]
    if len(held) == 0:
        return None
    drawn = held[torch.from_numpy(stream.permutation(len(held))[:size]).to(held.device)]
    return data.take(drawn[None])


class RealGradients:
    """The target gradients of the synthetic images: every call reads one batch of each client.

    Private when the mechanism of `loops` clips and adds noise; the sum over a batch is divided by the expected size of
    a batch, min(B, n). Batches, noise and augmentation have separate streams.
    """

    def __init__(self, task: Task, data: ClientData, streams: ClientStreams, loops: Loops) -> None:
        self._task, self._data, self._loops = task, data, loops
        self._batches = sampling_streams(streams, streams.of_exchange("real-batches"))
        self._noise = streams.noise("real-gradients")
        self._views = streams.of_exchange("augmentation")
        sizes = data.sizes.tolist()
        self._rates = [min(1.0, loops.batch_size / max(1, n)) for n in sizes]
        self._expected = [float(max(1, min(loops.batch_size, n))) for n in sizes]

    def draw(self, w: Params, active: Sequence[int]) -> tuple[Params, list[View]]:
        """The gradients of the `active` clients at their models `w [active, ...]`, and how they were augmented."""
        loops, task = self._loops, self._task
        batches = [self._batches[k] for k in active]
        batch = poisson_batch(self._data.rows(active), [self._rates[k] for k in active], batches)
        views = [draw_view(loops.augment, self._views[k]) for k in active]
        seen = Batch(_seen(batch.x, views), batch.y, batch.mask)
        expected = torch.tensor([self._expected[k] for k in active], dtype=torch.float64)
        if math.isfinite(loops.mechanism.clip):
            noise = [self._noise[k] for k in active]
            return private_gradient(task, w, seen, expected, loops.mechanism, noise), views
        assert seen.mask is not None
        total = weighted_gradient(task, w, seen.x, seen.y, seen.mask.to(seen.x.dtype))
        return {name: leaf / per_row(expected.to(leaf.device), leaf) for name, leaf in total.items()}, views


def approximate(
    task: Task,
    starts: Callable[[int], Params],
    data: ClientData,
    images: Tensor,
    labels: Tensor,
    streams: ClientStreams,
    loops: Loops,
) -> Tensor:
    """The images `[K, n, ...]` after all trajectories; the one of number i begins at `starts(i)` (1 or K rows).

    At most `loops.accesses` batches of each client are read, exactly as many if no client leaves the radius.
    """
    real = RealGradients(task, data, streams, loops)
    y, weights = set_weights(labels, images.dtype)
    images = images.clone()
    velocity = torch.zeros_like(images)
    for trajectory in range(loops.trajectories):
        start = expand(starts(trajectory), data.count)
        w = {name: leaf.clone() for name, leaf in start.items()}
        for _ in range(loops.max_steps):
            near = (norms(sub(w, start)) < loops.radius).nonzero()[:, 0]
            if len(near) == 0:
                break
            active = near.tolist()
            here, x, v = rows(w, active), images[near], velocity[near]
            own_y, own_weights = y[near], weights[near]
            for _ in range(loops.real_batches):
                g, views = real.draw(here, active)
                for _ in range(loops.image_updates):
                    step = image_gradient(task, here, g, x, own_y, own_weights, loops.distance, views)
                    v = loops.image_momentum * v + step
                    x = x - loops.image_lr * v
            for _ in range(loops.model_updates):
                here = add(here, weighted_gradient(task, here, x, own_y, own_weights), scale=-loops.lr)
            images[near], velocity[near] = x, v
            for name, leaf in here.items():
                w[name][near] = leaf
    return images


def _seen(x: Tensor, views: Sequence[View]) -> Tensor:
    if all(view.kind is None for view in views):
        return x
    return torch.stack([view(own) for own, view in zip(x, views, strict=True)])


def image_gradient(
    task: Task,
    w: Params,
    real: Params,
    x: Tensor,
    y: Tensor,
    weights: Tensor,
    distance: Distance,
    views: Sequence[View],
) -> Tensor:
    """`matching_gradient` with client k's images augmented by `views[k]`."""
    if all(view.kind is None for view in views):
        return matching_gradient(task, w, real, x, y, weights, distance)
    images = x.detach().requires_grad_()
    seen = _seen(images, views)
    pull = matching_gradient(task, w, real, seen.detach(), y, weights, distance)
    return torch.autograd.grad(seen, images, pull)[0]


@dataclass(frozen=True)
class Path:
    """A descent on the synthetic set (Fig. 2): distance from its start, real and synthetic loss, each `[T, K]`."""

    distance: Tensor
    real: Tensor
    synthetic: Tensor

    def radii(self, largest: float) -> Tensor:
        """r_k `[K]`: the distance at the smallest real loss, at most `largest`.

        At least one step long, so that the server still takes a step if no client's loss decreases.
        """
        inside = self.distance < largest
        inside[0] = True
        best = self.real.masked_fill(~inside, math.inf).argmin(0)
        return self.distance.gather(0, best[None])[0].clamp(max=largest)


def measure_path(
    task: Task,
    start: Params,
    images: Tensor,
    labels: Tensor,
    data: ClientData,
    *,
    lr: float,
    radius: float,
    steps: int,
) -> Path:
    """Each client's gradient descent from `start` on its own synthetic set, until `radius` or `steps`.

    It reads the real examples at every step, so its results are not protected.
    """
    y, weights = set_weights(labels, images.dtype)
    real_weights = Batch(data.x, data.y, data.mask()).weights(data.x.dtype)
    first = expand(start, data.count)
    w = first
    lines: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(steps):
        w = add(w, weighted_gradient(task, w, images, y, weights), scale=-lr)
        distance = norms(sub(w, first))
        real = weighted_loss(task, w, data.x, data.y, real_weights)
        lines.append((distance, real, weighted_loss(task, w, images, y, weights)))
        if bool((distance >= radius).all()):
            break
    distances, reals, synthetics = (torch.stack(list(column)) for column in zip(*lines, strict=True))
    return Path(distances, reals, synthetics)


def descend(
    task: Task,
    start: Params,
    images: Tensor,
    labels: Tensor,
    shares: Tensor,
    *,
    lr: float,
    radius: float,
    max_steps: int,
    shuffle: tuple[int, np.random.Generator] | None = None,
) -> tuple[Params, int]:
    """Gradient descent on `sum_k shares[k] * loss of set k` from `start`, and the number of steps taken (Eq. 11).

    It continues while the distance to `start` is below `radius`: the result is at most one step beyond. With `shuffle`,
    a batch size and what orders are drawn from, a step is an epoch of batches over all images.
    """
    y, weights = set_weights(labels, images.dtype)
    shared = (weights * shares.to(weights)[:, None]).reshape(1, -1)
    x, y = images.flatten(0, 1).unsqueeze(0), y.reshape(1, -1)
    first = with_axis(start)
    w, taken = first, 0
    there = shared[0].nonzero()[:, 0]
    while taken < max_steps and float(norms(sub(w, first))) < radius:
        if shuffle is None:
            w = add(w, weighted_gradient(task, w, x, y, shared), scale=-lr)
        else:
            size, stream = shuffle
            order = there[torch.from_numpy(stream.permutation(len(there))).to(there.device)]
            for part in order.split(size):
                even = shared[:, part] / shared[:, part].sum()
                w = add(w, weighted_gradient(task, w, x[:, part], y[:, part], even), scale=-lr)
        taken += 1
    return without_axis(w), taken
