"""FedAvg: clients train, the server averages.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from
Decentralized Data. AISTATS 2017, Algorithm 1.

Symbols: E `epochs`, B `batch_size`, eta `lr`, n_k `size`.

Deviations: none. `weighting = "uniform"` replaces n_k / n by 1 / K, which hides the clients' sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass as record
from typing import Literal

from pydantic.dataclasses import dataclass
from torch import Tensor

from fedveil.data.client_data import ClientData
from fedveil.messages import Message, Record
from fedveil.methods.fields import STRICT, LocalTraining
from fedveil.methods.method import At, Method, register, unprotected
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.tree import Params, State, weighted_sum, with_axis


@record(frozen=True)
class Server(Record):
    params: Params


@record(frozen=True)
class Model(Message):
    params: Params


@record(frozen=True)
class TrainedModel(Message):
    params: Params
    size: Tensor


def averaging_weights(sizes: Tensor, weighting: Literal["size", "uniform"]) -> Tensor:
    """What each client counts: n_k / n, or 1 / K."""
    if weighting == "uniform":
        return sizes.new_full(sizes.shape, 1.0).double() / len(sizes)
    return sizes.double() / sizes.sum().clamp(min=1)


@register("fedavg", "clients train, the server averages", server=Server, down=Model, up=TrainedModel)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class FedAvg(LocalTraining, Method[Server, Model, TrainedModel]):
    weighting: Literal["size", "uniform"] = "size"

    def init_server(self, params: Params, plan: Plan) -> Server:
        return Server(params)

    def broadcast(self, at: At, server: Server, clients: Sequence[int]) -> Model:
        return Model(with_axis(server.params))

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[TrainedModel, State]:
        trained = self.train(task, at, down.params, data, rng)
        return TrainedModel(trained.params, data.sizes), state

    def server_update(
        self,
        task: Task,
        at: At,
        server: Server,
        clients: Sequence[int],
        up: TrainedModel | None,
        rng: ServerStreams,
    ) -> Server:
        if up is None:
            return server
        return Server(weighted_sum(up.params, averaging_weights(up.size, self.weighting)))

    def model(self, server: Server) -> Params:
        return server.params

    def releases(self, plan: Plan) -> Sequence[Release]:
        return unprotected("the trained model of each client", "no noise is added")
