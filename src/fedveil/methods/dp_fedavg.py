"""DP-FedAvg: averaging under differential privacy, the noise added by the server or by each client.

McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models. ICLR 2018 (client
level, fixed-denominator estimator with equal weights). The record-level form trains every client by DP-SGD:
Truex et al.: A Hybrid Approach to Privacy-Preserving Federated Learning. AISec 2019.

Symbols: C `clip`, z `noise_multiplier`, K `plan.cohort`, E `epochs`, B `batch_size`, eta `lr`, q `record_rate`.

`unit = "client"`:
- `noise_scope = "central"`: clients send clipped updates without noise; the server, which observes them and is
  trusted, adds noise z C to their sum.
- `noise_scope = "local"`: each client adds noise z C itself; the server is not trusted. The cohort's size is announced
  to it, so that the server knows which noise is missing from the sum.
- `normalise`: every update is scaled to a norm of exactly C, as in `user_level`.
`unit = "record"`: E / q steps of DP-SGD in each participation, each on a fresh Poisson batch of rate q: every
example's gradient is clipped to C, noise z C is added to their sum, which is divided by q n_k. The sizes n_k
and the rate count as public. Adversaries observe only protected models.

Deviations: momentum and weight decay do not exist for records. Without noise and clip it is FedAvg with equal
weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as record
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.errors import InputError
from fedveil.messages import Message
from fedveil.methods.disclosure import Adaptation, BoundedUpload, LocalSteps
from fedveil.methods.fields import (
    STRICT,
    Clip,
    LocalTraining,
    NoiseMultiplier,
    Normalise,
    bounded,
    refuse_endless_norm,
    without_local_noise,
)
from fedveil.methods.method import At, ClientSum, Method, register
from fedveil.methods.shared_model import Server
from fedveil.methods.user_level import CohortModel
from fedveil.privacy.mechanisms import SumMechanism, Unnoised, gaussian
from fedveil.privacy.private_sum import CohortNoise, NoisySum, exact_total, private_sum
from fedveil.privacy.releases import ADVERSARIES, Plan, Release
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.training.private_sgd import PoissonBatches, StepStreams, dropout_streams, private_sgd
from fedveil.tree import Params, State, expand, sub, with_axis


@record(frozen=True)
class Update(Message):
    update: Params
    cohort: int = 0
    """The size of the cohort, if that was announced to the client."""


@register(
    "dp-fedavg",
    "averaging under client-level or record-level DP, noise from the server or the clients",
    server=Server,
    down=CohortModel,
    up=Update,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPFedAvg(LocalTraining, Method[Server, CohortModel, Update]):
    unit: Literal["client", "record"] = "client"
    """Who is protected: a whole client, or each record, by DP-SGD inside the client."""
    clip: Clip = 1.0
    noise_multiplier: NoiseMultiplier = 1.0
    noise_scope: Literal["central", "local"] = "central"
    """Who adds the noise to clients' updates: the server, which is trusted ("central"), or each client ("local")."""
    record_rate: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Probability that a record is in a batch, where unit = "record"."""
    normalise: Normalise = False

    @model_validator(mode="after")
    def _possible(self) -> DPFedAvg:
        if self.unit == "record" and (self.momentum or self.weight_decay):
            raise InputError(
                "method.momentum",
                self.momentum,
                "DP-SGD here is plain SGD",
                "Use 0 for both, or unit = client.",
            )
        if self.unit == "record":
            self.refuse_local_steps()
        if self.unit == "record" and self.normalise:
            raise InputError(
                "method.normalise",
                self.normalise,
                "scales the updates of clients, not the gradients of records",
                'Leave it out, or use unit = "client".',
            )
        refuse_endless_norm(self.clip, self.normalise)
        return self

    def unused_fields(self) -> Mapping[str, str]:
        if self.unit == "client":
            rate = 'Leave it out, or set unit = "record"; batch_size sets the batches here.'
            return {**super().unused_fields(), "record_rate": rate}
        return {
            "last_batch": 'Leave it out: with unit = "record" every batch is a Poisson sample.',
            "batch_size": "Leave it out: record_rate is the part of a client's records in a batch.",
            "noise_scope": 'Leave it out: with unit = "record" every client adds its noise itself.',
        }

    def steps(self) -> int:
        """Noisy steps of one participation, `unit = "record"`."""
        return max(1, round(self.epochs / self.record_rate))

    def noise(self, plan: Plan) -> CohortNoise:
        """The noise of clients and server; `releases` accounts for it, `unit = "client"`."""
        return CohortNoise(self.clip, self.noise_multiplier, self.noise_scope, plan)

    def step_mechanism(self) -> SumMechanism:
        """Perturbs every private step; `releases` accounts for it, `unit = "record"`."""
        return gaussian(self.clip, self.noise_multiplier)

    def init_server(self, params: Params, plan: Plan) -> Server:
        return Server(params)

    def broadcast(self, at: At, server: Server, clients: Sequence[int]) -> CohortModel:
        shared = self.unit == "client" and self.noise_scope == "local"
        return CohortModel(with_axis(server.params), len(clients) if shared else 0)

    def model(self, server: Server) -> Params:
        return server.params

    def client_update(
        self, task: Task, at: At, down: CohortModel, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Update, State]:
        if self.unit == "record":
            return Update(sub(self._dp_sgd(task, at, down.params, data, rng), down.params)), state
        update, after = self._contribution(task, at, down, data, state, rng)
        upload = self.noise(at.plan).upload(down.cohort)
        return Update(upload(update, rng.noise()), down.cohort), after

    def _contribution(
        self, task: Task, at: At, down: CohortModel, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Params, State]:
        """Each client's contribution before clipping, `unit = "client"`."""
        update = sub(self.train(task, at, down.params, data, rng).params, down.params)
        return bounded(update, self.clip, self.normalise), state

    def client_sum(self) -> ClientSum[Server, CohortModel]:
        if self.unit == "record":
            raise InputError(
                "method.unit",
                self.unit,
                "each client's local steps carry all of their noise already, so a sum has none to divide",
                'Use "client", or aggregation.kind = "plain".',
            )
        without_local_noise(self.noise_scope, "central")
        return ClientSum(gaussian(self.clip, self.noise_multiplier), self._contribution, _after_sum)

    def bounded_upload(self, at: At, down: CohortModel, up: Update) -> BoundedUpload | None:
        if self.unit == "record":
            return None
        return BoundedUpload.of_values(up.update, self.noise(at.plan).upload(down.cohort))

    def exact_sum(self, at: At, down: CohortModel, up: Update) -> Update | None:
        if self.unit == "record":
            return None
        total = exact_total(up.update, self.noise(at.plan).upload(down.cohort))
        return None if total is None else Update(total, up.cohort)

    def _dp_sgd(self, task: Task, at: At, start: Params, data: ClientData, rng: ClientStreams) -> Params:
        """Each client's model after `steps()` noisy steps; a client without examples adds noise only."""
        return private_sgd(
            task,
            expand(start, data.count),
            data,
            # Amplification by sampling requires secret batches, so they are drawn from the noise streams.
            StepStreams(rng.noise("sampling"), rng.noise(), dropout_streams(rng)),
            PoissonBatches.of_rate(data.sizes.tolist(), self.record_rate, self.steps()),
            self.step_mechanism(),
            lr=self.lr_at(at),
            closed_form=not task.has_dropout,  # all networks draw dropout masks in the same way
        )

    def server_update(
        self,
        task: Task,
        at: At,
        server: Server,
        clients: Sequence[int],
        up: Update | None,
        rng: ServerStreams,
    ) -> Server:
        if up is None and self.unit == "record":
            return server
        summed = private_sum(
            None if up is None else up.update,
            server.params,
            len(clients),
            at.plan,
            self._top_up(at.plan, len(clients), 0 if up is None else up.cohort),
            rng.noise("sum"),
        )
        return Server(summed.added_to(server.params))

    def _top_up(self, plan: Plan, present: int, cohort: int) -> SumMechanism:
        """The noise that the server adds to the sum."""
        return Unnoised() if self.unit == "record" else self.noise(plan).top_up(present, cohort)

    def releases(self, plan: Plan) -> Sequence[Release]:
        if self.unit == "record":
            return (
                Release(
                    "the noisy gradients behind each client's update",
                    "record",
                    ADVERSARIES,
                    self.step_mechanism().protection(),
                    accesses=self.steps(),
                    rate=self.record_rate,
                ),
            )
        upload, averaged = self.noise(plan).releases()
        return replace(upload, what="each client's clipped update"), averaged

    def local_training(self, at: At) -> LocalSteps:
        if self.unit == "record":
            return LocalSteps(self.lr_at(at), None, steps=self.steps())  # on average every step reads all
        return super().local_training(at).clipped(self.clip)

    def adaptation(self, at: At, dimension: int, examples: int) -> Adaptation:
        if self.unit == "client":
            return super().adaptation(at, dimension, examples)
        std = self.step_mechanism().std * math.sqrt(self.steps())
        return Adaptation.to_noise(std / max(1.0, self.record_rate * examples))


def _after_sum(_at: At, server: Server, total: NoisySum) -> Server:
    return Server(total.added_to(server.params))
