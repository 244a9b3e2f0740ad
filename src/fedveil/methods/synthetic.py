"""The common part of methods that share synthetic examples: fields, message and protection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass as record
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData, Clients, client_ids
from fedveil.data.dataset import Dataset
from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.losses import target_of
from fedveil.messages import Message
from fedveil.methods.fields import (
    STRICT,
    BatchSize,
    Clip,
    Fraction,
    LearningRate,
    LearningRateSchedule,
    NoiseMultiplier,
    NonNegative,
)
from fedveil.methods.method import At, Demand
from fedveil.numerics import NUMERICS
from fedveil.privacy.mechanisms import SumMechanism, gaussian
from fedveil.privacy.releases import ADVERSARIES, Plan, PostProcessing, Release
from fedveil.streams import ClientStreams
from fedveil.task import Task
from fedveil.training.augmentation import Change, check_images
from fedveil.training.gradient_matching import Distance
from fedveil.training.local_sgd import scheduled_lr
from fedveil.training.surrogate import (
    Loops,
    RealGradients,
    class_count,
    noise_images,
    own_classes,
    synthetic_labels,
)
from fedveil.tree import Params, State, concatenate, expand, flatten, with_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

Count = Annotated[int, Field(ge=1)]
Labels = Literal["all", "own"] | tuple[tuple[int, ...], ...]


@record(frozen=True)
class SyntheticSet(Message):
    """Images `[K, n, ...]` and labels `[K, n]`; rows of label -1 are padding."""

    images: Tensor
    labels: Tensor


@record(frozen=True)
class SizedSet(Message):
    """A synthetic set with the number of examples behind it."""

    images: Tensor
    labels: Tensor
    size: Tensor


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SyntheticImages:
    """Fields of a client's synthetic set."""

    # 1: gradients of convolution blocks in closed form (`training/conv_blocks.py`), which rounds in another order.
    # 2: the first block image by image.
    numerics: ClassVar[int] = NUMERICS + 2

    ipc: Count = 10
    """Synthetic images per class."""
    labels: Labels = "all"
    """Classes of a client's synthetic images: all, those it holds (which are then public), or a public list for each
    client."""
    classes_per_client: Count | None = None
    """Largest number of classes of a client, for labels = "own"; default: all."""
    reinit: bool = True
    """Whether images start from noise in every round."""
    image_lr: LearningRate = 100.0
    image_momentum: Fraction = 0.5
    """Momentum of the steps of the images."""
    image_updates: Count = 5
    """Steps of the images for each batch of real examples."""
    batch_size: BatchSize = 256
    augment: tuple[Change, ...] = ()
    """Augmentations that are applied to real and synthetic images before their gradients are compared."""

    def unused_fields(self) -> Mapping[str, str]:
        if self.labels == "own":
            return {}
        return {"classes_per_client": 'Leave it out, or set labels = "own".'}

    def unused_for(self, rounds: int) -> Mapping[str, str]:
        return {"reinit": "every client's images start once"} if rounds == 1 else {}

    def slots(self, classes: int) -> int:
        """The number of classes of a synthetic set, the same for every client, so that all sets have one shape."""
        if self.labels == "all":
            return classes
        if self.labels == "own":
            return min(classes, self.classes_per_client or classes)
        return max((len(group) for group in self.labels), default=0)

    def image_steps(self, slots: int) -> int:
        """The number of gradients of one participation."""
        return self.image_updates

    def demand(self, plan: Plan, records: int, classes: int) -> Demand:
        slots = self.slots(classes)
        return Demand(self.image_steps(slots), examples=slots * self.ipc)

    def label_sets(self, classes: int, data: ClientData, clients: Sequence[int]) -> tuple[Tensor, int]:
        """The labels `[K, slots * ipc]` of these clients, and the number of slots."""
        slots = self.slots(classes)
        if self.labels == "all":
            return synthetic_labels([range(classes)] * data.count, self.ipc, slots), slots
        held = own_classes(data) if data.declared is None else data.declared
        if self.labels == "own":
            for client, own in zip(clients, held, strict=True):
                if len(own) > slots:
                    raise InputError(
                        "method.classes_per_client",
                        self.classes_per_client,
                        f"client {client} holds {len(own)} classes",
                        f"Use at least {len(own)}, or leave it out.",
                    )
            return synthetic_labels(held, self.ipc, slots), slots
        declared = [self._declared(client, classes, own) for client, own in zip(clients, held, strict=True)]
        return synthetic_labels(declared, self.ipc, slots), slots

    def _declared(self, client: int, classes: int, own: Sequence[int]) -> tuple[int, ...]:
        """The classes declared for this client, which must have examples of each."""
        if client >= len(self.labels):
            raise InputError(
                "method.labels",
                self.labels,
                f"declares nothing for client {client}",
                "Give one list per client.",
            )
        group = tuple(int(label) for label in self.labels[client])
        if not group or len(set(group)) != len(group) or not all(0 <= label < classes for label in group):
            raise InputError(
                "method.labels",
                group,
                f"is not a set of classes for client {client}",
                f"Use classes from 0 to {classes - 1}.",
            )
        if own and not set(group) <= set(own):
            missing = sorted(set(group) - set(own))[0]
            raise InputError(
                "method.labels",
                group,
                f"client {client} holds no example of class {missing}",
                'Declare only classes it holds, or use labels = "all".',
            )
        return group

    def first_images(self, data: ClientData, slots: int, rng: ClientStreams) -> Tensor:
        return noise_images(rng.of_exchange("images"), slots * self.ipc, data)

    def check_clients(self, task: Task, clients: Clients) -> None:
        """Check the label sets of all clients before training, so that none is refused later."""
        self._refuse_texts(task)
        ids = client_ids(clients)
        first = clients.load([ids[0]])
        check_images(self.augment, first.x.shape[2:])
        if self.labels == "all":
            return
        shown = ClientData(first.x.to(task.device), first.y, first.sizes)
        classes = class_count(task, with_axis(task.init(0)), shown)
        for client in ids:
            self.label_sets(classes, clients.load([client]), [client])

    def _refuse_texts(self, task: Task) -> None:
        if target_of(task.example_loss) != "classes":
            raise InputError(
                "method.name",
                type(self).__name__,
                "makes examples of classes, and this table has none",
                "Choose another method, such as fedavg or dp-fedsgd.",
            )
        if task.text is not None:
            raise InputError(
                "method.name",
                type(self).__name__,
                "its clients make images, which texts are not",
                "Use a method that sends gradients or models, such as fedavg, fedceo or fedem.",
            )

    def init_client(self, task: Task, data: ClientData, rng: ClientStreams) -> State:
        """A client's state: its images, unless they start from noise in every round."""
        self._refuse_texts(task)
        if self.reinit:
            return {}
        classes = class_count(task, with_axis(task.init(0)), data)
        return {"images": self.first_images(data, self.label_sets(classes, data, rng.clients)[1], rng)}

    def begin(
        self, task: Task, w: Params, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Tensor, Tensor]:
        """The initial images of a round, and their labels."""
        check_images(self.augment, data.x.shape[2:])
        labels, slots = self.label_sets(class_count(task, w, data), data, rng.clients)
        images = self.first_images(data, slots, rng) if self.reinit else state["images"]
        return images, labels.to(images.device)

    def remembered(self, images: Tensor) -> State:
        """The state after a client has made its images."""
        return {} if self.reinit else {"images": images}

    def pictures(self, at: At, up: Any, dataset: Dataset) -> Mapping[str, Figure]:
        """The clients' synthetic images, a row for each class, in the first, the middle and the last round."""
        rounds = at.plan.rounds
        if len(dataset.input_shape) != 3 or at.round not in (1, (rounds + 1) // 2, rounds):
            return {}
        from fedveil.figures.fedlap import Sets, some_images_figure

        sets = Sets(up.images.cpu(), up.labels.cpu())
        figure = some_images_figure(at.round, sets, dataset.classes, mean=dataset.mean, std=dataset.std)
        return {} if figure is None else {f"synthetic/round-{at.round}": figure}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Matching(SyntheticImages):
    """Fields of gradient matching and of the descents on both halves."""

    trajectories: Count = 1
    """Walks of the model on which gradients are matched."""
    max_steps: Count = 5
    """Places of each walk, at most."""
    real_batches: Count = 10
    """Batches of real examples at each place."""
    model_updates: Annotated[int, Field(ge=0)] = 0
    """Steps of the model on the synthetic images from one place to the next."""
    radius: Annotated[float, Field(gt=0, description="largest distance from the start of a round")] = 10.0
    squared_weight: NonNegative = 0.1
    """Weight of the squared distance of gradients beside the cosine distance."""
    reduce: Literal["sum", "mean"] = "sum"
    """Whether the cosine distances of a layer's rows are summed or averaged."""
    include_vectors: bool = False
    """Whether vectors such as biases join the cosine distance."""
    lr: LearningRate = 0.1
    lr_schedule: LearningRateSchedule = "cosine"
    lr_floor: NonNegative = 0.0
    """The least step size of a schedule."""
    server_steps: Count = 100
    """Steps of the server on the synthetic images per round, at most."""

    def unused_fields(self) -> Mapping[str, str]:
        unused = dict(super().unused_fields())
        if self.lr_schedule == "constant":
            unused["lr_floor"] = "Leave it out, or choose a lr_schedule that falls."
        return unused

    def image_steps(self, slots: int) -> int:
        inner = self.real_batches * (1 + self.image_updates) + self.model_updates
        return self.trajectories * self.max_steps * inner

    def lr_at(self, at: At) -> float:
        return scheduled_lr(self.lr, self.lr_schedule, at.round, at.plan.rounds, self.lr_floor)

    def loops(self, at: At, radius: float) -> Loops:
        return Loops(
            trajectories=self.trajectories,
            max_steps=self.max_steps,
            real_batches=self.real_batches,
            image_updates=self.image_updates,
            model_updates=self.model_updates,
            radius=radius,
            batch_size=self.batch_size,
            lr=self.lr_at(at),
            image_lr=self.image_lr,
            image_momentum=self.image_momentum,
            distance=Distance(self.squared_weight, self.reduce, self.include_vectors),
            augment=self.augment,
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PrivateMatching(Matching):
    """Matching to real gradients that are clipped and noised."""

    clip: Clip = 1.0
    noise_multiplier: NoiseMultiplier = 1.0

    def mechanism(self) -> SumMechanism:
        """Perturbs every real gradient; `releases` accounts for it."""
        return gaussian(self.clip, self.noise_multiplier)

    def private_loops(self, at: At, radius: float) -> Loops:
        return replace(self.loops(at, radius), mechanism=self.mechanism())

    def releases(self, plan: Plan) -> Sequence[Release]:
        """The releases of a private synthetic set: every real batch that may be read is charged.

        Images and models are post-processing of the noisy gradients and public values.
        """
        return (
            Release(
                "the noisy gradients behind each client's synthetic images",
                "record",
                ADVERSARIES,
                self.mechanism().protection(),
                accesses=self.trajectories * self.max_steps * self.real_batches,
                rate=min(1.0, self.batch_size / plan.records_per_client),
            ),
            Release(
                "the synthetic images and the models trained on them",
                "record",
                ADVERSARIES,
                PostProcessing("computed from the noisy gradients, which are charged in full"),
            ),
        )

    def noisy_gradients(
        self, task: Task, at: At, data: ClientData, rng: ClientStreams, accesses: int | None = None
    ) -> Tensor:
        """The noisy gradients, which disclose at least as much as the images computed from them."""
        loops = self.private_loops(at, self.radius)
        real = RealGradients(task, data, rng, replace(loops, augment=()))
        w, everybody = expand(with_axis(task.init(0)), data.count), range(data.count)
        drawn = [flatten(real.draw(w, everybody)[0]) for _ in range(accesses or loops.accesses)]
        return -torch.stack(drawn)


def random_starts(task: Task, rng: ClientStreams) -> Callable[[int], Params]:
    """Random networks `[K, ...]` by number, each client's own; drawn without looking at any data."""

    def start(number: int) -> Params:
        seeds = [int(stream.integers(2**31)) for stream in rng.of_exchange(f"network-{number}")]
        return concatenate([with_axis(task.init(seed)) for seed in seeds])

    return start
