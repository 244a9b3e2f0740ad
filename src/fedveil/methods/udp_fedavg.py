"""UDP-FedAvg: averaging under user-level differential privacy, noise added by the clients.

Algorithm 1 of Li et al.: Clients Collaborate: Flexible Differentially Private Federated Learning with Guaranteed
Improvement of Utility-Privacy Trade-off. ICML 2025.

Symbols: C `clip`, sigma `noise_multiplier`, K `plan.cohort`, E `epochs`, B `batch_size`, eta `lr`.

Deviations:
- Line 10 multiplies update and noise by eta once more; here by `server_lr`, 1 by default, since the update is
  already a difference of models.
- `noise_scope = "local"`: each client adds the full sigma C, so that its upload alone is protected; the paper's
  `"shared"` adds sigma C / sqrt(K), and only the sum of K uploads carries sigma C.
- Poisson cohorts: the summed updates are divided by the constant K = p N, never by the number who came. Noise
  missing because fewer came (even nobody) is topped up by the server, which is trusted for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass as record
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.messages import Message
from fedveil.methods.fedavg import Model, Server
from fedveil.methods.fields import STRICT, Clip, LocalTraining, NoiseMultiplier
from fedveil.methods.method import At, Method, register
from fedveil.privacy.mechanisms import Gaussian, clip_rows
from fedveil.privacy.releases import GaussianNoise, Plan, Protection, Release, Unprotected
from fedveil.streams import ClientStreams, ServerStreams, Stream
from fedveil.task import Task
from fedveil.tree import Params, State, add, expand, scale, sub, with_axis, without_axis

NoiseScope = Literal["shared", "local"]


@record(frozen=True)
class NoisyModel(Message):
    params: Params


def upload_multiplier(sigma: float, scope: NoiseScope, plan: Plan) -> float:
    """The noise of one upload in units of the clip."""
    return sigma / math.sqrt(plan.cohort) if scope == "shared" else sigma


def missing_noise(sigma: float, scope: NoiseScope, plan: Plan, present: int) -> float:
    """What the server must add to a sum of `present` uploads, in units of the clip, to reach the declared noise."""
    declared = sum_multiplier(sigma, scope, plan)
    there = upload_multiplier(sigma, scope, plan) * math.sqrt(present)
    return math.sqrt(max(0.0, declared**2 - there**2))


def sum_multiplier(sigma: float, scope: NoiseScope, plan: Plan) -> float:
    """The noise of the sum of K uploads in units of the clip."""
    return upload_multiplier(sigma, scope, plan) * math.sqrt(plan.cohort)


def clip_and_noise(update: Params, clip: float, multiplier: float, streams: Sequence[Stream]) -> Params:
    """Each client's update clipped to `clip`, plus Gaussian noise of `multiplier * clip` unless switched off."""
    if multiplier > 0 and math.isfinite(clip):
        return Gaussian(clip, multiplier)(update, streams)
    return clip_rows(update, clip) if math.isfinite(clip) else update


def gaussian_or_nothing(multiplier: float, clip: float) -> Protection:
    """The protection of clipping and Gaussian noise; none if either is switched off."""
    if multiplier == 0:
        return Unprotected("no noise is added (noise_multiplier = 0)")
    if math.isinf(clip):
        return Unprotected("contributions are not clipped (clip = inf)")
    return GaussianNoise(multiplier)


def private_mean(
    start: Params,
    up: Params | None,
    present: int,
    at: At,
    *,
    clip: float,
    sigma: float,
    scope: NoiseScope,
    server_lr: float,
    rng: ServerStreams,
) -> Params:
    """`start` plus the summed updates over the constant K, with the declared noise whoever came.

    A fixed cohort that lost clients is divided by those who came; the noise is topped up all the same.
    """
    divisor = at.plan.cohort if at.plan.sampler == "poisson" or present == 0 else present
    total = {name: leaf * 0 for name, leaf in with_axis(start).items()}
    if up is not None:
        total = {name: leaf.sum(0, keepdim=True) - present * start[name] for name, leaf in up.items()}
        total = scale(total, 1 / server_lr)
    missing = missing_noise(sigma, scope, at.plan, present)
    if missing > 0 and math.isfinite(clip):
        total = Gaussian(clip, missing).perturb(total, [rng.noise("top-up")])
    return add(start, without_axis(total), scale=server_lr / divisor)


def upload_and_mean(sigma: float, scope: NoiseScope, clip: float, plan: Plan) -> tuple[Release, Release]:
    """What a run discloses: each noisy upload to the server, their mean to everybody else."""
    upload, total = upload_multiplier(sigma, scope, plan), sum_multiplier(sigma, scope, plan)
    return (
        Release("each client's noisy model", "client", ("server",), gaussian_or_nothing(upload, clip)),
        Release(
            "the averaged model",
            "client",
            ("observer", "client"),
            gaussian_or_nothing(total, clip),
            participation="hidden",
        ),
    )


@register(
    "udp-fedavg",
    "averaging under user-level DP: clipped updates, Gaussian noise from the clients",
    server=Server,
    down=Model,
    up=NoisyModel,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class UDPFedAvg(LocalTraining, Method[Server, Model, NoisyModel]):
    clip: Clip = 1.0
    noise_multiplier: NoiseMultiplier = 1.0
    noise_scope: NoiseScope = "shared"
    server_lr: Annotated[float, Field(gt=0)] = 1.0

    def init_server(self, params: Params, plan: Plan) -> Server:
        return Server(params)

    def broadcast(self, at: At, server: Server, clients: Sequence[int]) -> Model:
        return Model(with_axis(server.params))

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[NoisyModel, State]:
        trained = self.train(task, at, down.params, data, rng)
        multiplier = upload_multiplier(self.noise_multiplier, self.noise_scope, at.plan)
        update = clip_and_noise(sub(trained.params, down.params), self.clip, multiplier, rng.noise())  # 8-10
        start = expand(down.params, data.count)
        return NoisyModel(add(start, update, scale=self.server_lr)), state

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
            private_mean(  # line 7
                server.params,
                None if up is None else up.params,
                len(clients),
                at,
                clip=self.clip,
                sigma=self.noise_multiplier,
                scope=self.noise_scope,
                server_lr=self.server_lr,
                rng=rng,
            )
        )

    def model(self, server: Server) -> Params:
        return server.params

    def releases(self, plan: Plan) -> Sequence[Release]:
        return upload_and_mean(self.noise_multiplier, self.noise_scope, self.clip, plan)

    def paper_claim(self, plan: Plan) -> str | None:
        return "user-level (epsilon, delta)-DP with sigma = O(q sqrt(T log(1/delta)) / epsilon), no constant given"
