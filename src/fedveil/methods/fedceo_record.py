"""FedCEO's `unit = "record"`: DP-SGD inside each client and no noise on its update, as in the authors' code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.methods.disclosure import Adaptation
from fedveil.methods.fields import LocalTraining
from fedveil.methods.method import At
from fedveil.methods.record_level import RecordLevel
from fedveil.privacy.mechanisms import SumMechanism, Unnoised
from fedveil.privacy.releases import ADVERSARIES, Plan, PostProcessing, Release
from fedveil.streams import ClientStreams
from fedveil.task import Task
from fedveil.tree import Params, add, sub


@dataclass(frozen=True)
class RecordUnit:
    """The counterpart of `ClientUnit` where records are protected."""

    training: LocalTraining
    mechanism: SumMechanism
    server_lr: float

    @property
    def level(self) -> RecordLevel:
        local = self.training
        return RecordLevel(self.mechanism, local.batch_size, local.epochs, local.momentum, local.weight_decay)

    def models(
        self, task: Task, at: At, start: Params, data: ClientData, rng: ClientStreams, cohort: int
    ) -> Params:
        """The uploads `[K, ...]`: models trained by private steps."""
        update = sub(self.level.train(task, start, data, rng, self.training.lr_at(at)), start)
        return add(start, update, scale=self.server_lr)

    def upload(self, cohort: int) -> None:
        """None: no mechanism protects the update as a whole."""

    def top_up(self, present: int, cohort: int) -> SumMechanism:
        """The server adds no noise: each update is already protected."""
        return Unnoised()

    def std(self, at: At, cohort: int) -> float:
        """The standard deviation of the noise in each entry of an update."""
        return self.level.std(self.training.lr_at(at), at.plan.records_per_client)

    def releases(self, plan: Plan) -> Sequence[Release]:
        computed = PostProcessing("computed from the noisy models")
        return (
            self.level.release("each client's noisy model", plan),
            Release("the smoothed and averaged models", "record", ADVERSARIES, computed),
        )

    def adaptation(self, at: At, examples: int) -> Adaptation:
        return self.level.adaptation(self.training.lr_at(at), examples)
