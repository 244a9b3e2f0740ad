"""Averaging with user-level noise added by the clients: both halves of the methods that use it.

Symbols as in `udp_fedavg`: C `clip`, sigma `noise_multiplier`. `normalise` scales every update to a norm of exactly
C (zero stays zero), which improves the signal-to-noise ratio of short updates; the sensitivity stays C.
The noise itself is in `privacy/private_sum.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass as record
from dataclasses import replace
from typing import ClassVar

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from fedveil.messages import Message
from fedveil.methods.disclosure import BoundedUpload, LocalSteps
from fedveil.methods.fields import (
    STRICT,
    Clip,
    LocalTraining,
    NoiseMultiplier,
    Normalise,
    ServerLearningRate,
    bounded,
    refuse_endless_norm,
)
from fedveil.methods.method import At, Method
from fedveil.methods.shared_model import Server
from fedveil.privacy.private_sum import CohortNoise, NoiseScope, exact_total, noisy_models, private_sum
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.tree import Params, expand, with_axis


@record(frozen=True)
class CohortModel(Message):
    """The model that a cohort is sent.

    Args:
        params: Leaves `[K, ...]`.
        cohort: The number of clients invited to this round.
    """

    params: Params
    cohort: int


@record(frozen=True)
class NoisyModel(Message):
    """Models with a clipped and noisy update.

    Args:
        params: Leaves `[K, ...]`.
        cohort: The number of clients that share the noise, if it was announced.
    """

    params: Params
    cohort: int = 0


@record(frozen=True)
class SummedUpdates(Message):
    """The sum of the noisy updates of several clients, in place of their models."""

    update: Params
    cohort: int


@dataclass(frozen=True, kw_only=True, config=STRICT)
class UserLevelAveraging(LocalTraining, Method[Server, CohortModel, NoisyModel]):
    """Clients send models with a clipped and noisy update, the server averages them and completes the noise."""

    remembers: ClassVar[bool] = False
    """Whether a client's upload depends on its earlier participations."""

    clip: Clip = 1.0
    noise_multiplier: NoiseMultiplier = 1.0
    noise_scope: NoiseScope = "shared"
    """Whether each client adds a share of the noise of the sum ("shared"), or all of it, which also protects against
    the server ("local")."""
    server_lr: ServerLearningRate = 1.0
    normalise: Normalise = False

    @model_validator(mode="after")
    def _has_a_norm(self) -> UserLevelAveraging:
        refuse_endless_norm(self.clip, self.normalise)
        return self

    def noise(self, plan: Plan) -> CohortNoise:
        """The noise of clients and server; `releases` accounts for it."""
        return CohortNoise(self.clip, self.noise_multiplier, self.noise_scope, plan)

    def init_server(self, params: Params, plan: Plan) -> Server:
        return Server(params)

    def broadcast(self, at: At, server: Server, clients: Sequence[int]) -> CohortModel:
        return CohortModel(with_axis(server.params), len(clients))

    def noisy_model(self, at: At, down: CohortModel, update: Params, rng: ClientStreams) -> NoisyModel:
        """The uploads: the broadcast model plus the clipped and noisy `update [K, ...]`."""
        update = bounded(update, self.clip, self.normalise)
        upload, start = self.noise(at.plan).upload(down.cohort), expand(down.params, len(rng.clients))
        return NoisyModel(noisy_models(upload, start, update, rng.noise(), self.server_lr), down.cohort)

    def bounded_upload(self, at: At, down: CohortModel, up: NoisyModel) -> BoundedUpload:
        mechanism = self.noise(at.plan).upload(down.cohort)
        return BoundedUpload.of_models(up.params, down.params, mechanism, self.server_lr)

    def exact_sum(self, at: At, down: CohortModel, up: NoisyModel) -> SummedUpdates | None:
        upload = self.noise(at.plan).upload(down.cohort)
        total = exact_total(up.params, upload, start=down.params, lr=self.server_lr)
        return None if total is None else SummedUpdates(total, up.cohort)

    def averaged(
        self,
        at: At,
        start: Params,
        clients: Sequence[int],
        up: NoisyModel | SummedUpdates | None,
        rng: ServerStreams,
    ) -> Params:
        """The model after the answers of a cohort that was sent `start`."""
        asked = 0 if up is None else up.cohort
        models = up.params if isinstance(up, NoisyModel) else None
        summed = private_sum(
            up.update if isinstance(up, SummedUpdates) else models,
            start,
            len(clients),
            at.plan,
            self.noise(at.plan).top_up(len(clients), asked),
            rng.noise("top-up"),
            upload=self.noise(at.plan).upload(asked),
            start=None if models is None else with_axis(start),
            lr=self.server_lr,
        )
        return summed.added_to(start, self.server_lr)

    def server_update(
        self,
        task: Task,
        at: At,
        server: Server,
        clients: Sequence[int],
        up: NoisyModel | SummedUpdates | None,
        rng: ServerStreams,
    ) -> Server:
        return Server(self.averaged(at, server.params, clients, up, rng))

    def model(self, server: Server) -> Params:
        return server.params

    def releases(self, plan: Plan) -> Sequence[Release]:
        upload, averaged = self.noise(plan).releases()
        if self.remembers and plan.sampler == "fixed":
            # Later rounds disclose earlier cohorts; if the cohort size is known, the other members identify the last.
            averaged = replace(averaged, participation="seen")
        return upload, averaged

    def local_training(self, at: At) -> LocalSteps:
        local = replace(super().local_training(at), share=self.server_lr)
        return local.clipped(self.clip * self.server_lr)
