"""PPSGD: each client's model is a shared part plus a personal part that is never sent.

Bietti, Wei, Dudik, Langford, Wu: Personalization Improves Privacy-Accuracy Tradeoffs in Federated Learning.
ICML 2022, Algorithm 1 for additive models.

Symbols: w `Server.params`, theta_i the client's state, alpha `personal_lr` / `lr`, C `clip`,
sigma `noise_multiplier`, K `plan.cohort`.

Deviations:
- The paper's step is one stochastic gradient; here a participation is `epochs` of local SGD on both parts, and the
  change of the shared part is clipped and sent. One epoch of one batch is the paper's step.
- The model depends only on w + theta_i, so both parts have the same gradient: SGD on the sum with the sum of the step
  sizes changes the parts in the ratio of the step sizes. Weight decay acts on the sum.
- Noise is added by the clients as in UDP-FedAvg and completed by the trusted server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.methods.disclosure import Earlier, LocalSteps, TrainingStart
from fedveil.methods.fields import STRICT, LearningRate
from fedveil.methods.method import At, register
from fedveil.methods.shared_model import Server
from fedveil.methods.user_level import CohortModel, NoisyModel, UserLevelAveraging
from fedveil.streams import ClientStreams
from fedveil.task import Task
from fedveil.tree import Params, State, add, concatenate, expand, norms, scale, sub, total, with_axis


@register(
    "ppsgd",
    "user-level DP on a shared part; a personal part is added to it on each client",
    server=Server,
    down=CohortModel,
    up=NoisyModel,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class PPSGD(UserLevelAveraging):
    remembers = True

    personal_lr: LearningRate = 0.1

    def init_client(self, task: Task, data: ClientData, rng: ClientStreams) -> State:
        shapes = task.init(0)
        return {name: leaf.new_zeros(data.count, *leaf.shape) for name, leaf in shapes.items()}

    def client_update(
        self, task: Task, at: At, down: CohortModel, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[NoisyModel, State]:
        both = replace(self, lr=self.lr + self.personal_lr)
        together = add(state, down.params)
        moved = sub(both.train(task, at, together, data, rng).params, together)
        shared = scale(moved, self.lr / both.lr)
        up = self.noisy_model(at, down, shared, rng)
        return up, add(state, moved, scale=self.personal_lr / both.lr)

    def personal_model(self, server: Server, state: State) -> Params:
        return add(state, with_axis(server.params))

    def local_training(self, at: At) -> LocalSteps:
        local = super().local_training(at)
        both = (self.lr + self.personal_lr) / self.lr
        return replace(local, lr=local.lr * both, share=local.share / both)

    def training_start(self, at: At, down: CohortModel, earlier: Earlier) -> TrainingStart:
        """Estimates theta_i, which is proportional to the sum of a client's uploads without their noise."""
        local = self.local_training(at)
        std = self.adaptation(at, 1, 1).noise * local.lr * local.share
        zero = {name: leaf[:1] for name, leaf in down.params.items()}
        part = self.personal_lr / (self.lr * self.server_lr)
        moves = [[sub(up.params, sent.params) for sent, up in rounds] for rounds in earlier()]
        theta = concatenate([_denoised(moved, zero, std, part) for moved in moves])
        return TrainingStart(add(expand(down.params, len(moves)), theta))


def _denoised(moves: Sequence[Params], like: Params, std: float, part: float) -> Params:
    """`part` of the sum of noisy `moves`, shrunk by the expected share of noise in its energy."""
    found = total(moves, like)
    noise = len(moves) * std**2 * sum(leaf.numel() for leaf in found.values())
    energy = float(norms(found).square())
    return scale(found, part * (max(0.0, 1 - noise / energy) if energy > 0 else 0.0))
