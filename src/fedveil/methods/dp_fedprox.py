"""DP-FedProx: FedProx whose clients train by DP-SGD, so that records are protected before anything is sent.

Record-level local DP as in Truex et al.: A Hybrid Approach to Privacy-Preserving Federated Learning. AISec 2019,
with the objective of Li et al.: Federated Optimization in Heterogeneous Networks. MLSys 2020. A baseline of FedLAP-DP.

Symbols: mu `proximal`, C `clip`, sigma `noise_multiplier`, B `batch_size`, E `epochs`, eta `lr`.

Deviations:
- Batches are Poisson samples of rate 1 / ceil(n_k / B), E * ceil(n_k / B) of them in each participation. The proximal
  term does not depend on the data, so it is neither clipped nor noised.
- Dropout is not applied. mu = 0 is Truex et al.'s DP-FedAvg, the paper's other private baseline.
- The average has equal weights, and n_k counts as public: batch rate and number of steps depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.methods.disclosure import Adaptation, LocalSteps
from fedveil.methods.fields import (
    STRICT,
    BatchSize,
    Clip,
    Epochs,
    LearningRate,
    LearningRateSchedule,
    NoiseMultiplier,
    NonNegative,
)
from fedveil.methods.method import At, register
from fedveil.methods.record_level import RecordLevel
from fedveil.methods.shared_model import AggregatedModel, Model, Server
from fedveil.methods.user_level import NoisyModel
from fedveil.privacy.mechanisms import gaussian
from fedveil.privacy.releases import ADVERSARIES, Plan, PostProcessing, Release
from fedveil.streams import ClientStreams
from fedveil.task import Task
from fedveil.training.local_sgd import scheduled_lr
from fedveil.tree import Params, State, expand, mean


@register(
    "dp-fedprox",
    "FedProx whose clients train by DP-SGD: record-level local DP",
    server=Server,
    down=Model,
    up=NoisyModel,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPFedProx(AggregatedModel[NoisyModel]):
    lr: LearningRate = 0.1
    lr_schedule: LearningRateSchedule = "cosine"
    epochs: Epochs = 5
    batch_size: BatchSize = 256
    proximal: NonNegative = 0.1
    """Weight of the proximal term, the squared distance to the model that was sent."""
    clip: Clip = 0.2
    noise_multiplier: NoiseMultiplier = 1.0

    def records(self) -> RecordLevel:
        """Trains the clients; `releases` accounts for it."""
        return RecordLevel(
            gaussian(self.clip, self.noise_multiplier),
            self.batch_size,
            self.epochs,
            proximal=self.proximal,
            dropout=False,
        )

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[NoisyModel, State]:
        start = expand(down.params, data.count)
        trained = self.records().train(task, start, data, rng, self.local_training(at).lr)
        return NoisyModel(trained), state

    def aggregate(self, task: Task, at: At, w: Params, up: NoisyModel) -> Params:
        return mean(up.params)

    def releases(self, plan: Plan) -> Sequence[Release]:
        return (
            self.records().release("the noisy gradients behind each client's model", plan),
            Release("the averaged model", "record", ADVERSARIES, PostProcessing("a mean of the uploads")),
        )

    def local_training(self, at: At) -> LocalSteps:
        lr = scheduled_lr(self.lr, self.lr_schedule, at.round, at.plan.rounds)
        return LocalSteps(lr, self.batch_size, self.epochs, proximal=self.proximal)

    def adaptation(self, at: At, dimension: int, examples: int) -> Adaptation:
        return self.records().adaptation(self.local_training(at).lr, examples)
