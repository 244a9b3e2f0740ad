"""DP-SGD over the client axis: per-example gradients are clipped, and noise is added to each batch's sum.

Abadi et al.: Deep Learning with Differential Privacy. CCS 2016, Algorithm 1, inside each client. Batches are
Poisson samples, and the noisy sum is divided by the expected batch size, so an example affects only its own clipped
gradient. `private_gradient` is the private step of all record-level methods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fedveil.data.client_data import ClientData
from fedveil.errors import DivergedError, InputError
from fedveil.lazy_torch import torch
from fedveil.linear_network import cross_entropy_gradient, example_norms, mean_gradient
from fedveil.privacy.clipping import hide
from fedveil.privacy.mechanisms import SumMechanism
from fedveil.streams import ClientStreams, Stream
from fedveil.task import Batch, Task
from fedveil.training.per_example import clip_factors, clipped_gradient_sum
from fedveil.tree import Params, per_row, rows

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_BATCH = 2**17
"""Largest expected batch size; a Poisson batch is never twice as large (docs/noise.md, claim 4)."""


def private_steps(smallest: int, largest: int, batch_size: int, epochs: int) -> tuple[int, float]:
    """The number of noisy batches of a participation, and the probability that a batch contains a given example.

    For clients with `smallest` to `largest` examples, the maximum of both over all sizes.
    """
    return epochs * math.ceil(largest / batch_size), 1 / math.ceil(smallest / batch_size)


def accumulated_noise(lr: float, batch_size: int, epochs: int, momentum: float, records: int) -> float:
    """The standard deviation of the noise in a model's entries after a participation, in units of multiplier * clip.

    Every step adds lr / (expected batch) of it, which momentum amplifies by at most 1 / (1 - momentum).
    """
    batches = math.ceil(records / batch_size)
    return lr * batches / records * math.sqrt(epochs * batches) / (1 - momentum)


@dataclass(frozen=True)
class PoissonBatches:
    """The Poisson batches of each client: their number, sampling rate and expected size."""

    steps: Sequence[int]
    rates: Sequence[float]
    expected: Sequence[float]

    @classmethod
    def of_epochs(cls, sizes: Sequence[int], batch_size: int, epochs: int) -> PoissonBatches:
        """`epochs` times ceil(n / B) batches of rate 1 / ceil(n / B); none for a client without examples."""
        batches = [math.ceil(n / batch_size) for n in sizes]
        return cls(
            [epochs * count for count in batches],
            [1 / max(1, count) for count in batches],
            [n / max(1, count) for n, count in zip(sizes, batches, strict=True)],
        )

    @classmethod
    def of_rate(cls, sizes: Sequence[int], rate: float, steps: int) -> PoissonBatches:
        """`steps` batches of one rate, also for a client without examples, which adds noise only."""
        return cls([steps] * len(sizes), [rate] * len(sizes), [max(1.0, rate * n) for n in sizes])

    def rows(self, index: Sequence[int]) -> PoissonBatches:
        return PoissonBatches(
            [self.steps[k] for k in index], [self.rates[k] for k in index], [self.expected[k] for k in index]
        )


@dataclass(frozen=True)
class StepStreams:
    """The streams of the private steps of K clients: of batches, of noise and, unless None, of dropout."""

    batches: Sequence[Stream]
    noise: Sequence[Stream]
    dropout: Sequence[np.random.Generator] | None

    @classmethod
    def of(cls, streams: ClientStreams, *, dropout: bool = True) -> StepStreams:
        return cls(
            sampling_streams(streams, streams.of_round("batches")),
            streams.noise("dp-sgd"),
            dropout_streams(streams) if dropout else None,
        )

    def rows(self, index: Sequence[int]) -> StepStreams:
        dropout = None if self.dropout is None else [self.dropout[k] for k in index]
        return StepStreams([self.batches[k] for k in index], [self.noise[k] for k in index], dropout)

    def first(self, count: int) -> StepStreams:
        return StepStreams(
            self.batches[:count], self.noise[:count], None if self.dropout is None else self.dropout[:count]
        )


def private_sgd(
    task: Task,
    w: Params,
    data: ClientData,
    streams: StepStreams,
    batches: PoissonBatches,
    mechanism: SumMechanism,
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    proximal: float = 0.0,
    closed_form: bool = True,
) -> Params:
    """Each client's parameters `[K, ...]` after its private steps from `w` `[K, ...]`.

    A client without steps keeps its initial parameters. `proximal` is the weight of the proximal term. `closed_form`:
    see `clipped_sum`.
    """
    order = sorted(range(data.count), key=lambda k: (-batches.steps[k], k))
    back = sorted(range(data.count), key=order.__getitem__)
    params = {
        name: leaf.clone(memory_format=torch.contiguous_format) for name, leaf in rows(w, order).items()
    }
    anchor = {name: leaf.clone() for name, leaf in params.items()} if proximal else {}
    velocity = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    ordered, batches, streams = data.rows(order), batches.rows(order), streams.rows(order)
    expected = torch.tensor(batches.expected, dtype=torch.float64)
    for step in range(max(batches.steps, default=0)):
        active = sum(step < count for count in batches.steps)  # clients that have finished are at the end
        now, own = {name: leaf[:active] for name, leaf in params.items()}, streams.first(active)
        batch = poisson_batch(ordered, batches.rates[:active], own.batches)
        gradient = private_gradient(
            task, now, batch, expected[:active], mechanism, own.noise, own.dropout, closed_form=closed_form
        )
        for name, leaf in now.items():
            g = gradient[name]
            if weight_decay:
                g = g + weight_decay * leaf
            if proximal:
                g = g + proximal * (leaf - anchor[name][:active])
            if momentum:
                g = velocity[name][:active].mul_(momentum).add_(g)
            leaf.sub_(g, alpha=lr)
    return rows(params, back)


def private_gradient(
    task: Task,
    w: Params,
    batch: Batch,
    expected: Tensor,
    mechanism: SumMechanism,
    noise: Sequence[Stream],
    dropout: Sequence[np.random.Generator] | None = None,
    *,
    closed_form: bool = True,
) -> Params:
    """The gradient of a private step of K clients: clipped per example, with noise on the sum, divided by `expected`.

    Guarantees: an example changes the sum by at most `mechanism.clip`
    (`test_one_example_moves_the_sum_by_no_more_than_the_clip`); the noise is the mechanism's
    (`test_the_noise_is_what_is_declared`).
    """
    require_batch(float(expected.max()), mechanism)
    total = clipped_sum(task, w, batch, mechanism.clip, dropout, closed_form=closed_form)
    noisy = mechanism.perturb(total, noise)
    return {
        name: (leaf / per_row(expected.to(leaf.device), leaf)).to(w[name]) for name, leaf in noisy.items()
    }


def require_batch(expected: float, mechanism: SumMechanism) -> None:
    """Refuse batches so large that the rounding errors of their sum exceed the margin of the clip."""
    if mechanism.step and expected > _LARGEST_BATCH:
        raise InputError(
            "batch_size",
            expected,
            "is too large: rounding errors of the sum would not be covered by the guarantee",
            f"Use batches of at most {_LARGEST_BATCH} examples.",
        )


def dropout_streams(streams: ClientStreams) -> list[np.random.Generator]:
    """The streams of dropout masks.

    Masks are assigned by position in the batch, so removing a record shifts those of others: on a deployed node they
    must be secret.
    """
    return streams.unknown_to_server(streams.of_round("dropout"))


def sampling_streams(streams: ClientStreams, seeded: Sequence[Stream]) -> Sequence[Stream]:
    """The streams of batches: `seeded`, or on a deployed node the system's entropy.

    Amplification by sampling requires secret batches.
    """
    return seeded if streams.noise_source == "seeded" else streams.noise("sampling")


def poisson_batch(data: ClientData, rates: Sequence[float], draws: Sequence[Stream]) -> Batch:
    """A batch with each example of client k with probability rates[k], padded to the largest.

    Private batches are drawn only here.
    """
    active = len(rates)
    if data.largest == 0:  # no client has examples: a row of padding keeps the shapes
        x, y = data.x.new_zeros(data.count, 1, *data.x.shape[2:]), data.y.new_zeros(data.count, 1)
        data = ClientData(x, y, data.sizes)
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
    task: Task,
    w: Params,
    batch: Batch,
    clip: float,
    dropout: Sequence[np.random.Generator] | None = None,
    *,
    closed_form: bool = True,
) -> Params:
    """`sum_i min(1, clip / |g_i|) g_i` of each client, `[K, ...]` in float64.

    Linear networks compute it for all clients at once, unless `closed_form` is false. Their dropout masks differ from
    those of other networks.
    """
    assert batch.mask is not None
    if task.linear is not None and closed_form:
        drop = task.dropout_masks(batch, dropout)
        scores, tape = task.linear.forward(w, batch.x, drop)
        factors = task.linear.backward(w, batch.x, tape, cross_entropy_gradient(scores, batch.y), drop)
        norms = example_norms(factors)
        finite = norms.isfinite()
        if not bool(finite.all()):
            bad = int((~finite & batch.mask).sum())  # padding repeats an example
            if bad and not hide(bad):
                raise DivergedError(
                    f"the gradients of {bad} examples are not finite", field="examples", value=bad
                )
            factors = [
                replace(f, a=f.a.where(finite[..., None], 0), g=f.g.where(finite[..., None], 0))
                for f in factors
            ]
            norms = norms.where(finite, 0)
        weights = clip_factors(norms, clip) * batch.mask
        gradient = mean_gradient([replace(f, a=f.a.double(), g=f.g.double()) for f in factors], weights)
        return {name: gradient[name] for name in w}
    found: list[Params] = []
    for k in range(len(batch.y)):
        one = {name: leaf[k] for name, leaf in w.items()}
        total, _ = clipped_gradient_sum(
            task.module,
            one,
            batch.x[k],
            batch.y[k],
            clip,
            loss=task.example_loss,
            mask=batch.mask[k],
            dropout=None if dropout is None else dropout[k],
        )
        found.append(total)
    return {name: torch.stack([total[name] for total in found]) for name in w}
