"""FedSGD: clients send gradients, the server takes the step.

McMahan et al., AISTATS 2017 (FedAvg with one full-batch step). With `batch_size` the cohort walks through its
examples in step, one exchange per batch, as FedEM's paper compares with.

Symbols: eta `lr`, n_k `size`.

Deviations: a client that has run out of examples sends a zero gradient of size 0 and so counts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass as record
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.lazy_torch import torch
from fedveil.messages import Message
from fedveil.methods.disclosure import LocalSteps
from fedveil.methods.fields import STRICT, LearningRate
from fedveil.methods.method import At, register, unprotected
from fedveil.methods.shared_model import AggregatedModel, Model, Server, averaging_weights
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams
from fedveil.task import Batch, Task
from fedveil.training.local_sgd import Schedule, scheduled_lr
from fedveil.tree import Params, State, add, expand, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor


@record(frozen=True)
class Gradient(Message):
    gradient: Params
    size: Tensor


def batch_in_step(data: ClientData, batch_size: int | None, exchange: int, rng: ClientStreams) -> Batch:
    """Batch number `exchange` of each client's shuffled examples; padding where a client has run out."""
    if batch_size is None or data.largest == 0:
        return data.everything()
    start = exchange * batch_size
    counts = (data.sizes.cpu() - start).clamp(min=0, max=batch_size)
    width = max(1, int(counts.max()))
    positions = torch.zeros(data.count, width, dtype=torch.long)
    rows = zip(positions, counts.tolist(), data.sizes.tolist(), rng.of_round("batches"), strict=True)
    for row, count, n, stream in rows:
        row[:count] = torch.from_numpy(stream.permutation(n)[start : start + count])
    mask = torch.arange(width) < counts[:, None]
    device = data.x.device
    return data.take(positions.to(device), None if bool(mask.all()) else mask.to(device))


def batches_per_round(plan: Plan, batch_size: int | None) -> int:
    return 1 if batch_size is None else math.ceil(plan.largest_client / batch_size)


@register(
    "fedsgd", "clients send gradients, the server takes the step", server=Server, down=Model, up=Gradient
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class FedSGD(AggregatedModel[Gradient]):
    lr: LearningRate = 0.1
    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Examples per exchange; all at once if not given."""
    lr_schedule: Schedule = "constant"
    """How `lr` changes over the rounds."""
    weighting: Literal["size", "uniform"] = "size"
    """How clients are weighted in the mean: by their numbers of examples, or all alike."""

    def exchanges(self, plan: Plan) -> int:
        return batches_per_round(plan, self.batch_size)

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Gradient, State]:
        batch = batch_in_step(data, self.batch_size, at.exchange, rng)
        gradient = task.grad(expand(down.params, data.count), batch, rng.of_exchange("dropout"))
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
        return LocalSteps(lr, self.batch_size)

    def batches_behind(self, at: At, data: ClientData, rng: ClientStreams) -> Sequence[Batch]:
        return [batch_in_step(data, self.batch_size, at.exchange, rng)]
