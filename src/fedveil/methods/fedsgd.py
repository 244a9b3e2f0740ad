"""FedSGD: clients send gradients, the server takes the step.

McMahan et al., AISTATS 2017 (FedAvg with one full-batch step). With `batch_size` there is one exchange per batch, as in
the comparison of FedEM's paper.

Symbols: eta `lr`, n_k `size`.

Deviations: a client without further examples in the round sends a zero gradient of size 0, which has no weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass as record
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.lazy_torch import torch
from fedveil.messages import Message
from fedveil.methods.disclosure import LocalSteps
from fedveil.methods.fields import STRICT, LearningRate, LearningRateSchedule, Weighting
from fedveil.methods.method import At, register, unprotected
from fedveil.methods.shared_model import AggregatedModel, Model, Server, averaging_weights
from fedveil.numerics import NUMERICS
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams
from fedveil.task import Batch, Task
from fedveil.training.batching import LastBatch, batch_of_epoch, batch_sizes, largest_batch
from fedveil.training.local_sgd import scheduled_lr
from fedveil.training.small_batches import differentiator, is_known
from fedveil.tree import Params, State, add, expand, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor


_MOST_POSITIONS = 1 << 22  # 32 MB


@record(frozen=True)
class Gradient(Message):
    gradient: Params
    size: Tensor


class _Orders:
    """In which order clients go through their examples in one round, kept for its exchanges: shuffling takes longer."""

    def __init__(self) -> None:
        self._round = (-1, -1)
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._room = 0

    def of(self, rng: ClientStreams, sizes: Sequence[int]) -> list[Tensor]:
        if self._round != (rng.seed, rng.round):
            self._round, self._kept, self._room = (rng.seed, rng.round), {}, _MOST_POSITIONS
        return [self._one(rng, row, n) for row, n in enumerate(sizes)]

    def _one(self, rng: ClientStreams, row: int, n: int) -> Tensor:
        key = (rng.clients[row], n)
        if (order := self._kept.get(key)) is None:
            order = torch.from_numpy(rng.rows([row]).of_round("batches")[0].permutation(n))
            if n <= self._room:
                self._kept[key] = order
                self._room -= n
        return order


_ORDERS = _Orders()


def batch_in_step(
    data: ClientData,
    batch_size: int | None,
    exchange: int,
    rng: ClientStreams,
    last_batch: LastBatch = "merge",
) -> Batch:
    """Batch number `exchange` of each client's shuffled examples; padding where a client has run out."""
    if batch_size is None or data.largest == 0:
        return data.everything()
    sizes = data.sizes.tolist()
    counts = [batch_of_epoch(n, batch_size, last_batch, exchange)[1] for n in sizes]
    start = exchange * batch_size
    width = max(1, *counts)
    positions = torch.zeros(data.count, width, dtype=torch.long)
    orders = _ORDERS.of(rng, sizes)
    for row, count, order in zip(positions, counts, orders, strict=True):
        row[:count] = order[start : start + count]
    mask = torch.arange(width) < torch.tensor(counts)[:, None]
    device = data.x.device
    return data.take(positions.to(device), None if bool(mask.all()) else mask.to(device))


def batches_per_round(plan: Plan, batch_size: int | None, last_batch: LastBatch) -> int:
    return 1 if batch_size is None else len(batch_sizes(plan.largest_client, batch_size, last_batch))


@register(
    "fedsgd", "clients send gradients, the server takes the step", server=Server, down=Model, up=Gradient
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class FedSGD(AggregatedModel[Gradient]):
    numerics = NUMERICS + 1  # 1: small batches of images are differentiated for all clients at once
    lr: LearningRate = 0.1
    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Examples per exchange; default: all at once."""
    lr_schedule: LearningRateSchedule = "constant"
    weighting: Weighting = "size"
    last_batch: LastBatch = "merge"
    """The remainder of a round that is smaller than a batch: "keep" makes it an exchange of its own, "drop" leaves it
    out, "merge" adds it to the previous batch if it is less than half of one."""

    def unused_fields(self) -> Mapping[str, str]:
        unused = "Leave it out, or give batch_size: without it all examples are one batch."
        return {"last_batch": unused} if self.batch_size is None else {}

    def exchanges(self, plan: Plan) -> int:
        return batches_per_round(plan, self.batch_size, self.last_batch)

    def computes_together(self, task: Task) -> bool:
        return self.batch_size is not None and is_known(task, largest_batch(self.batch_size, self.last_batch))

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Gradient, State]:
        batch = batch_in_step(data, self.batch_size, at.exchange, rng, self.last_batch)
        dropout = rng.of_exchange("dropout") if task.has_dropout else None
        gradient = differentiator(task, batch).grad(expand(down.params, data.count), batch, dropout)
        sizes = torch.full_like(data.sizes, batch.y.shape[1]) if batch.mask is None else batch.mask.sum(1)
        return Gradient(gradient, sizes), state

    def aggregate(self, task: Task, at: At, w: Params, up: Gradient) -> Params:
        step = weighted_sum(up.gradient, averaging_weights(up.size, self.weighting))
        lr = scheduled_lr(self.lr, self.lr_schedule, at.round, at.plan.rounds)
        return add(w, step, scale=-lr)

    def releases(self, plan: Plan) -> Sequence[Release]:
        return unprotected("the gradient of each client", "no noise is added")

    def round_training(self, at: At) -> LocalSteps:
        lr = scheduled_lr(self.lr, self.lr_schedule, at.round, at.plan.rounds)
        return LocalSteps(lr, self.batch_size, last_batch=self.last_batch)

    def batches_behind(self, at: At, data: ClientData, rng: ClientStreams) -> Sequence[Batch]:
        return [batch_in_step(data, self.batch_size, at.exchange, rng, self.last_batch)]
