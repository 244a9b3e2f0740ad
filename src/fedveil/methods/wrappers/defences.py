"""Defences against gradient inversion, as wrappers around a method whose clients upload gradients.

Each changes the gradient on the client, before it is sent. Noise on an unbounded value has no guarantee, so all but
DP-SGD are declared unprotected: attacks measure them. Their noise is a distortion (`privacy/distortions.py`); DP-SGD's
noise comes from a mechanism, in the private step that all methods share. Several may be stacked; the first is
innermost.

Deviations:
- PPFA (Zhang et al. 2023, arXiv 2305.15148) asks for a distortion that keeps the leakage below `epsilon`, and FedEM's
  paper does not print the mechanism it ran. Here a random vector of length `4 D (1 - epsilon)` is added, the distortion
  of that paper's bound without its optimisation term, with D = sqrt(d): coordinates in a unit range.
- LDPM (Jiang et al. 2024) is named without its mechanism too. Here the gradient is projected onto a random subspace of
  a part `kept` of its dimensions, scaled back to keep its expectation, and noised inside that subspace.
- Sign compression multiplies the signs of a layer by the layer's mean magnitude, so that the learning rate keeps its
  meaning.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass as record
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.messages import Message, Record
from fedveil.methods.disclosure import Adaptation, BoundedUpload
from fedveil.methods.fedem import FedEM
from fedveil.methods.fedsgd import FedSGD, Gradient, batch_in_step
from fedveil.methods.fields import STRICT, Clip, NoiseMultiplier
from fedveil.methods.method import AnyMethod, At, unprotected
from fedveil.methods.shared_model import Model
from fedveil.methods.wrappers.wrapper import Around, Wrapper, wrapper
from fedveil.privacy.distortions import Additive, FixedLength
from fedveil.privacy.mechanisms import SumMechanism, gaussian
from fedveil.privacy.releases import ADVERSARIES, Plan, Release
from fedveil.streams import ClientStreams
from fedveil.task import Task
from fedveil.training.private_sgd import private_gradient
from fedveil.tree import Params, State, expand, flat_rows, flatten, unflatten

if TYPE_CHECKING:
    from torch import Tensor

Scale = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Part = Annotated[float, Field(ge=0, lt=1)]


class Defence(Wrapper):
    """Computes the clients' uploads in place of the wrapped method."""

    def around(self, method: AnyMethod) -> AnyMethod:
        if "gradient" not in {field.name for field in fields(method.up_type)}:
            raise InputError(
                "wrap.name",
                self.name,
                f"{method.name} uploads no gradient, which this defence changes",
                "Wrap it around fedsgd or fedem.",
            )
        return Defended(method, self)

    @abstractmethod
    def upload(
        self,
        inner: AnyMethod,
        task: Task,
        at: At,
        down: Any,
        data: ClientData,
        state: State,
        rng: ClientStreams,
    ) -> tuple[Any, State]:
        """The clients' uploads and states."""

    @abstractmethod
    def releases(self, inner: AnyMethod, plan: Plan) -> Sequence[Release]:
        """The releases with this defence."""

    def adaptation(self, dimension: int, examples: int) -> Adaptation:
        """How an attacker adapts to this defence, for a gradient of `dimension` coordinates and so many examples."""
        return Adaptation()


class GradientDefence(Defence):
    """Changes the gradient of the inner method."""

    reason = "the gradient is not clipped, so no noise can be measured against it"

    def upload(
        self,
        inner: AnyMethod,
        task: Task,
        at: At,
        down: Any,
        data: ClientData,
        state: State,
        rng: ClientStreams,
    ) -> tuple[Any, State]:
        up, after = inner.client_update(task, at, down, data, state, rng)
        own = replace(rng, layer=_layer_around(inner))
        return replace(up, gradient=self.defend(up.gradient, own)), after

    def releases(self, inner: AnyMethod, plan: Plan) -> Sequence[Release]:
        return unprotected("the changed gradient of each client", self.reason)

    @abstractmethod
    def defend(self, gradient: Params, rng: ClientStreams) -> Params:
        """The gradients `[K, ...]` to send in place of these, row k with client k's streams."""


@record(frozen=True)
class Defended(Around[Record]):
    """A method whose clients apply a defence; the server's half is unchanged."""

    defence: Defence

    def __post_init__(self) -> None:
        self.named(self.defence.name, self.defence.summary, self.inner.server_type)

    def client_update(
        self, task: Task, at: At, down: Message, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Message, State]:
        return self.defence.upload(self.inner, task, at, down, data, state, rng)

    def releases(self, plan: Plan) -> Sequence[Release]:
        return self.defence.releases(self.inner, plan)

    def bounded_upload(self, at: At, down: Message, up: Message) -> BoundedUpload | None:
        """None: the defence may have increased the norm."""
        return None

    def adaptation(self, at: At, dimension: int, examples: int) -> Adaptation:
        """The adaptation to the outermost defence that has one."""
        own = self.defence.adaptation(dimension, examples)
        return self.inner.adaptation(at, dimension, examples) if own.kind == "none" else own

    def defences(self) -> tuple[str, ...]:
        return (self.defence.name, *self.inner.defences())


def _layer_around(inner: AnyMethod) -> int:
    """A distinct number for each layer that draws noise, so that layers draw independent noise."""
    if isinstance(inner, Defended):
        return 1 + _layer_around(inner.inner)
    return 0 if isinstance(inner, (FedSGD, FedEM)) else 1  # these two draw none themselves


@wrapper("gradient-gaussian", "Gaussian noise on every coordinate of the gradient, without clipping")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class GradientGaussian(GradientDefence):
    std: Scale = 1 / 255
    """Standard deviation of the noise on each coordinate."""

    def defend(self, gradient: Params, rng: ClientStreams) -> Params:
        return Additive("gaussian", self.std)(gradient, rng.noise())

    def adaptation(self, dimension: int, examples: int) -> Adaptation:
        return Adaptation.to_noise(self.std)


@wrapper("gradient-laplace", "Laplace noise on every coordinate of the gradient, without clipping")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class GradientLaplace(GradientDefence):
    scale: Scale = 1 / 255
    """Scale of the Laplace noise on each coordinate."""

    def defend(self, gradient: Params, rng: ClientStreams) -> Params:
        return Additive("laplace", self.scale)(gradient, rng.noise())

    def adaptation(self, dimension: int, examples: int) -> Adaptation:
        return Adaptation.to_noise(self.scale * math.sqrt(2))


@wrapper("ppfa", "a random distortion of fixed length on the gradient (PPFA)")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class PPFA(GradientDefence):
    reason = "the distortion has a fixed length whatever the data are; it bounds no ratio of probabilities"
    epsilon: Annotated[float, Field(ge=0, le=1)] = 0.995
    """The gradient is displaced by 4 sqrt(d) (1 - epsilon); 1 means no change. Not a privacy parameter."""

    def length(self, dimension: int) -> float:
        """The length of the displacement: 4 D (1 - epsilon) with D = sqrt(d)."""
        return 4 * math.sqrt(dimension) * (1 - self.epsilon)

    def defend(self, gradient: Params, rng: ClientStreams) -> Params:
        flat = flatten(gradient)
        return unflatten(FixedLength(self.length(flat.shape[1]))(flat, rng.noise()), gradient)

    def adaptation(self, dimension: int, examples: int) -> Adaptation:
        return Adaptation.to_noise(self.length(dimension) / math.sqrt(dimension))


@wrapper("ldpm", "the gradient projected onto a random subspace, with Gaussian noise inside it (LDPM)")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class LDPM(GradientDefence):
    std: Scale = 0.0005
    """Standard deviation of the noise on each coordinate of the rotated gradient."""
    kept: Annotated[float, Field(gt=0, le=1, description="part of the dimensions that is kept")] = 0.5

    def defend(self, gradient: Params, rng: ClientStreams) -> Params:
        flat = flatten(gradient)
        size = flat.shape[1]
        streams = rng.unknown_to_server(rng.of_exchange("privacy/subspace"))
        signs = torch.stack([torch.from_numpy(2.0 * s.integers(0, 2, size) - 1) for s in streams]).to(flat)
        mask = _random_mask(streams, size, max(1, round(self.kept * size))).to(flat)
        noisy = Additive("gaussian", self.std)({"turned": _hartley(flat * signs)}, rng.noise())["turned"]
        seen = noisy * mask
        return unflatten(_hartley(seen) * signs * (size / mask.sum(1, keepdim=True)), gradient)

    def adaptation(self, dimension: int, examples: int) -> Adaptation:
        return Adaptation.to_noise(self.std / math.sqrt(self.kept))


def _hartley(x: Tensor) -> Tensor:
    """The orthonormal Hartley transform of each row: real, and its own inverse."""
    spectrum: Tensor = torch.fft.fft(x)
    return (spectrum.real - spectrum.imag) / math.sqrt(x.shape[1])


def _random_mask(streams: Sequence[np.random.Generator], size: int, count: int) -> Tensor:
    """`count` ones at random places of each row."""
    mask = torch.zeros(len(streams), size, dtype=torch.bool)
    for row, stream in zip(mask, streams, strict=True):
        row[torch.from_numpy(stream.choice(size, count, replace=False))] = True
    return mask


@wrapper("gradient-masking", "a random part of the gradient's coordinates is set to zero")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class GradientMasking(GradientDefence):
    reason = "what is not masked is sent as it is"
    part: Part = 0.25
    """Share of the coordinates that is set to zero, at random."""

    def defend(self, gradient: Params, rng: ClientStreams) -> Params:
        flat = flatten(gradient)
        size = flat.shape[1]
        kept = _random_mask(rng.of_exchange("privacy/mask"), size, size - round(self.part * size))
        return unflatten(flat * kept.to(flat), gradient)

    def adaptation(self, dimension: int, examples: int) -> Adaptation:
        return Adaptation("mask")


@wrapper("sign-compression", "only the signs of the gradient and the mean magnitude of each layer are sent")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class SignCompression(GradientDefence):
    reason = "signs and magnitudes are functions of the data without noise"

    def defend(self, gradient: Params, rng: ClientStreams) -> Params:
        return {name: _signs_of(leaf) for name, leaf in gradient.items()}

    def adaptation(self, dimension: int, examples: int) -> Adaptation:
        return Adaptation("sign")


def _signs_of(leaf: Tensor) -> Tensor:
    size = flat_rows(leaf.abs()).mean(1)
    return leaf.sign() * size.reshape(-1, *([1] * (leaf.dim() - 1)))


@wrapper("gradient-pruning", "all but the largest coordinates of the gradient are set to zero")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class GradientPruning(GradientDefence):
    reason = "the largest coordinates are sent as they are"
    part: Part = 0.99
    """Share of the coordinates that is set to zero, the smallest."""

    def defend(self, gradient: Params, rng: ClientStreams) -> Params:
        flat = flatten(gradient)
        count = max(1, flat.shape[1] - round(self.part * flat.shape[1]))
        index = flat.abs().topk(count, dim=1).indices
        return unflatten(torch.zeros_like(flat).scatter(1, index, flat.gather(1, index)), gradient)

    def adaptation(self, dimension: int, examples: int) -> Adaptation:
        return Adaptation("mask")


@wrapper("dp-sgd", "every example's gradient clipped, Gaussian noise on each batch's sum: record-level DP")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPSGD(Defence):
    """Abadi et al., CCS 2016, around FedSGD. A record is in one batch of a round, so a participation releases one
    noisy sum that contains it; the random order of batches is not used for amplification.
    """

    clip: Clip = 1.0
    noise_multiplier: NoiseMultiplier = 1.0

    def mechanism(self) -> SumMechanism:
        """Perturbs every gradient; `releases` accounts for it."""
        return gaussian(self.clip, self.noise_multiplier)

    def around(self, method: AnyMethod) -> AnyMethod:
        if not isinstance(method, FedSGD):
            raise InputError(
                "wrap.name", self.name, f"{method.name} makes no plain gradients", "Wrap it around fedsgd."
            )
        return Defended(method, self)

    def upload(
        self,
        inner: AnyMethod,
        task: Task,
        at: At,
        down: Model,
        data: ClientData,
        state: State,
        rng: ClientStreams,
    ) -> tuple[Gradient, State]:
        assert isinstance(inner, FedSGD)
        batch = batch_in_step(data, inner.batch_size, at.exchange, rng, inner.last_batch)
        mask = batch.y.new_ones(batch.y.shape[:2], dtype=torch.bool) if batch.mask is None else batch.mask
        sizes = mask.sum(1)
        gradient = private_gradient(
            task,
            expand(down.params, data.count),
            replace(batch, mask=mask),
            sizes.clamp(min=1),
            self.mechanism(),
            rng.noise(),
        )
        return Gradient(gradient, sizes), state

    def releases(self, inner: AnyMethod, plan: Plan) -> Sequence[Release]:
        return (
            Release(
                "the noisy gradient of each batch",
                "record",
                ADVERSARIES,
                self.mechanism().protection(),
                adjacency="zero-out",
            ),
        )

    def adaptation(self, dimension: int, examples: int) -> Adaptation:
        return Adaptation.to_noise(self.mechanism().std / examples)
