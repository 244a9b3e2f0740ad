"""DP-FedAGS: noise on the significant gradients only, clients weighted by data size and loss.

Zhang, Mao, Tu, He, Ping, Wu: Optimizing Privacy-Accuracy Trade-off in DP-FL via Significant Gradient
Perturbation. Algorithm 1; no code is public.

Symbols: g' clipped gradient, C `clip`, dS `sensitivity`, q `selections`, E `epochs`, B `batch_size`, eta `lr`,
t and T round and rounds of the plan, |W| number of parameters, eps `epsilon` = eps1 + eps2 + eps3 where
eps1 + eps2 = `selection_share` * eps and eps1 : eps2 = q^(2/3) : 1, sigma `printed_sigma`, zeta = e^-eps.

Privacy: the paper claims eps. Nothing can be proven: unselected coordinates, the loss and the size are sent without
noise, and the threshold depends on the data. `dp-fedags-proven` keeps the idea and has a guarantee.

Deviations and readings:
- The listing adds Gaussian noise, the proof Laplace noise: `noise_kind`.
- Eq. 35 sorts in ascending order, so the threshold is lowest in early rounds; the text says highest. The
  equation is followed. Signed values are compared, as printed; `compare = "magnitude"` compares |g'|.
- Eq. 37 gives more weight to a higher loss, the text argues the opposite: `loss_weight = "inverse"`.
- Lines 17 to 20 print one gradient per local epoch; an epoch here is a pass of mini-batches, as B is an input.
- Not specified by the paper and chosen here: q = 1, with which line 23's scales are those of Section IV; E = 1;
  eps1 + eps2 = eps / 10; alpha and beta per coordinate; and dS, which can be read in several ways. A number is taken as
  it is: dS = C = 1, the default, is a client's sensitivity, and 2C / B is what one record moves in the mean gradient of
  a batch. `sensitivity = "record"` is 2C / n_k, what one of n_k records moves in a mean over all. Neither of the
  last two is a proven sensitivity: the update is clipped as a whole, not the gradient of each record.
- If no client has a loss, the weights are n_k / n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as record
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.messages import Message
from fedveil.methods.disclosure import Adaptation, LocalSteps
from fedveil.methods.fields import STRICT, LocalTraining, PositiveFinite
from fedveil.methods.method import At, register, unprotected
from fedveil.methods.shared_model import AggregatedModel, Model, Server, averaging_weights
from fedveil.privacy.clipping import clip_rows
from fedveil.privacy.distortions import Additive, NoiseKind, NoisyComparison
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams, Stream
from fedveil.task import Task
from fedveil.tree import Params, State, add, flatten, scale, sub, unflatten, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor

Compare = Literal["signed", "magnitude"]
LossWeight = Literal["proportional", "inverse", "none"]

Sensitivity = PositiveFinite | Literal["record"]
Share = Annotated[float, Field(gt=0, lt=1)]
UNTOUCHED = 0.02  # share of the clip: coordinates above it are likely noised, smaller ones are not


@record(frozen=True)
class Gradient(Message):
    gradient: Params
    loss: Tensor
    size: Tensor


def printed_sigma(epsilon: float, sensitivity: float = 1.0) -> float:
    """dS / eps * sqrt(2 ln(1.25 / zeta)) with zeta = e^-eps: 8.04, 4.60, 2.41 for eps 0.1, 0.2, 0.5."""
    return sensitivity / epsilon * math.sqrt(2 * (math.log(1.25) + epsilon))


def sensitivities(sensitivity: float | Literal["record"], clip: float, sizes: Tensor) -> list[float]:
    """dS of each client: the number, or 2C / n_k for `"record"`."""
    if sensitivity == "record":
        return [2 * clip / max(1, n) for n in sizes.tolist()]
    return [sensitivity] * len(sizes)


def threshold_place(round: int, rounds: int, parameters: int) -> int:
    """The place (from 1) of Eq. 35's threshold among the sorted values: of two places, the lower one."""
    if rounds < 1 or parameters < 1:
        raise InputError("run.rounds", rounds, "is not a number of rounds", "Use at least 1 round.")
    by_round, by_share = -(-round * parameters // rounds), -(-9 * parameters // 10)
    return min(max(1, min(by_round, by_share)), parameters)


def accumulated_gradient(start: Params, trained: Params, lr: float) -> Params:
    """(w0 - w) / eta: for plain SGD the sum of the local gradients."""
    return scale(sub(start, trained), 1 / lr)


def significant(
    value: Tensor,
    place: int,
    scales: tuple[float, float],
    streams: Sequence[Stream],
) -> Tensor:
    """Line 25: the coordinates of `value` `[K, d]` that pass the noisy comparison; scales (0, 0) compare exactly."""
    threshold = value.kthvalue(place, dim=1, keepdim=True).values  # lambda_t
    return NoisyComparison(scales)(value, threshold, streams)


def aggregation_weights(sizes: Tensor, losses: Tensor, loss_weight: LossWeight) -> Tensor:
    """Eq. 37: (n_k L + n L_k) / (2 n L), which sums to 1; n_k / n where no client has a loss.

    "inverse" replaces L_k / L by (L - L_k) / ((K - 1) L), over the K clients that have examples.
    """
    by_size = averaging_weights(sizes, "size" if bool((sizes > 0).any()) else "uniform")
    losses = losses.double()
    total = losses.sum()
    if loss_weight == "none" or not bool(total > 0):
        return by_size
    share = losses / total
    if loss_weight == "inverse":
        there = (sizes > 0).double()
        count = int(there.sum())
        share = there * (1 - share) / (count - 1) if count > 1 else there / there.sum()
    return (by_size + share) / 2


@register(
    "dp-fedags",
    "noise on significant gradients only, weights by size and loss; its epsilon is a claim, not a proof",
    server=Server,
    down=Model,
    up=Gradient,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPFedAGS(LocalTraining, AggregatedModel[Gradient]):
    clip: PositiveFinite = 1.0
    """Largest L2 norm of a client's gradient."""
    epsilon: PositiveFinite = 0.1
    """The epsilon that the paper claims for one upload; nothing is proven for it."""
    sensitivity: Sensitivity = 1.0
    """Sensitivity in the printed noise: a number, or "record" for 2 clip / records of the client."""
    selections: PositiveFinite = 1.0
    """Number of coordinates that the selection is calibrated for (q in the paper)."""
    selection_share: Share = 0.1
    """Share of `epsilon` that is spent on the selection of coordinates."""
    selection_noise: bool = True
    """Whether the comparison with the threshold is noisy, as printed."""
    noise_kind: NoiseKind = "gaussian"
    """Noise on selected coordinates: Gaussian as in the listing, Laplace as in the proof."""
    compare: Compare = "signed"
    """Whether signed values or magnitudes are compared with the threshold."""
    loss_weight: LossWeight = "proportional"
    """How a client's loss affects its weight: as printed, inverted as the text argues, or not at all."""

    def unused_fields(self) -> Mapping[str, str]:
        unused = dict(super().unused_fields())
        # The printed sigma is of the whole epsilon.
        if not self.selection_noise and self.noise_kind == "gaussian":
            remedy = 'Leave it out, or set selection_noise = true or noise_kind = "laplace".'
            unused |= {"selections": remedy, "selection_share": remedy}
        return unused

    @property
    def budgets(self) -> tuple[float, float, float]:
        """eps1, eps2, eps3."""
        both = self.selection_share * self.epsilon
        ratio = self.selections ** (2 / 3)
        return both * ratio / (1 + ratio), both / (1 + ratio), self.epsilon - both

    def selection_scales(self, sensitivity: float) -> tuple[float, float]:
        """The Laplace scales of alpha and beta."""
        if not self.selection_noise:
            return 0.0, 0.0
        eps1, eps2, _ = self.budgets
        return self.selections * sensitivity / eps1, self.selections * sensitivity / eps2

    def noise_scale(self, sensitivity: float) -> float:
        """The Laplace scale, or the standard deviation, of the noise on significant coordinates."""
        if self.noise_kind == "laplace":
            return self.selections * sensitivity / self.budgets[2]
        return printed_sigma(self.epsilon, sensitivity) * self.clip

    def init_server(self, params: Params, plan: Plan) -> Server:
        count = sum(leaf.numel() for leaf in params.values())
        if self.selections > count:
            raise InputError(
                "method.selections",
                self.selections,
                f"the model has only {count} parameters",
                f"Use a number in (0, {count}].",
            )
        return super().init_server(params, plan)

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Gradient, State]:
        trained = self.train(task, at, down.params, data, rng, track_loss=True)
        assert trained.loss is not None
        gradient = accumulated_gradient(down.params, trained.params, self.lr_at(at))  # line 21
        clipped = flatten(clip_rows(gradient, self.clip))  # line 22
        noisy = self.perturb(clipped, at, rng, data.sizes)
        return Gradient(unflatten(noisy, gradient), trained.loss, data.sizes), state

    def perturb(self, clipped: Tensor, at: At, rng: ClientStreams, sizes: Tensor) -> Tensor:
        """Lines 23-29 on clipped gradients `[K, d]`; coordinates that are not significant are unchanged."""
        scales = sensitivities(self.sensitivity, self.clip, sizes)
        if len(set(scales)) <= 1:
            return self._perturb(clipped, at, rng, scales[0]) if scales else clipped
        each = [self._perturb(clipped[k : k + 1], at, rng.rows([k]), scale) for k, scale in enumerate(scales)]
        return torch.cat(each)

    def _perturb(self, clipped: Tensor, at: At, rng: ClientStreams, sensitivity: float) -> Tensor:
        compared = clipped.abs() if self.compare == "magnitude" else clipped
        place = threshold_place(at.round, at.plan.rounds, clipped.shape[1])
        chosen = significant(compared, place, self.selection_scales(sensitivity), rng.noise("selection"))
        return Additive(self.noise_kind, self.noise_scale(sensitivity)).where(chosen, clipped, rng.noise())

    def aggregate(self, task: Task, at: At, w: Params, up: Gradient) -> Params:
        gamma = aggregation_weights(up.size, up.loss, self.loss_weight)  # line 10
        gradient = weighted_sum(up.gradient, gamma)  # line 11
        return add(w, gradient, scale=-self.lr_at(at))  # line 12

    def releases(self, plan: Plan) -> Sequence[Release]:
        return unprotected(
            "each client's gradient, loss and size",
            "coordinates that are not selected carry no noise, the threshold is computed from the data, "
            "and the loss and the size are sent as they are",
        )

    def paper_claim(self, plan: Plan) -> str | None:
        return (
            f"epsilon {self.epsilon:g} for a client's gradient, by a proof that assumes neighbours "
            "to differ only where noise is added"
        )

    def local_training(self, at: At) -> LocalSteps:
        return replace(super().local_training(at), clip=self.clip)  # of the gradient itself

    def adaptation(self, at: At, dimension: int, examples: int) -> Adaptation:
        return Adaptation("small", limit=UNTOUCHED * self.clip)
