"""DSC: a model is trained on synthetic sets that are condensed class by class with siamese augmentation.

Zhao, Bilen: Dataset Condensation with Differentiable Siamese Augmentation. ICML 2021, Algorithm 1.

Symbols: K `trajectories` (each from a new random network), T `max_steps`, S `images` and `labels`, varsigma_S
`image_updates`, varsigma_theta `model_updates`, eta_S `image_lr`, eta_theta `lr`, B `batch_size` per class.

Deviations:
- Written for many clients: each condenses its own data and the server trains on the union, weighted by size. One
  client that holds everything is the centralised setting of the paper.
- Images start from noise, not from real images.
- The networks, and finally the model, are trained by plain gradient descent on all images: no mini-batches,
  momentum, augmentation or step size schedule.
- A class without examples on a client keeps its initial images; use `labels = "own"` to leave it out.
- One-shot means one round. Every further round makes new sets and trains the model on them from its initial
  parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.lazy_torch import torch
from fedveil.methods.fields import STRICT, LearningRate, NonNegative
from fedveil.methods.method import At, register, unprotected
from fedveil.methods.one_shot import Nothing, OneShot, Server, train_on_sets
from fedveil.methods.shared_model import averaging_weights
from fedveil.methods.synthetic import Count, SizedSet, SyntheticImages, random_starts
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams
from fedveil.task import Batch, Task
from fedveil.training.augmentation import CHANGES, Change, View, draw_view
from fedveil.training.gradient_matching import Distance, weighted_gradient
from fedveil.training.surrogate import class_batch, image_gradient, set_weights
from fedveil.tree import Params, State, add

if TYPE_CHECKING:
    from torch import Tensor


@register(
    "dsc",
    "one-shot: clients condense their data class by class, the server trains on the images",
    server=Server,
    down=Nothing,
    up=SizedSet,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class DSC(SyntheticImages, OneShot[SizedSet]):
    ipc: Count = 50
    trajectories: Count = 1000
    """Random networks on which gradients are matched."""
    max_steps: Count = 50
    """Steps on each network."""
    image_updates: Count = 1
    model_updates: Annotated[int, Field(ge=0)] = 10
    """Training steps of the network between two steps of the images."""
    image_lr: LearningRate = 0.1
    augment: tuple[Change, ...] = CHANGES
    squared_weight: NonNegative = 0.0
    """Weight of the squared distance of gradients beside the cosine distance."""
    reduce: Literal["sum", "mean"] = "sum"
    """Whether the cosine distances of a layer's rows are summed or averaged."""
    lr: LearningRate = 0.01
    server_steps: Count = 1000
    """Training steps of the final model on the synthetic images."""

    def image_steps(self, slots: int) -> int:
        return self.trajectories * self.max_steps * (slots * self.image_updates + self.model_updates)

    def client_update(
        self, task: Task, at: At, down: Nothing, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[SizedSet, State]:
        images, labels = self.begin(task, random_starts(task, rng)(0), data, state, rng)
        made = [
            self._condense(task, data.rows([k]), images[k : k + 1], labels[k : k + 1], rng.rows([k]))
            for k in range(data.count)
        ]
        images = torch.cat(made)
        return SizedSet(images, labels, data.sizes), self.remembered(images)

    def _condense(
        self, task: Task, data: ClientData, images: Tensor, labels: Tensor, rng: ClientStreams
    ) -> Tensor:
        """One client's images `[1, n, ...]` after all networks (lines 2-9)."""
        starts = random_starts(task, rng)
        draws, views = rng.of_exchange("real-batches")[0], rng.of_exchange("augmentation")[0]
        y, weights = set_weights(labels, images.dtype)
        classes = sorted(set(labels[labels >= 0].tolist()))
        images, velocity = images.clone(), torch.zeros_like(images)
        for trajectory in range(self.trajectories):
            w = starts(trajectory)
            for _ in range(self.max_steps):
                for label in classes:
                    view = draw_view(self.augment, views)
                    batch = class_batch(data, label, self.batch_size, draws)
                    if batch is None:
                        continue
                    own = (labels[0] == label).nonzero()[:, 0]
                    moved = self._match(
                        task, w, batch, view, images[:, own], labels[:, own], velocity[:, own]
                    )
                    images[:, own], velocity[:, own] = moved
                for _ in range(self.model_updates):
                    w = add(w, weighted_gradient(task, w, images, y, weights), scale=-self.lr)
        return images

    def _match(
        self,
        task: Task,
        w: Params,
        batch: Batch,
        view: View,
        x: Tensor,
        y: Tensor,
        velocity: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The images `x` of one class and their velocity, after steps towards the gradient of a real batch of it."""
        even = batch.weights(batch.x.dtype)
        real = weighted_gradient(task, w, view(batch.x[0]).unsqueeze(0), batch.y, even)
        weights = x.new_full(y.shape, 1 / y.shape[1])
        distance = Distance(self.squared_weight, self.reduce)
        for _ in range(self.image_updates):
            step = image_gradient(task, w, real, x, y, weights, distance, [view])
            velocity = self.image_momentum * velocity + step
            x = x - self.image_lr * velocity
        return x, velocity

    def train(self, task: Task, at: At, start: Params, up: SizedSet) -> Params:
        shares = averaging_weights(up.size, "size")
        return train_on_sets(task, start, up.images, up.labels, shares, self.lr, self.server_steps)

    def releases(self, plan: Plan) -> Sequence[Release]:
        return unprotected("the synthetic images and the size of each client", "no noise is added")
