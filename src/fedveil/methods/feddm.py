"""FedDM: clients share synthetic images whose features and logits match those of their data, class by class.

Xiong, Wang, Cheng, Yu, Hsieh: FedDM: Iterative Distribution Matching for Communication-Efficient Federated Learning.
CVPR 2023, Algorithm 1 and Eq. 7.

Symbols: w_r `params`, rho `radius`, h_w features before the last linear layer, z_w logits, T `matching_steps`,
B `batch_size` per class, eta_c `image_lr`, eta_s `lr`.

Deviations:
- Models near w_r are drawn as w_r plus normal noise of standard deviation `spread`, clipped to norm rho.
- The server takes plain steps on whole sets within rho of w_r, weighted by size, as FedLAP's server does; images are
  updated with momentum.
- Images start from noise, not from real images. Without DP: the paper's private variant is not offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData, Clients
from fedveil.errors import InputError
from fedveil.lazy_torch import nn, torch
from fedveil.methods.fields import STRICT, LearningRate, LearningRateSchedule, NonNegative
from fedveil.methods.method import At, register, unprotected
from fedveil.methods.shared_model import AggregatedModel, Model, Server, averaging_weights
from fedveil.methods.synthetic import Count, SizedSet, SyntheticImages
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams, normal
from fedveil.task import Task
from fedveil.training.augmentation import draw_view
from fedveil.training.local_sgd import scheduled_lr
from fedveil.training.surrogate import class_batch, descend
from fedveil.tree import Params, State, add, norms

if TYPE_CHECKING:
    from torch import Tensor


def last_linear(task: Task) -> nn.Linear:
    """The last linear layer, whose inputs are the features."""
    linears = [layer for layer in task.module.modules() if isinstance(layer, nn.Linear)]
    if not linears:
        raise InputError(
            "task.model", type(task.module).__name__, "has no linear layer", "Use another model."
        )
    return linears[-1]


def features_and_logits(task: Task, w: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs of the last linear layer, `[n, d]`, and the class scores, for images `[n, ...]` at `w [1, ...]`."""
    seen: list[Tensor] = []

    def look(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])

    hook = last_linear(task).register_forward_pre_hook(look)
    try:
        scores: Tensor = torch.func.functional_call(
            task.module, {name: leaf[0] for name, leaf in w.items()}, (x,)
        )
    finally:
        hook.remove()
    return seen[-1].flatten(1), scores


def distribution_distance(task: Task, w: Params, real: Tensor, synthetic: Tensor) -> Tensor:
    """Eq. 7 for one class: the squared distances of the mean features and of the mean logits."""
    with torch.no_grad():
        targets = [part.mean(0) for part in features_and_logits(task, w, real)]
    found = [part.mean(0) for part in features_and_logits(task, w, synthetic)]
    return torch.stack([(a - b).square().sum() for a, b in zip(targets, found, strict=True)]).sum()


def nearby(w: Params, spread: float, radius: float, rng: ClientStreams, step: int) -> Params:
    """A model drawn around `w [1, ...]`, within `radius` of it, independently of the clients' data."""
    stream = rng.of_exchange(f"network-{step}")
    noise = {name: spread * normal(stream, leaf.shape[1:], leaf) for name, leaf in w.items()}
    length = float(norms(noise))
    return add(w, noise, scale=min(1.0, radius / length) if length > 0 else 1.0)


@register(
    "feddm",
    "clients share synthetic images that match their features and logits class by class",
    server=Server,
    down=Model,
    up=SizedSet,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class FedDM(SyntheticImages, AggregatedModel[SizedSet]):
    ipc: Count = 50
    image_lr: LearningRate = 1.0
    matching_steps: Count = 1000
    """Steps in which features and logits are matched, each at a model drawn near the one sent."""
    radius: Annotated[float, Field(gt=0, description="largest distance from the start of a round")] = 5.0
    spread: NonNegative = 1.0
    """Standard deviation of the noise that draws those models."""
    lr: LearningRate = 0.01
    lr_schedule: LearningRateSchedule = "cosine"
    server_steps: Count = 500
    """Steps of the server on the synthetic images per round, at most."""

    def unused_fields(self) -> Mapping[str, str]:
        once = "Leave it out: the images take one step for each of matching_steps."
        return {**super().unused_fields(), "image_updates": once}

    def image_steps(self, slots: int) -> int:
        return self.matching_steps * slots

    def check_clients(self, task: Task, clients: Clients) -> None:
        super().check_clients(task, clients)
        last_linear(task)

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[SizedSet, State]:
        images, labels = self.begin(task, down.params, data, state, rng)
        made = [
            self._match(task, down.params, data.rows([k]), images[k], labels[k], rng.rows([k]))
            for k in range(data.count)
        ]
        images = torch.stack(made)
        return SizedSet(images, labels, data.sizes), self.remembered(images)

    def _match(
        self, task: Task, w: Params, data: ClientData, images: Tensor, labels: Tensor, rng: ClientStreams
    ) -> Tensor:
        """One client's images after all steps."""
        draws, views = rng.of_exchange("real-batches")[0], rng.of_exchange("augmentation")[0]
        places = {
            label: (labels == label).nonzero()[:, 0] for label in sorted(set(labels[labels >= 0].tolist()))
        }
        images, velocity = images.clone(), torch.zeros_like(images)
        for step in range(self.matching_steps):
            near = nearby(w, self.spread, self.radius, rng, step)
            for label, place in places.items():
                view = draw_view(self.augment, views)
                batch = class_batch(data, label, self.batch_size, draws)
                if batch is None:
                    continue
                x = images[place].requires_grad_()
                loss = distribution_distance(task, near, view(batch.x[0]), view(x))
                velocity[place] = self.image_momentum * velocity[place] + torch.autograd.grad(loss, x)[0]
                images[place] = x.detach() - self.image_lr * velocity[place]
        return images

    def aggregate(self, task: Task, at: At, w: Params, up: SizedSet) -> Params:
        params, _ = descend(
            task,
            w,
            up.images,
            up.labels,
            averaging_weights(up.size, "size"),
            lr=scheduled_lr(self.lr, self.lr_schedule, at.round, at.plan.rounds),
            radius=self.radius,
            max_steps=self.server_steps,
        )
        return params

    def releases(self, plan: Plan) -> Sequence[Release]:
        return unprotected("the synthetic images and the size of each client", "no noise is added")
