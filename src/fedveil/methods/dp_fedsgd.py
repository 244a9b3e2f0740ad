"""DP-FedSGD: one private gradient step of the whole federation in each round.

Abadi et al.: Deep Learning with Differential Privacy. CCS 2016, Algorithm 1, with the batch spread over silos;
McMahan et al.: Learning Differentially Private Recurrent Language Models. ICLR 2018 (DP-FedSGD, nominal denominators).
On data-independent features a linear model learns well from few large batches: Tramer, Boneh: Differentially
Private Learning Needs Better Features (or Much More Data). ICLR 2021.

Symbols: q `record_rate`, C `clip`, sigma `noise_multiplier`, beta `momentum`, eta `lr`, K the cohort, n_0 the nominal
number of records of a client: `records`, by default that of the smallest client.

Each client draws a Poisson batch of rate q, clips every record's gradient to C, adds noise sigma C to their sum and
sends it divided by q n_0. The server averages over the cohort, adds the mean to its velocity (beta) and takes a step.
Every client adds the full noise, so the server need not be trusted. Under secure aggregation the clients share the
noise sigma C of the sum. All divisors are part of the plan: none depends on the number of records in a batch or of
clients that answer.

Deviations: momentum is the server's, over noisy sums only, so it is post-processing. Clients with more than n_0 records
have more weight, as in the sum over all records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass as record
from typing import Annotated

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.messages import Message, Record
from fedveil.methods.disclosure import Adaptation, BoundedUpload, LocalSteps, UploadReading
from fedveil.methods.fields import STRICT, Clip, Fraction, LearningRate, LearningRateSchedule, NoiseMultiplier
from fedveil.methods.method import At, ClientSum, Method, register
from fedveil.methods.shared_model import Model
from fedveil.privacy.mechanisms import SumMechanism, Unnoised, gaussian
from fedveil.privacy.private_sum import NoisySum, private_sum
from fedveil.privacy.releases import ADVERSARIES, Plan, PostProcessing, Release
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Batch, Task
from fedveil.training.local_sgd import scheduled_lr
from fedveil.training.private_sgd import (
    clipped_sum,
    dropout_streams,
    poisson_batch,
    private_gradient,
    require_batch,
)
from fedveil.tree import Params, State, add, expand, scale, with_axis, zeros_like


@record(frozen=True)
class MomentumServer(Record):
    params: Params
    velocity: Params


@record(frozen=True)
class NoisyGradient(Message):
    gradient: Params


@register(
    "dp-fedsgd",
    "record-level DP: one clipped and noisy gradient sum of a Poisson batch per client and round, server momentum",
    server=MomentumServer,
    down=Model,
    up=NoisyGradient,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPFedSGD(Method[MomentumServer, Model, NoisyGradient]):
    lr: LearningRate = 1.0
    lr_schedule: LearningRateSchedule = "constant"
    momentum: Fraction = 0.9
    """Momentum of the server's steps."""
    record_rate: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Probability that a record is in the batch of a round."""
    clip: Clip = 1.0
    noise_multiplier: NoiseMultiplier = 1.0
    records: Annotated[int, Field(ge=1)] | None = None
    """Nominal number of records of a client, the divisor of sums; by default that of the smallest client."""

    @model_validator(mode="after")
    def _possible(self) -> DPFedSGD:
        if self.records is not None and self.record_rate * self.records < 1:
            raise InputError(
                "method.records",
                self.records,
                f"batches of rate {self.record_rate:g} would have less than one record on average",
                "Increase method.record_rate, or leave method.records out.",
            )
        return self

    def step_mechanism(self) -> SumMechanism:
        """Perturbs every client's sum; `releases` accounts for it."""
        return gaussian(self.clip, self.noise_multiplier)

    def nominal_batch(self, plan: Plan) -> float:
        """q n_0, the divisor of every client's sum."""
        return max(1.0, self.record_rate * (self.records or plan.records_per_client))

    def lr_at(self, at: At) -> float:
        return scheduled_lr(self.lr, self.lr_schedule, at.round, at.plan.rounds)

    def init_server(self, params: Params, plan: Plan) -> MomentumServer:
        return MomentumServer(params, zeros_like(params))

    def broadcast(self, at: At, server: MomentumServer, clients: Sequence[int]) -> Model:
        return Model(with_axis(server.params))

    def model(self, server: MomentumServer) -> Params:
        return server.params

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[NoisyGradient, State]:
        gradient = private_gradient(
            task,
            expand(down.params, data.count),
            self._batch(data, rng),
            torch.full((data.count,), self.nominal_batch(at.plan), dtype=torch.float64),
            self.step_mechanism(),
            rng.noise(),
            dropout_streams(rng),
            closed_form=not task.has_dropout,  # all networks draw dropout masks in the same way
        )
        return NoisyGradient(gradient), state

    def _batch(self, data: ClientData, rng: ClientStreams) -> Batch:
        require_batch(self.record_rate * data.largest, self.step_mechanism())
        # Amplification by sampling requires secret batches, so they are drawn from the noise streams.
        return poisson_batch(data, [self.record_rate] * data.count, rng.noise("sampling"))

    def client_sum(self) -> ClientSum[MomentumServer, Model]:
        return ClientSum(
            self.step_mechanism(),
            self._clipped_sum,
            self._after_sum,
            "the sum of all clients' clipped gradients",
            self.record_rate,
            self._reading,
        )

    def _clipped_sum(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Params, State]:
        """Each client's contribution to a secure sum; a record affects one clipped gradient in it."""
        total = clipped_sum(
            task,
            expand(down.params, data.count),
            self._batch(data, rng),
            self.clip,
            dropout_streams(rng),
            closed_form=not task.has_dropout,
        )
        return total, state

    def _after_sum(self, at: At, server: MomentumServer, total: NoisySum) -> MomentumServer:
        """The server after a sum that is not yet divided by the batch size."""
        return self._moved(at, server, total, self.nominal_batch(at.plan))

    def _reading(self, at: At, sent: Params, mean: Params) -> UploadReading:
        gradient = scale(mean, 1 / self.nominal_batch(at.plan))
        return UploadReading.of_gradient(sent, gradient, self.lr_at(at))

    def bounded_upload(self, at: At, down: Model, up: NoisyGradient) -> BoundedUpload:
        records = max(at.plan.largest_client, at.plan.records_per_client)
        divisor = self.nominal_batch(at.plan)
        return BoundedUpload.of_batch(up.gradient, self.step_mechanism(), divisor, self.record_rate, records)

    def server_update(
        self,
        task: Task,
        at: At,
        server: MomentumServer,
        clients: Sequence[int],
        up: NoisyGradient | None,
        rng: ServerStreams,
    ) -> MomentumServer:
        if up is None:
            return server
        summed = private_sum(up.gradient, server.params, len(clients), at.plan, Unnoised(), rng.noise("sum"))
        return self._moved(at, server, summed)

    def _moved(self, at: At, server: MomentumServer, total: NoisySum, divisor: float = 1.0) -> MomentumServer:
        velocity = total.added_to(scale(server.velocity, self.momentum), 1 / divisor)
        return MomentumServer(add(server.params, velocity, scale=-self.lr_at(at)), velocity)

    def releases(self, plan: Plan) -> Sequence[Release]:
        return (
            Release(
                "each client's noisy gradient sum",
                "record",
                ADVERSARIES,
                self.step_mechanism().protection(),
                rate=self.record_rate,
            ),
            Release("the model", "record", ADVERSARIES, PostProcessing("steps along the noisy sums")),
        )

    def round_training(self, at: At) -> LocalSteps:
        return LocalSteps(self.lr_at(at), None)  # in expectation a batch has the gradient of all records

    def adaptation(self, at: At, dimension: int, examples: int) -> Adaptation:
        return Adaptation.to_noise(self.step_mechanism().std / self.nominal_batch(at.plan))
