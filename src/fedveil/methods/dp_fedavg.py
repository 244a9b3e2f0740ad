"""DP-FedAvg: averaging under differential privacy, the noise added by the server or by each client.

McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models. ICLR 2018 (client
level, fixed-denominator estimator with equal weights). The record-level form trains every client by DP-SGD:
Truex et al.: A Hybrid Approach to Privacy-Preserving Federated Learning. AISec 2019.

Symbols: C `clip`, z `noise_multiplier`, K `plan.cohort`, E `epochs`, B `batch_size`, eta `lr`, q `record_rate`.

`unit = "client"`:
- `noise_scope = "central"`: clients send clipped updates as they are; the server, which sees them and is trusted,
  adds noise z C to their sum.
- `noise_scope = "local"`: each client adds noise z C itself; the server is not trusted. The cohort is told its size, so
  that the server knows whose noise is missing from the sum.
`unit = "record"`: E / q steps of DP-SGD in each participation, each on a fresh Poisson batch of rate q: every
example's gradient is clipped to C, noise z C is added to their sum, which is divided by q n_k. The sizes n_k
and the rate count as public. All adversaries see only models that are protected already.

Deviations: momentum and weight decay do not exist for records. Without noise and clip it is FedAvg with equal
weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass as record
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.errors import InputError
from fedveil.messages import Message
from fedveil.methods.disclosure import Adaptation, LocalSteps
from fedveil.methods.fields import STRICT, Clip, LocalTraining, NoiseMultiplier
from fedveil.methods.method import At, Method, register
from fedveil.methods.shared_model import Server
from fedveil.methods.user_level import (
    CohortModel,
    clip_and_noise,
    gaussian_or_nothing,
    missing_noise,
    upload_and_mean,
)
from fedveil.privacy.mechanisms import Gaussian, add_noise
from fedveil.privacy.releases import ADVERSARIES, Plan, Release, Unprotected
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.training.per_example import clipped_gradient_sum
from fedveil.tree import Params, State, add, scale, sub, with_axis, without_axis, zeros_like


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
    clip: Clip = 1.0
    noise_multiplier: NoiseMultiplier = 1.0
    noise_scope: Literal["central", "local"] = "central"
    record_rate: Annotated[float, Field(gt=0, le=1)] = 0.1

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
        return self

    def steps(self) -> int:
        """Noisy steps of one participation, `unit = "record"`."""
        return max(1, round(self.epochs / self.record_rate))

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
        update = sub(self.train(task, at, down.params, data, rng).params, down.params)
        own = self.noise_multiplier if self.noise_scope == "local" else 0.0
        return Update(clip_and_noise(update, self.clip, own, rng.noise()), down.cohort), state

    def _dp_sgd(self, task: Task, at: At, start: Params, data: ClientData, rng: ClientStreams) -> Params:
        """Each client's model after `steps()` noisy steps; a client without examples adds noise only."""
        lr = self.lr_at(at)
        trained = []
        # Who is in a batch must stay secret for sampling to amplify privacy: it is drawn like noise. So must dropout's
        # masks, which go by place in the batch: one record less moves those of the others.
        batches, noise = rng.noise("sampling"), rng.noise()
        dropout = rng.unknown_to_server(rng.of_round("dropout"))
        for row, size in enumerate(data.sizes.tolist()):
            w = {name: leaf[row if leaf.shape[0] > 1 else 0] for name, leaf in start.items()}
            for _ in range(self.steps()):
                drawn = torch.from_numpy(np.flatnonzero(batches[row].random(size) < self.record_rate))
                total = zeros_like(w)
                if len(drawn):
                    x, y = data.x[row].index_select(0, drawn), data.y[row].index_select(0, drawn)
                    total, _ = clipped_gradient_sum(
                        task.module, w, x, y, self.clip, loss=task.example_loss, dropout=dropout[row]
                    )
                if self.noise_multiplier > 0 and math.isfinite(self.clip):
                    std = self.noise_multiplier * self.clip
                    total = without_axis(add_noise(with_axis(total), std, [noise[row]]))
                w = add(w, total, scale=-lr / max(1.0, self.record_rate * size))
            trained.append(w)
        return {name: torch.stack([w[name] for w in trained]) for name in start}

    def server_update(
        self,
        task: Task,
        at: At,
        server: Server,
        clients: Sequence[int],
        up: Update | None,
        rng: ServerStreams,
    ) -> Server:
        present = len(clients)
        if up is None and self.unit == "record":
            return server
        divisor = at.plan.cohort if at.plan.sampler == "poisson" or present == 0 else present
        total = with_axis(zeros_like(server.params))
        if up is not None:
            total = {name: leaf.sum(0, keepdim=True) for name, leaf in up.update.items()}
        missing = self._missing(at.plan, present, 0 if up is None else up.cohort)
        if missing > 0 and math.isfinite(self.clip):
            total = Gaussian(self.clip, missing).perturb(total, [rng.noise("sum")])
        return Server(add(server.params, scale(without_axis(total), 1 / divisor)))

    def _missing(self, plan: Plan, present: int, cohort: int) -> float:
        """The noise that the server owes to the sum, in units of the clip."""
        if self.unit == "record":
            return 0.0
        if self.noise_scope == "central":
            return self.noise_multiplier
        return missing_noise(self.noise_multiplier, "local", plan, present, cohort)

    def releases(self, plan: Plan) -> Sequence[Release]:
        if self.unit == "record":
            return (
                Release(
                    "the noisy gradients behind each client's update",
                    "record",
                    ADVERSARIES,
                    gaussian_or_nothing(self.noise_multiplier, self.clip),
                    accesses=self.steps(),
                    rate=self.record_rate,
                ),
            )
        if self.noise_scope == "local":
            upload, averaged = upload_and_mean(self.noise_multiplier, "local", self.clip, plan)
            return replace(upload, what="each client's clipped update"), averaged
        return (
            Release(
                "each client's clipped update",
                "client",
                ("server",),
                Unprotected('the server adds the noise (noise_scope = "central")'),
            ),
            Release(
                "the averaged model",
                "client",
                ("observer", "client"),
                gaussian_or_nothing(self.noise_multiplier, self.clip),
                participation="hidden",
            ),
        )

    def local_training(self, at: At) -> LocalSteps:
        if self.unit == "record":
            return LocalSteps(self.lr_at(at), None, steps=self.steps())  # on average every step reads all
        return super().local_training(at).clipped(self.clip)

    def adaptation(self, at: At, dimension: int, examples: int) -> Adaptation:
        if self.unit == "client" or math.isinf(self.clip):
            return super().adaptation(at, dimension, examples)
        std = self.noise_multiplier * self.clip * math.sqrt(self.steps())
        return Adaptation.to_noise(std / max(1.0, self.record_rate * examples))
