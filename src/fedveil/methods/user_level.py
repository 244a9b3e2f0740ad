"""User-level noise that the clients add: its size, its price, and the server half of methods that use it.

Symbols as in `udp_fedavg`: C `clip`, sigma `noise_multiplier`, K the size of the cohort (of Poisson cohorts p N is its
expectation, `plan.cohort`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass as record
from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.messages import Message
from fedveil.methods.disclosure import LocalSteps
from fedveil.methods.fields import STRICT, Clip, LocalTraining, NoiseMultiplier
from fedveil.methods.method import At, Method
from fedveil.methods.shared_model import Server
from fedveil.privacy.mechanisms import Gaussian, clip_rows
from fedveil.privacy.releases import (
    GaussianNoise,
    Plan,
    Protection,
    RandomGaussianNoise,
    Release,
    Unprotected,
)
from fedveil.privacy.sampling import cohort_sizes
from fedveil.streams import ClientStreams, ServerStreams, Stream
from fedveil.task import Task
from fedveil.tree import Params, add, expand, scale, with_axis, without_axis

NoiseScope = Literal["shared", "local"]
_MOST_DRAWS = 48


@record(frozen=True)
class CohortModel(Message):
    params: Params
    cohort: int
    """How many were asked to take part in this round."""


@record(frozen=True)
class NoisyModel(Message):
    params: Params
    cohort: int = 0
    """Among how many the client shared the noise, if that was announced to it."""


def sharers(plan: Plan, cohort: int = 0) -> int:
    """Among how many the noise of a sum is divided: the announced cohort, but never fewer than planned."""
    return max(cohort, plan.clients if plan.sampler == "all" else plan.cohort)


def upload_multiplier(sigma: float, scope: NoiseScope, plan: Plan, cohort: int = 0) -> float:
    """The noise of one upload in units of the clip, in a cohort of this announced size."""
    return sigma / math.sqrt(sharers(plan, cohort)) if scope == "shared" else sigma


def sum_multiplier(sigma: float, scope: NoiseScope, plan: Plan, cohort: int = 0) -> float:
    """The noise of the sum in units of the clip: of the uploads and what the server adds for those who are missing."""
    return sigma if scope == "shared" else sigma * math.sqrt(sharers(plan, cohort))


def missing_noise(sigma: float, scope: NoiseScope, plan: Plan, present: int, cohort: int = 0) -> float:
    """What the server must add to a sum of `present` uploads, in units of the clip, to reach `sum_multiplier`."""
    absent = max(0, sharers(plan, cohort) - present)
    return upload_multiplier(sigma, scope, plan, cohort) * math.sqrt(absent)


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


def noise_of_cohort(
    multiplier: Callable[[int], float], clip: float, plan: Plan, *, present: int = 1
) -> Protection:
    """Clipping and Gaussian noise of `multiplier(K)`, K the size of a cohort in which `present` given clients are.

    The size of a Poisson cohort is random, independent of the data and known to those who are told it.
    """
    if plan.sampler != "poisson":
        return gaussian_or_nothing(multiplier(sharers(plan)), clip)
    weights: dict[float, float] = {}
    for size, weight in cohort_sizes(plan, min(present, plan.clients)):
        weights[multiplier(size)] = weights.get(multiplier(size), 0.0) + weight
    least = gaussian_or_nothing(min(weights), clip)
    if len(weights) == 1 or isinstance(least, Unprotected):
        return least
    drawn = list(weights.items())
    group = math.ceil(len(drawn) / _MOST_DRAWS)  # neighbours count as the one with the least noise
    groups = [drawn[i : i + group] for i in range(0, len(drawn), group)]
    return RandomGaussianNoise(
        tuple(min(value for value, _ in part) for part in groups),
        tuple(math.fsum(weight for _, weight in part) for part in groups),
    )


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
    cohort: int = 0,
) -> Params:
    """`start` plus the summed updates over the planned cohort, with the declared noise whoever came.

    `cohort` is the size that was announced to the clients, if it was. A fixed cohort that lost clients is divided
    by those who came; the noise is topped up all the same.
    """
    divisor = at.plan.cohort if at.plan.sampler == "poisson" or present == 0 else present
    total = {name: leaf * 0 for name, leaf in with_axis(start).items()}
    if up is not None:
        total = {name: leaf.sum(0, keepdim=True) - present * start[name] for name, leaf in up.items()}
        total = scale(total, 1 / server_lr)
    missing = missing_noise(sigma, scope, at.plan, present, cohort)
    if missing > 0 and math.isfinite(clip):
        total = Gaussian(clip, missing).perturb(total, [rng.noise("top-up")])
    return add(start, without_axis(total), scale=server_lr / divisor)


def _noise_of_others(sigma: float, scope: NoiseScope, plan: Plan, cohort: int) -> float:
    """What is left of a sum's noise to a client who knows the share it added itself."""
    share = upload_multiplier(sigma, scope, plan, cohort)
    return share * math.sqrt(sharers(plan, cohort) - 1)


def upload_and_mean(sigma: float, scope: NoiseScope, clip: float, plan: Plan) -> tuple[Release, Release]:
    """What a run discloses: each noisy upload to the server, their mean to everybody else.

    A client that was in the cohort knows its own share of the mean's noise: 1 / max(K, p N) of its variance. Where
    the cohort has one client only, nobody else's data is in the sum.
    """
    upload = noise_of_cohort(partial(upload_multiplier, sigma, scope, plan), clip, plan)
    total = noise_of_cohort(partial(sum_multiplier, sigma, scope, plan), clip, plan)
    insider = None
    if plan.clients > 1 and (plan.sampler == "poisson" or sharers(plan) > 1):
        insider = noise_of_cohort(partial(_noise_of_others, sigma, scope, plan), clip, plan, present=2)
    betrayed = isinstance(total, RandomGaussianNoise)  # the noise's size shows how many came
    return (
        Release("each client's noisy model", "client", ("server",), upload),
        Release(
            "the averaged model",
            "client",
            ("observer", "client"),
            total,
            participation="seen" if betrayed else "hidden",
            insider=insider,
        ),
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class UserLevelAveraging(LocalTraining, Method[Server, CohortModel, NoisyModel]):
    """Clients send models with a clipped and noisy update, the server averages them and completes the noise."""

    remembers: ClassVar[bool] = False
    """Whether what a client sends depends on the rounds it took part in before."""

    clip: Clip = 1.0
    noise_multiplier: NoiseMultiplier = 1.0
    noise_scope: NoiseScope = "shared"
    server_lr: Annotated[float, Field(gt=0)] = 1.0

    def init_server(self, params: Params, plan: Plan) -> Server:
        return Server(params)

    def broadcast(self, at: At, server: Server, clients: Sequence[int]) -> CohortModel:
        return CohortModel(with_axis(server.params), len(clients))

    def noisy_model(self, at: At, down: CohortModel, update: Params, rng: ClientStreams) -> NoisyModel:
        """What K clients send: the model they were sent plus their clipped and noisy `update [K, ...]`."""
        multiplier = upload_multiplier(self.noise_multiplier, self.noise_scope, at.plan, down.cohort)
        noisy = clip_and_noise(update, self.clip, multiplier, rng.noise())
        start = expand(down.params, len(rng.clients))
        return NoisyModel(add(start, noisy, scale=self.server_lr), down.cohort)

    def averaged(
        self, at: At, start: Params, clients: Sequence[int], up: NoisyModel | None, rng: ServerStreams
    ) -> Params:
        """The model after a cohort that was sent `start`."""
        return private_mean(
            start,
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

    def server_update(
        self,
        task: Task,
        at: At,
        server: Server,
        clients: Sequence[int],
        up: NoisyModel | None,
        rng: ServerStreams,
    ) -> Server:
        return Server(self.averaged(at, server.params, clients, up, rng))

    def model(self, server: Server) -> Params:
        return server.params

    def releases(self, plan: Plan) -> Sequence[Release]:
        upload, averaged = upload_and_mean(self.noise_multiplier, self.noise_scope, self.clip, plan)
        if self.remembers and plan.sampler == "fixed":
            # Later rounds tell of earlier cohorts, and of one of known size the others give the last member away.
            averaged = replace(averaged, participation="seen")
        return upload, averaged

    def local_training(self, at: At) -> LocalSteps:
        local = replace(super().local_training(at), share=self.server_lr)
        return local.clipped(self.clip * self.server_lr)
