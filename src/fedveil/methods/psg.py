"""PSG: each client makes one private synthetic set, on which any model can be trained.

Chen, Kerkouche, Fritz: Private Set Generation with Discriminative Information. NeurIPS 2022, Algorithm 1.

Symbols: S `images` and `labels`, runs `trajectories` (each from a new random network), T `max_steps`, tau
`image_lr`, C `clip`, sigma `noise_multiplier`, B `batch_size`.

Deviations:
- Written for many clients: each makes its own set and the server trains on their union with equal weights. With
  one client it is the centralised method of the paper.
- Real batches are Poisson samples; the noisy sum is divided by the expected size of a batch.
- The networks, and finally the model, are trained by plain gradient descent on all images.
- The number of image and network updates does not grow with the number of images per class.
- One-shot means one round. Every further round makes new sets (and charges them again), and the model is trained on
  them from its initial parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.lazy_torch import torch
from fedveil.methods.fields import STRICT, Clip, LearningRate, LearningRateSchedule, NonNegative
from fedveil.methods.method import At, register
from fedveil.methods.one_shot import Nothing, OneShot, Server, train_on_sets
from fedveil.methods.synthetic import Count, PrivateMatching, SyntheticSet, random_starts
from fedveil.streams import ClientStreams
from fedveil.task import Task
from fedveil.training.surrogate import approximate
from fedveil.tree import Params, State


@register(
    "psg",
    "one-shot: clients share a private synthetic set made from noisy gradients of random networks",
    server=Server,
    down=Nothing,
    up=SyntheticSet,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class PSG(PrivateMatching, OneShot[SyntheticSet]):
    trajectories: Count = 1000
    max_steps: Count = 10
    real_batches: Count = 1
    image_updates: Count = 1
    model_updates: Annotated[int, Field(ge=0)] = 10
    image_lr: LearningRate = 0.1
    lr: LearningRate = 0.01
    lr_schedule: LearningRateSchedule = "constant"
    server_steps: Count = 1000
    squared_weight: NonNegative = 0.0
    radius: Annotated[float, Field(gt=0)] = math.inf
    """Largest distance of a network from its initial parameters, at which its training ends."""
    clip: Clip = 0.1

    def unused_fields(self) -> Mapping[str, str]:
        unused = dict(super().unused_fields())
        if self.model_updates == 0:
            unused["radius"] = "Leave it out: with model_updates = 0 the networks stay where they are."
        return unused

    def client_update(
        self, task: Task, at: At, down: Nothing, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[SyntheticSet, State]:
        starts = random_starts(task, rng)
        images, labels = self.begin(task, starts(0), data, state, rng)
        loops = self.private_loops(at, self.radius)
        images = approximate(task, starts, data, images, labels, rng, loops)
        return SyntheticSet(images, labels), self.remembered(images)

    def train(self, task: Task, at: At, start: Params, up: SyntheticSet) -> Params:
        shares = torch.full((up.count,), 1 / up.count, dtype=torch.float64)
        return train_on_sets(task, start, up.images, up.labels, shares, self.lr_at(at), self.server_steps)
