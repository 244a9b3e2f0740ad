"""PSG: one private synthetic set per client, made once, that any model can be trained on.

Chen, Kerkouche, Fritz: Private Set Generation with Discriminative Information. NeurIPS 2022, Algorithm 1.

Symbols: S `images` and `labels`, runs `trajectories` (each from a new random network), T `max_steps`, tau
`image_lr`, C `clip`, sigma `noise_multiplier`, B `batch_size`.

Deviations:
- Written for many clients: each makes its own set and the server trains on their union with equal weights. With
  one client it is the centralised method of the paper.
- Real batches are Poisson samples; the noisy sum is divided by the expected size of a batch.
- The number of image and network updates does not grow with the number of images per class.
- One-shot means one round. In every further round all sets are made anew (and charged again), and the model is
  trained on them from its first parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass as record
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedveil.data.client_data import ClientData
from fedveil.messages import Message, Record
from fedveil.methods.fields import STRICT, Clip, LearningRate, NoiseMultiplier
from fedveil.methods.method import At, Method, register
from fedveil.methods.synthetic import Count, Matching, SyntheticSet, noisy_gradients, random_starts
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.training.local_sgd import Schedule
from fedveil.training.surrogate import Loops, approximate, descend
from fedveil.tree import Params, State


@record(frozen=True)
class Server(Record):
    """The model, and the parameters that its training starts from."""

    params: Params
    start: Params


@record(frozen=True)
class Nothing(Message):
    """The clients need nothing from the server."""


def train_on_sets(
    task: Task, server: Server, images: Tensor, labels: Tensor, shares: Tensor, lr: float, steps: int
) -> Server:
    """The server's model trained from its first parameters on all sets."""
    params, _ = descend(task, server.start, images, labels, shares, lr=lr, radius=math.inf, max_steps=steps)
    return Server(params, server.start)


@register(
    "psg",
    "one-shot: clients share a private synthetic set made from noisy gradients of random networks",
    server=Server,
    down=Nothing,
    up=SyntheticSet,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class PSG(Matching, Method[Server, Nothing, SyntheticSet]):
    trajectories: Count = 1000
    max_steps: Count = 10
    real_batches: Count = 1
    image_updates: Count = 1
    model_updates: Annotated[int, Field(ge=0)] = 10
    image_lr: LearningRate = 0.1
    lr: LearningRate = 0.01
    lr_schedule: Schedule = "constant"
    server_steps: Count = 1000
    squared_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    radius: Annotated[float, Field(gt=0)] = math.inf
    clip: Clip = 0.1
    noise_multiplier: NoiseMultiplier = 1.0

    def init_server(self, params: Params, plan: Plan) -> Server:
        return Server(params, params)

    def init_client(self, task: Task, data: ClientData, rng: ClientStreams) -> State:
        return self.init_images(task, data, rng)

    def broadcast(self, at: At, server: Server, clients: Sequence[int]) -> Nothing:
        return Nothing()

    def private_loops(self, at: At, radius: float) -> Loops:
        return self.loops(at, radius, clip=self.clip, noise_multiplier=self.noise_multiplier)

    def client_update(
        self, task: Task, at: At, down: Nothing, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[SyntheticSet, State]:
        starts = random_starts(task, rng)
        images, labels = self.begin(task, starts(0), data, state, rng)
        loops = self.private_loops(at, self.radius)
        images = approximate(task, starts, data, images, labels, rng, loops)
        return SyntheticSet(images, labels), {} if self.reinit else {"images": images}

    def server_update(
        self,
        task: Task,
        at: At,
        server: Server,
        clients: Sequence[int],
        up: SyntheticSet | None,
        rng: ServerStreams,
    ) -> Server:
        if up is None:
            return server
        shares = torch.full((len(clients),), 1 / len(clients), dtype=torch.float64)
        lr = self.lr_at(at)
        return train_on_sets(task, server, up.images, up.labels, shares, lr, self.server_steps)

    def model(self, server: Server) -> Params:
        return server.params

    def releases(self, plan: Plan) -> Sequence[Release]:
        return noisy_gradients(self, plan, self.clip, self.noise_multiplier)
