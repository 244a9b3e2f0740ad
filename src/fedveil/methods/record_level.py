"""Record-level training of whole epochs: DP-SGD inside each client, its releases, and the noise in a trained model.

Symbols: C `mechanism.clip`, sigma C `mechanism.std`, B `batch_size`, E `epochs`. A client of n_k examples takes
E * ceil(n_k / B) private steps, each on a Poisson batch of rate 1 / ceil(n_k / B); n_k counts as public.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.methods.disclosure import Adaptation
from fedveil.privacy.mechanisms import SumMechanism
from fedveil.privacy.releases import ADVERSARIES, Plan, Release
from fedveil.streams import ClientStreams
from fedveil.task import Task
from fedveil.training.private_sgd import (
    PoissonBatches,
    StepStreams,
    accumulated_noise,
    private_sgd,
    private_steps,
)
from fedveil.tree import Params


@dataclass(frozen=True)
class RecordLevel:
    """DP-SGD inside each client: training, its releases and the noise in the trained model."""

    mechanism: SumMechanism
    batch_size: int
    epochs: int
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0
    dropout: bool = True

    def train(self, task: Task, start: Params, data: ClientData, rng: ClientStreams, lr: float) -> Params:
        """Each client's model `[K, ...]` after its private steps from `start` `[K, ...]`."""
        return private_sgd(
            task,
            start,
            data,
            StepStreams.of(rng, dropout=self.dropout),
            PoissonBatches.of_epochs(data.sizes.tolist(), self.batch_size, self.epochs),
            self.mechanism,
            lr=lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            proximal=self.proximal,
        )

    def release(self, what: str, plan: Plan) -> Release:
        """The release of anything computed from a participation's private steps, against every adversary."""
        sizes = (plan.records_per_client, plan.largest_client)
        steps, rate = private_steps(*sizes, self.batch_size, self.epochs)
        return Release(what, "record", ADVERSARIES, self.mechanism.protection(), accesses=steps, rate=rate)

    def std(self, lr: float, records: int) -> float:
        """The standard deviation of the noise in each entry of a client's trained model."""
        noise = accumulated_noise(lr, self.batch_size, self.epochs, self.momentum, records)
        return noise * self.mechanism.std

    def adaptation(self, lr: float, examples: int) -> Adaptation:
        """How an attacker who interprets a model's change as a gradient adapts to the noise in it."""
        return Adaptation.to_noise(self.std(lr, examples) / lr)
