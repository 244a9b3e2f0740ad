"""FedProx: FedAvg whose clients are held near the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks. MLSys 2020,
Algorithm 2: client k minimises F_k(w) + mu/2 ||w - w_t||^2.

Symbols: mu `proximal`.

Deviations: all clients do the same number of epochs (gamma-inexactness is not varied between clients).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.methods.fedavg import Model, Server, TrainedModel, averaging_weights
from fedveil.methods.fields import STRICT, LocalTraining, NonNegative
from fedveil.methods.method import At, Method, register, unprotected
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.tree import Params, State, weighted_sum, with_axis


@register(
    "fedprox", "FedAvg with clients held near the global model", server=Server, down=Model, up=TrainedModel
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class FedProx(LocalTraining, Method[Server, Model, TrainedModel]):
    proximal: NonNegative = 0.1
    weighting: Literal["size", "uniform"] = "size"

    def init_server(self, params: Params, plan: Plan) -> Server:
        return Server(params)

    def broadcast(self, at: At, server: Server, clients: Sequence[int]) -> Model:
        return Model(with_axis(server.params))

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[TrainedModel, State]:
        trained = self.train(task, at, down.params, data, rng, proximal=self.proximal)
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
