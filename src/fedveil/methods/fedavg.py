"""FedAvg: clients train, the server averages.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from
Decentralized Data. AISTATS 2017, Algorithm 1.

Symbols: E `epochs`, B `batch_size`, eta `lr`, n_k `size`.

Deviations: none. `weighting = "uniform"` replaces n_k / n by 1 / K, which hides the clients' sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass as record
from typing import TYPE_CHECKING

from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.messages import Message
from fedveil.methods.fields import STRICT, LocalTraining, Weighting
from fedveil.methods.method import At, ClientSum, register, unprotected
from fedveil.methods.shared_model import (
    AggregatedModel,
    Model,
    Server,
    averaged_securely,
    averaging_weights,
)
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams
from fedveil.task import Task
from fedveil.tree import Params, State, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor


@record(frozen=True)
class TrainedModel(Message):
    params: Params
    size: Tensor


@register("fedavg", "clients train, the server averages", server=Server, down=Model, up=TrainedModel)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class FedAvg(LocalTraining, AggregatedModel[TrainedModel]):
    weighting: Weighting = "size"

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[TrainedModel, State]:
        return TrainedModel(self._trained(task, at, down.params, data, rng), data.sizes), state

    def _trained(self, task: Task, at: At, w: Params, data: ClientData, rng: ClientStreams) -> Params:
        return self.train(task, at, w, data, rng).params

    def client_sum(self) -> ClientSum[Server, Model]:
        return averaged_securely(self.weighting, self._trained)

    def aggregate(self, task: Task, at: At, w: Params, up: TrainedModel) -> Params:
        return weighted_sum(up.params, averaging_weights(up.size, self.weighting))

    def releases(self, plan: Plan) -> Sequence[Release]:
        return unprotected("the trained model of each client", "no noise is added")
