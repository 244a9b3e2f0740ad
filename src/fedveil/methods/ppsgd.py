"""PPSGD: each client's model is a shared part plus a personal part that never leaves it.

Bietti, Wei, Dudik, Langford, Wu: Personalization Improves Privacy-Accuracy Tradeoffs in Federated Learning.
ICML 2022, Algorithm 1 for additive models.

Symbols: w `Server.params`, theta_i the client's state, alpha `personal_lr` / `lr`, C `clip`,
sigma `noise_multiplier`, K `plan.cohort`.

Deviations:
- The paper's step is one stochastic gradient; here a participation is `epochs` of local SGD on both parts and what
  is clipped and sent is the change of the shared part. One epoch of one batch is the paper's step.
- The model depends on w + theta_i only, so both parts have the same gradient: SGD on the sum with the two step
  sizes added moves the parts in the ratio of the step sizes. Weight decay acts on the sum.
- Noise is added by the clients as in UDP-FedAvg, which the trusted server completes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.methods.fields import STRICT, Clip, LearningRate, LocalTraining, NoiseMultiplier
from fedveil.methods.method import At, Method, register
from fedveil.methods.shared_model import Server
from fedveil.methods.udp_fedavg import (
    CohortModel,
    NoiseScope,
    NoisyModel,
    clip_and_noise,
    private_mean,
    upload_and_mean,
    upload_multiplier,
)
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.tree import Params, State, add, expand, scale, sub, with_axis


@register(
    "ppsgd",
    "user-level DP on a shared part; a personal part is added to it on each client",
    server=Server,
    down=CohortModel,
    up=NoisyModel,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class PPSGD(LocalTraining, Method[Server, CohortModel, NoisyModel]):
    personal_lr: LearningRate = 0.1
    clip: Clip = 1.0
    noise_multiplier: NoiseMultiplier = 1.0
    noise_scope: NoiseScope = "shared"
    server_lr: Annotated[float, Field(gt=0)] = 1.0

    def init_server(self, params: Params, plan: Plan) -> Server:
        return Server(params)

    def init_client(self, task: Task, data: ClientData, rng: ClientStreams) -> State:
        shapes = task.init(0)
        return {name: leaf.new_zeros(data.count, *leaf.shape) for name, leaf in shapes.items()}

    def broadcast(self, at: At, server: Server, clients: Sequence[int]) -> CohortModel:
        return CohortModel(with_axis(server.params), len(clients))

    def client_update(
        self, task: Task, at: At, down: CohortModel, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[NoisyModel, State]:
        both = replace(self, lr=self.lr + self.personal_lr)
        together = add(state, down.params)
        moved = sub(both.train(task, at, together, data, rng).params, together)
        shared = scale(moved, self.lr / both.lr)
        multiplier = upload_multiplier(self.noise_multiplier, self.noise_scope, at.plan, down.cohort)
        noisy = clip_and_noise(shared, self.clip, multiplier, rng.noise())
        start = expand(down.params, data.count)
        up = NoisyModel(add(start, noisy, scale=self.server_lr), down.cohort)
        return up, add(state, moved, scale=self.personal_lr / both.lr)

    def server_update(
        self,
        task: Task,
        at: At,
        server: Server,
        clients: Sequence[int],
        up: NoisyModel | None,
        rng: ServerStreams,
    ) -> Server:
        return Server(
            private_mean(
                server.params,
                None if up is None else up.params,
                len(clients),
                at,
                clip=self.clip,
                sigma=self.noise_multiplier,
                scope=self.noise_scope,
                server_lr=self.server_lr,
                rng=rng,
                cohort=0 if up is None else up.cohort,
            )
        )

    def model(self, server: Server) -> Params:
        return server.params

    def personal_model(self, server: Server, state: State) -> Params:
        return add(state, with_axis(server.params))

    def releases(self, plan: Plan) -> Sequence[Release]:
        return upload_and_mean(self.noise_multiplier, self.noise_scope, self.clip, plan)
