"""FedProx: FedAvg with a proximal term that keeps clients near the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks. MLSys 2020,
Algorithm 2: client k minimises F_k(w) + mu/2 ||w - w_t||^2.

Symbols: mu `proximal`.

Deviations: all clients train for the same number of epochs (gamma-inexactness does not vary between clients).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.methods.disclosure import LocalSteps
from fedveil.methods.fedavg import TrainedModel
from fedveil.methods.fields import STRICT, LocalTraining, NonNegative, Weighting
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


@register(
    "fedprox", "FedAvg with clients held near the global model", server=Server, down=Model, up=TrainedModel
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class FedProx(LocalTraining, AggregatedModel[TrainedModel]):
    proximal: NonNegative = 0.1
    """Weight of the proximal term, the squared distance to the model that was sent."""
    weighting: Weighting = "size"

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[TrainedModel, State]:
        return TrainedModel(self._trained(task, at, down.params, data, rng), data.sizes), state

    def _trained(self, task: Task, at: At, w: Params, data: ClientData, rng: ClientStreams) -> Params:
        return self.train(task, at, w, data, rng, proximal=self.proximal).params

    def client_sum(self) -> ClientSum[Server, Model]:
        return averaged_securely(self.weighting, self._trained)

    def aggregate(self, task: Task, at: At, w: Params, up: TrainedModel) -> Params:
        return weighted_sum(up.params, averaging_weights(up.size, self.weighting))

    def releases(self, plan: Plan) -> Sequence[Release]:
        return unprotected("the trained model of each client", "no noise is added")

    def local_training(self, at: At) -> LocalSteps:
        return replace(super().local_training(at), proximal=self.proximal)
