"""Losses for regression and survival analysis (times until an event that may be censored).

Survival data are learned by discrete-time hazards, a loss of single records that works with record-level privacy
(Gensheimer, Narasimhan: A Scalable Discrete-Time Survival Model for Neural Networks. PeerJ 2019), or by the partial
likelihood of a batch (Cox: Regression Models and Life-Tables. JRSS B 1972; ties as in Breslow), which compares
records, so the influence of a single record cannot be bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from fedveil.lazy_torch import functional, torch

if TYPE_CHECKING:
    from torch import Tensor


Target = Literal["classes", "number", "survival"]
LossName = Literal["squared", "huber", "hazard", "cox"]
TARGETS: Mapping[LossName, Target] = {
    "squared": "number",
    "huber": "number",
    "hazard": "survival",
    "cox": "survival",
}
"""The kind of target that each loss learns. Classification losses are not listed."""


class TargetLoss(Protocol):
    """The loss of every example, from outputs `[B, ...]` and labels `[B]`."""

    target: ClassVar[Target]
    compares: ClassVar[bool]
    """Whether the loss of one example depends on the others of its batch."""

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class WeightedCrossEntropy:
    """Cross-entropy times a public weight of the example's class."""

    weights: tuple[float, ...]
    target: ClassVar[Target] = "classes"
    compares: ClassVar[bool] = False

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        weights = torch.tensor(self.weights, dtype=outputs.dtype, device=outputs.device)
        return functional.cross_entropy(outputs, y, reduction="none") * weights[y]


@dataclass(frozen=True)
class Squared:
    """The squared error of standardised numbers; `scale` leads back to the units of the table."""

    scale: float = 1.0
    target: ClassVar[Target] = "number"
    compares: ClassVar[bool] = False

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs.squeeze(-1) - y).square()


@dataclass(frozen=True)
class Huber:
    """Quadratic up to an error of one standard deviation, then linear."""

    scale: float = 1.0
    target: ClassVar[Target] = "number"
    compares: ClassVar[bool] = False

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return functional.huber_loss(outputs.squeeze(-1), y, reduction="none")


@dataclass(frozen=True)
class Hazard:
    """The negative log-likelihood of discrete-time hazards.

    Output k is the logit of an event in interval k, given none before. A label is 2 k + e: e = 1 for an event in
    interval k, e = 0 for a record censored there, of which only the intervals before k are known.
    """

    target: ClassVar[Target] = "survival"
    compares: ClassVar[bool] = False

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        index, event = (y // 2).unsqueeze(-1), (y % 2).to(outputs.dtype).unsqueeze(-1)
        places = torch.arange(outputs.shape[-1], device=outputs.device)
        before = (places < index).to(outputs.dtype)
        here = (places == index).to(outputs.dtype) * event
        # -log(1 - h) = softplus(logit), -log(h) = softplus(-logit)
        return (functional.softplus(outputs) * before + functional.softplus(-outputs) * here).sum(-1)


@dataclass(frozen=True)
class Cox:
    """The negative log partial likelihood of a batch, per event.

    A label is the time: positive for an event, negative for a censored record. Padding has time 0, so it is in no
    risk set.
    """

    target: ClassVar[Target] = "survival"
    compares: ClassVar[bool] = True

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        risk, time = outputs.squeeze(-1), y.abs()
        at_risk = time.unsqueeze(0) >= time.unsqueeze(1)  # [i, j]: j is at risk when i has its event
        total = torch.logsumexp(risk.unsqueeze(0).masked_fill(~at_risk, -torch.inf), dim=1)
        return (total - risk) * (y > 0).to(risk.dtype)


def target_of(loss: object) -> Target:
    """The kind of target that a loss learns; functions other than those above learn classes."""
    found: Target = getattr(loss, "target", "classes")
    return found


def named_loss(name: LossName, scale: float = 1.0) -> TargetLoss:
    """The loss of this name; `scale` is the standard deviation of the numbers."""
    if name == "hazard":
        return Hazard()
    if name == "cox":
        return Cox()
    return (Huber if name == "huber" else Squared)(scale)


def labels_end(loss: object, outputs: int) -> int | None:
    """One more than the largest valid label, whose range begins at 0; None where labels are numbers."""
    if target_of(loss) == "classes":
        return outputs
    return 2 * outputs + 1 if isinstance(loss, Hazard) else None


def survival_of(outputs: Tensor) -> Tensor:
    """The survival probability at the end of each interval, `[B, intervals]`, from the outputs of a hazard model."""
    return torch.exp(-functional.softplus(outputs).cumsum(-1))


def risk_of(loss: object, outputs: Tensor) -> Tensor:
    """A number per example that is larger the earlier its event is expected."""
    return -survival_of(outputs).sum(-1) if isinstance(loss, Hazard) else outputs.squeeze(-1)


def times_of(loss: object, y: Tensor) -> tuple[Tensor, Tensor]:
    """Times (of hazards the interval) and whether each is an event."""
    if isinstance(loss, Hazard):
        return (y // 2).to(torch.float64), y % 2 == 1
    return y.abs().to(torch.float64), y > 0
