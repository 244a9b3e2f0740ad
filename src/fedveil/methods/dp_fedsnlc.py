"""DP-FedSNLC: noise only on coordinates that are significant by the change of the local loss.

A baseline of DP-FedAGS (see `dp_fedags.py`), which describes it in one sentence: it "evaluates the significance
of gradients by assessing changes in the loss function and applies noise perturbation to the significant
gradients". The cited work has no such algorithm, and no code is public, so this is fedveil's interpretation.

Symbols: g accumulated gradient (w0 - w) / eta, clipped to C `clip`; h gradient of the local loss at w0;
c_i = |h_i (w0 - w)_i| is the first-order change of the loss due to coordinate i. The smallest set of coordinates
that explains the share `explained` of sum c_i is significant and gets Gaussian noise of DP-FedAGS's printed sigma;
the others are sent without noise. Weights n_k / n.

Privacy: as with DP-FedAGS, nothing can be proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass as record
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.lazy_torch import torch
from fedveil.messages import Message
from fedveil.methods.disclosure import Adaptation, LocalSteps
from fedveil.methods.dp_fedags import (
    UNTOUCHED,
    Sensitivity,
    Share,
    accumulated_gradient,
    printed_sigma,
    sensitivities,
)
from fedveil.methods.fields import STRICT, LocalTraining, PositiveFinite
from fedveil.methods.method import At, register, unprotected
from fedveil.methods.shared_model import AggregatedModel, Model, Server, averaging_weights
from fedveil.privacy.clipping import clip_rows
from fedveil.privacy.distortions import Additive
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams
from fedveil.task import Task
from fedveil.tree import Params, State, add, expand, flatten, unflatten, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor


@record(frozen=True)
class SizedGradient(Message):
    gradient: Params
    size: Tensor


def explaining(change: Tensor, share: float) -> Tensor:
    """The smallest set of coordinates of each row that sums to `share` of the row; none if the row is zero."""
    ordered, places = change.sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(1) - ordered
    needed = (before < share * ordered.sum(1, keepdim=True)) & (ordered > 0)
    return torch.zeros_like(needed).scatter_(1, places, needed)


@register(
    "dp-fedsnlc",
    "noise where the change of the loss marks significance; its epsilon is a claim, not a proof",
    server=Server,
    down=Model,
    up=SizedGradient,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPFedSNLC(LocalTraining, AggregatedModel[SizedGradient]):
    clip: PositiveFinite = 1.0
    """Largest L2 norm of a client's gradient."""
    epsilon: PositiveFinite = 0.1
    """The epsilon that is claimed for one upload; nothing is proven for it."""
    sensitivity: Sensitivity = 1.0
    """Sensitivity in the printed noise: a number, or "record" for 2 clip / records of the client."""
    explained: Share = 0.9
    """Share of the change of the loss that the significant coordinates explain."""

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[SizedGradient, State]:
        trained = self.train(task, at, down.params, data, rng)
        gradient = accumulated_gradient(down.params, trained.params, self.lr_at(at))
        slope = task.grad(expand(down.params, data.count), data.everything())
        noisy = self.perturb(flatten(clip_rows(gradient, self.clip)), flatten(slope), rng, data.sizes)
        return SizedGradient(unflatten(noisy, gradient), data.sizes), state

    def perturb(self, clipped: Tensor, slope: Tensor, rng: ClientStreams, sizes: Tensor) -> Tensor:
        """Add noise to coordinates that are significant by the product of `clipped` and `slope`."""
        chosen = explaining((clipped * slope).abs(), self.explained)
        noisy = clipped.clone()
        for k, sensitivity in enumerate(sensitivities(self.sensitivity, self.clip, sizes)):
            row, std = slice(k, k + 1), printed_sigma(self.epsilon, sensitivity) * self.clip
            noisy[row] = Additive("gaussian", std).where(chosen[row], clipped[row], rng.rows([k]).noise())
        return noisy

    def aggregate(self, task: Task, at: At, w: Params, up: SizedGradient) -> Params:
        weights = averaging_weights(up.size, "size")
        return add(w, weighted_sum(up.gradient, weights), scale=-self.lr_at(at))

    def releases(self, plan: Plan) -> Sequence[Release]:
        return unprotected(
            "each client's gradient and size",
            "coordinates that are not selected carry no noise, and which are selected is decided by the data",
        )

    def paper_claim(self, plan: Plan) -> str | None:
        return f"epsilon {self.epsilon:g}, as DP-FedAGS's comparison states it; no proof is given there"

    def local_training(self, at: At) -> LocalSteps:
        return replace(super().local_training(at), clip=self.clip)  # of the gradient itself

    def adaptation(self, at: At, dimension: int, examples: int) -> Adaptation:
        return Adaptation("small", limit=UNTOUCHED * self.clip)
