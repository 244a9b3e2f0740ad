"""What a method's messages disclose: the values that its hooks return to attacks and audits.

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
"""For each client, the messages that it received and sent in earlier rounds of the transcript."""


@dataclass(frozen=True)
class LocalSteps:
    """The local training behind an uploaded model, as the method's public configuration states it.

    Args:
        lr: Learning rate.
        batch_size: Examples in a batch. None: every step uses all examples, or a random sample for which all examples
            are the best approximation.
        epochs: Passes over the examples.
        momentum: Momentum of local SGD.
        weight_decay: Weight decay of local SGD.
        steps: Number of steps, where it is not determined by epochs.
        proximal: Weight of the proximal term.
        clip: The largest norm of the upload, as a gradient; None where it was not clipped as a whole.
        share: The fraction of its model's change that a client sends.
        last_batch: How the remainder of an epoch is treated.
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
        """The same training with uploads clipped to `norm`; inf means no clipping."""
        return replace(self, clip=norm / (self.share * self.lr)) if math.isfinite(norm) else self

    def batches(self, examples: int) -> list[int]:
        """The sizes of the batches of one epoch."""
        return batch_sizes(examples, self.batch_size or max(1, examples), self.last_batch)

    def batch(self, examples: int) -> int:
        """The largest number of examples of one step."""
        return max(self.batches(examples), default=0)

    def count(self, examples: int) -> int:
        """The number of steps of a client with so many examples."""
        return self.epochs * len(self.batches(examples)) if self.steps is None else self.steps

    def is_one_gradient(self, examples: int) -> bool:
        """Whether the model's change is a single gradient of all examples."""
        return self.count(examples) == 1 and self.batch(examples) == examples and self.weight_decay == 0

    def passes(self, examples: int) -> int:
        """The number of passes over the examples, each in another order."""
        return ceil(self.count(examples) / max(1, len(self.batches(examples))))

    def gradients(self, examples: int) -> float:
        """The number of gradients that the model's change sums: one per step, more with momentum."""
        steps = self.count(examples)
        return sum((1 - self.momentum ** (steps - s)) / (1 - self.momentum) for s in range(steps))


@dataclass(frozen=True)
class Adaptation:
    """How the attacker adapts to a defence.

    mask   coordinates that were zeroed are left out of the comparison
    sign   only signs were sent: candidates are compared by soft signs
    noise  layers dominated by noise of standard deviation `noise` have less weight than the layer with the largest
           signal; if noise dominates all layers, they have equal weights
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
        """Adapt to noise of this standard deviation in each entry; no adaptation if it is zero."""
        return cls("noise", std) if std > 0 else cls()


@dataclass(frozen=True)
class TrainingStart:
    """The start of K clients' local training.

    Args:
        params: Leaves `[1 or K, ...]`.
        drift: The term added to each of their gradients; None for none.
    """

    params: Params
    drift: Params | None = None


@dataclass(frozen=True)
class UploadReading:
    """The uploads of K clients as models and gradients, leaves `[K, ...]`.

    Args:
        start: The models that they were sent.
        models: The models that result from their uploads.
        gradient: The upload as a gradient at `start`, zero in coordinates that were not sent; None where the step size
            is unknown.
    """

    start: Params
    models: Params
    gradient: Params | None

    @classmethod
    def of_gradient(cls, sent: Params, gradient: Params, lr: float) -> UploadReading:
        """From a gradient `[K, ...]`, followed by a step of size `lr`."""
        start = expand(sent, _rows(gradient))
        return cls(start, add(start, gradient, scale=-lr), gradient)

    @classmethod
    def of_change(cls, sent: Params, change: Params, local: LocalSteps | None) -> UploadReading:
        """From a change `[K, ...]` of the model that was sent."""
        start = expand(sent, _rows(change))
        return cls(start, add(start, change), _as_gradient(change, local))

    @classmethod
    def of_model(cls, sent: Params, models: Params, local: LocalSteps | None) -> UploadReading:
        """From models `[K, ...]`."""
        start = expand(sent, _rows(models))
        return cls(start, models, _as_gradient(sub(models, start), local))


def _rows(a: Params) -> int:
    return next(iter(a.values())).shape[0]


def _as_gradient(change: Params, local: LocalSteps | None) -> Params | None:
    return None if local is None else scale(change, -1 / (local.share * local.lr))


def read_fields(
    sent: Params, up: Message, local: LocalSteps | None, steps: LocalSteps | None
) -> UploadReading | None:
    """The reading of uploads by their field names: `gradient`, `update` (a change of the model) or `params`.

    Args:
        sent: The models that the clients were sent.
        up: Their answers.
        local: The local training behind a model or its change.
        steps: The training that determines the step size of a gradient.

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
    """The multiplier of the first Gaussian client-level release visible to the server in this round; 0 if none."""
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
"""The probability that the noise of an honest upload exceeds its bound."""
_GRID = 2.0**-9
"""Rounding to the grid of the noise, whose step is at most 2^-10 of the standard deviation, relative to the bound."""
_FLOAT = 2.0**-21
"""Relative rounding error of float32 when an update is added to a model and subtracted again."""


@dataclass(frozen=True)
class BoundedUpload:
    """The value that K clients clipped and perturbed before they sent it.

    Attributes:
        value: The value as recovered from the upload, `[K, ...]` in float64.
        mechanism: The mechanism that clipped and perturbed it.
        error: A bound on the rounding error of `value`, `[K]`.
        terms: The number of clipped vectors that the value sums before noise.
    """

    value: Params
    mechanism: SumMechanism
    error: Tensor
    terms: float = 1.0

    @classmethod
    def of_values(cls, sent: Params, mechanism: SumMechanism) -> BoundedUpload:
        """From values that were sent directly."""
        value = {name: leaf.double() for name, leaf in sent.items()}
        return cls(value, mechanism, norms(value) * _FLOAT)

    @classmethod
    def of_batch(
        cls, sent: Params, mechanism: SumMechanism, divisor: float, rate: float, records: int
    ) -> BoundedUpload:
        """From sums of a Poisson batch's clipped gradients that were sent divided by `divisor`.

        The bound on the batch size is by Bernstein's inequality, with the failure probability of `longest`.
        """
        value = {name: leaf.double() * divisor for name, leaf in sent.items()}
        mean, surprise = rate * records, math.log(1 / _TAIL)
        most = mean + surprise / 3 + math.sqrt((surprise / 3) ** 2 + 2 * mean * (1 - rate) * surprise)
        return cls(value, mechanism, norms(value) * _FLOAT, min(float(records), most))

    @classmethod
    def of_models(
        cls, sent: Params, start: Params, mechanism: SumMechanism, lr: float = 1.0
    ) -> BoundedUpload:
        """From updates that were sent as models `start + lr * update`."""
        ours = {name: leaf.double() for name, leaf in sent.items()}
        theirs = {name: leaf.double() for name, leaf in expand(start, len(next(iter(ours.values())))).items()}
        value = {name: (leaf - theirs[name]) / lr for name, leaf in ours.items()}
        return cls(value, mechanism, (norms(ours) + norms(theirs)) * (_FLOAT / lr))

    def lengths(self) -> Tensor:
        """The L2 norm of each client's value, `[K]`."""
        return norms(self.value)

    def longest(self) -> Tensor:
        """The norm that an honest upload exceeds with probability at most 1e-12 (for a batch 2e-12), `[K]`.

        n C + s (sqrt(d) + sqrt(2 ln(1 / beta))) for a sum of n terms, by concentration of the norm of d normal
        variables, plus the rounding error.

        **Guarantees** `tests/unit/methods/test_bounded_uploads.py::test_honest_uploads_are_within_the_bound`.
        """
        dimension = sum(leaf[0].numel() for leaf in self.value.values())
        spread = math.sqrt(dimension) + math.sqrt(2 * math.log(1 / _TAIL))
        bound = self.terms * self.mechanism.clip + self.mechanism.std * spread
        return bound * (1 + _GRID) + self.error
