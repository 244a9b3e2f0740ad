"""DP-SGD over the client axis: every example's gradient clipped, Gaussian noise on each batch's sum.

Abadi et al.: Deep Learning with Differential Privacy. CCS 2016, Algorithm 1, inside each client. Batches are
Poisson samples: each of a client's n examples is in a batch with probability 1 / ceil(n / B), and the noisy sum is
divided by the expected size of a batch, so an example changes nothing but its own clipped gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fedveil.data.client_data import ClientData
from fedveil.linear_network import cross_entropy_gradient, example_norms, mean_gradient
from fedveil.privacy.clipping import hide
from fedveil.streams import ClientStreams, Stream, normal
from fedveil.task import Batch, Task
from fedveil.training.per_example import clipped_gradient_sum
from fedveil.tree import Params, per_row, rows

_MARGIN = 8  # roundings: scaling a gradient must not lengthen it beyond the clip


def private_steps(smallest: int, largest: int, batch_size: int, epochs: int) -> tuple[int, float]:
    """How many noisy batches a participation reads, and the chance that one holds a given example.

    For clients of `smallest` to `largest` examples the most steps and the highest rate of any: a bound for all.
    """
    return epochs * math.ceil(largest / batch_size), 1 / math.ceil(smallest / batch_size)


def accumulated_noise(lr: float, batch_size: int, epochs: int, momentum: float, records: int) -> float:
    """The noise in each entry of a model after one participation, in units of multiplier * clip.

    Every step adds lr / (expected batch) of it, which momentum repeats at most 1 / (1 - momentum) times.
    """
    batches = math.ceil(records / batch_size)
    return lr * batches / records * math.sqrt(epochs * batches) / (1 - momentum)


def private_sgd(
    task: Task,
    w: Params,
    data: ClientData,
    streams: ClientStreams,
    *,
    lr: float,
    batch_size: int,
    epochs: int,
    clip: float,
    multiplier: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    proximal: float = 0.0,
    dropout: bool = True,
) -> Params:
    """Each client's parameters `[K, ...]` after `epochs` times ceil(n / B) noisy steps from `w` `[K, ...]`.

    An infinite clip switches clipping and noise off. A client without examples keeps its start. Networks of
    linear layers train with their dropout unless it is switched off, others without. `proximal` pulls every step
    towards the start.
    """
    sizes = data.sizes.tolist()
    batches = [math.ceil(n / batch_size) for n in sizes]
    order = sorted(range(data.count), key=lambda k: (-batches[k], k))
    back = sorted(range(data.count), key=order.__getitem__)
    params = {
        name: leaf.clone(memory_format=torch.contiguous_format) for name, leaf in rows(w, order).items()
    }
    anchor = {name: leaf.clone() for name, leaf in params.items()} if proximal else {}
    velocity = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    ordered, own = data.rows(order), streams.rows(order)
    draws = sampling_streams(own, own.of_round("batches"))
    # By place in the batch, so one record less moves the others' masks: nobody may know them.
    drops, noises = own.unknown_to_server(own.of_round("dropout")), own.noise("dp-sgd")
    std = multiplier * clip if math.isfinite(clip) else 0.0
    for step in range(epochs * max(batches, default=0)):
        active = sum(step < epochs * batches[k] for k in order)  # clients that are done are at the end
        now = {name: leaf[:active] for name, leaf in params.items()}
        batch = poisson_batch(ordered, [1 / batches[k] for k in order[:active]], draws[:active])
        total = clipped_sum(task, now, batch, clip, drops[:active] if dropout else None)
        expected = torch.tensor([sizes[k] / batches[k] for k in order[:active]], dtype=torch.float64)
        for name, leaf in now.items():
            g = total[name]
            if std > 0:
                g = g + std * normal(noises[:active], leaf.shape[1:], leaf)
            g = g / per_row(expected.to(leaf.device), leaf)
            if weight_decay:
                g = g + weight_decay * leaf
            if proximal:
                g = g + proximal * (leaf - anchor[name][:active])
            if momentum:
                g = velocity[name][:active].mul_(momentum).add_(g)
            leaf.sub_(g, alpha=lr)
    return rows(params, back)


def sampling_streams(streams: ClientStreams, seeded: Sequence[Stream]) -> Sequence[Stream]:
    """What batches are drawn from: `seeded`, on a deployed node the system's entropy.

    Who is in a batch must stay secret, or sampling does not amplify privacy.
    """
    return seeded if streams.noise_source == "seeded" else streams.noise("sampling")


def poisson_batch(data: ClientData, rates: Sequence[float], draws: Sequence[Stream]) -> Batch:
    """Each example of client k with probability rates[k]; padding where others drew more."""
    active = len(rates)
    sizes = data.sizes[:active].tolist()
    taken = [
        torch.from_numpy(np.flatnonzero(stream.random(n) < rate))
        for n, rate, stream in zip(sizes, rates, draws, strict=True)
    ]
    width = max(1, max(len(found) for found in taken))
    positions = torch.zeros(active, width, dtype=torch.long)
    mask = torch.zeros(active, width, dtype=torch.bool)
    for k, found in enumerate(taken):
        positions[k, : len(found)] = found
        mask[k, : len(found)] = True
    some = ClientData(data.x[:active], data.y[:active], data.sizes[:active])
    return some.take(positions.to(data.x.device), mask.to(data.x.device))


def clipped_sum(
    task: Task, w: Params, batch: Batch, clip: float, dropout: Sequence[np.random.Generator] | None = None
) -> Params:
    """`sum_i min(1, clip / |g_i|) g_i` of each client, `[K, ...]`."""
    assert batch.mask is not None
    if task.linear is not None:
        drop = task.dropout_masks(batch, dropout)
        scores, tape = task.linear.forward(w, batch.x, drop)
        factors = task.linear.backward(w, batch.x, tape, cross_entropy_gradient(scores, batch.y), drop)
        norms = example_norms(factors)
        finite = norms.isfinite()
        if not bool(finite.all()) and hide(int((~finite).sum())):
            factors = [
                replace(f, a=f.a.where(finite[..., None], 0), g=f.g.where(finite[..., None], 0))
                for f in factors
            ]
            norms = norms.where(finite, 0)
        short = (clip / norms) * (1 - _MARGIN * torch.finfo(scores.dtype).eps)
        weights = torch.where(norms > clip, short, torch.ones_like(norms)) * batch.mask
        gradient = mean_gradient(factors, weights.to(scores.dtype))
        return {name: gradient[name] for name in w}
    found: list[Params] = []
    for k in range(len(batch.y)):
        one = {name: leaf[k] for name, leaf in w.items()}
        total, _ = clipped_gradient_sum(
            task.module, one, batch.x[k], batch.y[k], clip, loss=task.example_loss, mask=batch.mask[k]
        )
        found.append(total)
    return {name: torch.stack([total[name] for total in found]) for name in w}
