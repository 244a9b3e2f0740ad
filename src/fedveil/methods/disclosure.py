"""What a method's messages disclose: the values by which its hooks answer attacks and audits.

Everything here follows from the public configuration and from messages on the wire; see the hooks of `Method`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any, Literal

from fedveil.messages import Message
from fedveil.privacy.mechanisms import SumMechanism
from fedveil.privacy.releases import GaussianNoise, Protection, RandomGaussianNoise, Release
from fedveil.training.batching import LastBatch, batch_sizes
from fedveil.tree import Params, add, expand, norms, scale, sub

if TYPE_CHECKING:
    from torch import Tensor

Earlier = Callable[[], Sequence[Sequence[tuple[Any, Any]]]]
"""For each client, what it was sent and what it answered in the earlier rounds on record."""


@dataclass(frozen=True)
class LocalSteps:
    """The local training behind an uploaded model, as the method's public configuration states it.

    Args:
        lr: Learning rate.
        batch_size: Examples in a batch. None: every step reads all examples, or so many of them at random that this is
            the best guess.
        epochs: Passes over the examples.
        momentum: Of local SGD.
        weight_decay: Of local SGD.
        steps: Number of steps, where that is not given by epochs.
        proximal: Weight of the proximal term.
        clip: The largest norm of what was sent, read as a gradient; None where it was not clipped as a whole.
        share: The factor of its model's change that a client sends.
        last_batch: What became of the remainder of an epoch.
    """

    lr: float
    batch_size: int | None
    epochs: int = 1
    momentum: float = 0.0
    weight_decay: float = 0.0
    steps: int | None = None
    proximal: float = 0.0
    clip: float | None = None
    share: float = 1.0
    last_batch: LastBatch = "merge"

    def clipped(self, norm: float) -> LocalSteps:
        """The same training where what is sent is clipped to `norm`; inf leaves it as it is."""
        return replace(self, clip=norm / (self.share * self.lr)) if math.isfinite(norm) else self

    def batches(self, examples: int) -> list[int]:
        """The sizes of the batches of one epoch."""
        return batch_sizes(examples, self.batch_size or max(1, examples), self.last_batch)

    def batch(self, examples: int) -> int:
        """The examples of one step, at most."""
        return max(self.batches(examples), default=0)

    def count(self, examples: int) -> int:
        """The steps of a client with so many examples."""
        return self.epochs * len(self.batches(examples)) if self.steps is None else self.steps

    def is_one_gradient(self, examples: int) -> bool:
        """Whether the model moved by nothing but the gradient of all examples."""
        return self.count(examples) == 1 and self.batch(examples) == examples and self.weight_decay == 0

    def passes(self, examples: int) -> int:
        """How often it begins to walk through its examples, each time in another order."""
        return ceil(self.count(examples) / max(1, len(self.batches(examples))))

    def gradients(self, examples: int) -> float:
        """How many gradients the change of the model sums up to: one for each step, which momentum repeats."""
        steps = self.count(examples)
        return sum((1 - self.momentum ** (steps - s)) / (1 - self.momentum) for s in range(steps))


@dataclass(frozen=True)
class Adaptation:
    """What the attacker knows of the defence and makes use of.

    mask   coordinates that were zeroed say nothing and are left out of the comparison
    sign   only signs were sent: candidates are compared by soft signs
    noise  layers that drown in noise of standard deviation `noise` count less than the one that stands out most;
           where all drown, all count alike
    small  only coordinates of at most `limit` are compared: larger ones were noised, these were not

    Args:
        kind: One of the above, or "none".
        noise: Standard deviation of the noise.
        limit: The largest magnitude that is compared.
    """

    kind: Literal["none", "mask", "sign", "noise", "small"] = "none"
    noise: float = 0.0
    limit: float = 0.0

    @classmethod
    def to_noise(cls, std: float) -> Adaptation:
        """To noise of this standard deviation in each entry; to nothing where it is zero."""
        return cls("noise", std) if std > 0 else cls()


@dataclass(frozen=True)
class TrainingStart:
    """Where K clients began to train.

    Args:
        params: Leaves `[1 or K, ...]`.
        drift: What was added to each of their gradients; None for nothing.
    """

    params: Params
    drift: Params | None = None


@dataclass(frozen=True)
class UploadReading:
    """What the uploads of K clients amount to, leaves `[K, ...]`.

    Args:
        start: The models that they were sent.
        models: Those that their uploads lead to.
        gradient: The upload as a gradient at `start`, zero in coordinates that were not sent; None where nothing says
            how long a step was.
    """

    start: Params
    models: Params
    gradient: Params | None

    @classmethod
    def of_gradient(cls, sent: Params, gradient: Params, lr: float) -> UploadReading:
        """A gradient `[K, ...]`, which leads to a step of `lr` against it."""
        start = expand(sent, _rows(gradient))
        return cls(start, add(start, gradient, scale=-lr), gradient)

    @classmethod
    def of_change(cls, sent: Params, change: Params, local: LocalSteps | None) -> UploadReading:
        """A change `[K, ...]` of the model that was sent."""
        start = expand(sent, _rows(change))
        return cls(start, add(start, change), _as_gradient(change, local))

    @classmethod
    def of_model(cls, sent: Params, models: Params, local: LocalSteps | None) -> UploadReading:
        """Models `[K, ...]`."""
        start = expand(sent, _rows(models))
        return cls(start, models, _as_gradient(sub(models, start), local))


def _rows(a: Params) -> int:
    return next(iter(a.values())).shape[0]


def _as_gradient(change: Params, local: LocalSteps | None) -> Params | None:
    return None if local is None else scale(change, -1 / (local.share * local.lr))


def read_fields(
    sent: Params, up: Message, local: LocalSteps | None, steps: LocalSteps | None
) -> UploadReading | None:
    """The reading of uploads whose fields say what they hold: `gradient`, `update` (a change of the model) or `params`.

    Args:
        sent: The models that the clients were sent.
        up: Their answers.
        local: The local training behind a model or its change.
        steps: The training that gives a gradient its step size.

    Returns:
        None where the uploads have none of these fields.
    """
    if (gradient := getattr(up, "gradient", None)) is not None:
        return UploadReading.of_gradient(sent, gradient, 1.0 if steps is None else steps.lr)
    if (update := getattr(up, "update", None)) is not None:
        return UploadReading.of_change(sent, update, local)
    if (params := getattr(up, "params", None)) is not None:
        return UploadReading.of_model(sent, params, local)
    return None


def noise_against_server(releases: Sequence[Release], round: int) -> float:
    """The noise multiplier of the first Gaussian release of a client that the server sees in this round; 0 if none."""
    seen = (r for r in releases if r.unit == "client" and "server" in r.visible_to and r.happens_in(round))
    return next((found for r in seen if (found := _multiplier(r.protection)) > 0), 0.0)


def _multiplier(protection: Protection) -> float:
    if isinstance(protection, GaussianNoise):
        return protection.multiplier
    if isinstance(protection, RandomGaussianNoise):
        drawn = zip(protection.multipliers, protection.weights, strict=True)
        return math.sqrt(math.fsum(weight * value**2 for value, weight in drawn))
    return 0.0


_TAIL = 1e-12
"""The probability with which the noise of an honest upload may be longer than its bound."""
_GRID = 2.0**-9
"""Rounding to the grid of the noise, whose step is at most 2^-10 of the standard deviation, relative to the bound."""
_FLOAT = 2.0**-21
"""Rounding of float32 when an update is added to a model and taken off again, relative to both."""


@dataclass(frozen=True)
class BoundedUpload:
    """What K clients clipped and perturbed before they sent it.

    Attributes:
        value: As far as it can be read from what was sent, `[K, ...]` in float64.
        mechanism: What clipped and perturbed it.
        error: How far `value` may be off by rounding, `[K]`.
        terms: Of how many vectors, each clipped, the value is the sum before noise.
    """

    value: Params
    mechanism: SumMechanism
    error: Tensor
    terms: float = 1.0

    @classmethod
    def of_values(cls, sent: Params, mechanism: SumMechanism) -> BoundedUpload:
        """Values that were sent as they are."""
        value = {name: leaf.double() for name, leaf in sent.items()}
        return cls(value, mechanism, norms(value) * _FLOAT)

    @classmethod
    def of_batch(
        cls, sent: Params, mechanism: SumMechanism, divisor: float, rate: float, records: int
    ) -> BoundedUpload:
        """Sums of a Poisson batch's clipped gradients that were sent divided by `divisor`.

        By Bernstein's inequality a batch exceeds the bound with the probability that `longest` allows.
        """
        value = {name: leaf.double() * divisor for name, leaf in sent.items()}
        mean, surprise = rate * records, math.log(1 / _TAIL)
        most = mean + surprise / 3 + math.sqrt((surprise / 3) ** 2 + 2 * mean * (1 - rate) * surprise)
        return cls(value, mechanism, norms(value) * _FLOAT, min(float(records), most))

    @classmethod
    def of_models(
        cls, sent: Params, start: Params, mechanism: SumMechanism, lr: float = 1.0
    ) -> BoundedUpload:
        """Updates that were sent as models `start + lr * update`."""
        ours = {name: leaf.double() for name, leaf in sent.items()}
        theirs = {name: leaf.double() for name, leaf in expand(start, len(next(iter(ours.values())))).items()}
        value = {name: (leaf - theirs[name]) / lr for name, leaf in ours.items()}
        return cls(value, mechanism, (norms(ours) + norms(theirs)) * (_FLOAT / lr))

    def lengths(self) -> Tensor:
        """The L2 norm of what each client sent, `[K]`."""
        return norms(self.value)

    def longest(self) -> Tensor:
        """The length that an honest upload exceeds with probability at most 1e-12 (of a batch: 2e-12), `[K]`.

        n C + s (sqrt(d) + sqrt(2 ln(1 / beta))) for a sum of n terms, by the concentration of the norm of d normal
        numbers, and rounding.

        **Guarantees** `tests/unit/methods/test_bounded_uploads.py::test_honest_uploads_are_within_the_bound`.
        """
        dimension = sum(leaf[0].numel() for leaf in self.value.values())
        spread = math.sqrt(dimension) + math.sqrt(2 * math.log(1 / _TAIL))
        bound = self.terms * self.mechanism.clip + self.mechanism.std * spread
        return bound * (1 + _GRID) + self.error
