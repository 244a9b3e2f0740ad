"""DP-FedAGS with a proof: only some coordinates are sent, and all of them carry noise.

The idea of DP-FedAGS (see `dp_fedags.py`) with a guarantee against every adversary. The update is
g = (w0 - w) / eta; `variant` decides which of its coordinates a client sends:

- "everywhere" (V0): all of them, clipped to C, noise sigma C on each.
- "public-mask" (V1): those of a mask that the server derives from the noisy aggregates it has published; g is
  clipped on the mask and noised there. The mask is post-processing, so epsilon is that of V0, and since it is
  public no index is sent.
- "top-k" (V2): each client's own largest, chosen by one-shot Gumbel noise, then clipped and noised.
  rho = k eps0^2 / 8 + 1 / (2 sigma'^2).
- "sparse-vector" (V3): at most c coordinates whose magnitude passes a public threshold, by the sparse vector
  technique with Laplace noise: pure epsilon `upload_epsilon`.

Other coordinates are not sent and count as zero: an upload has k values (V2, V3: and k positions).

`unit = "record"` (V0, V1) protects single records instead: g is the mean of the records' gradients at w0, each clipped
to C, one step on all n_k records per round; `batch_size` is not used. n_k is public. One record changes the sum by at
most C under zero-out and by 2C under replace-one, the mean by C / n_k and 2C / n_k; the sum gets noise sigma C.

Symbols: C `clip`, sigma `noise_multiplier`, k = ceil(`selected` |W|), eta `lr`. V2 spends the share
`selection_share` of rho = 1 / (2 sigma^2) on the choice: its upload has the zCDP of V0's, for any k.

Deviations from DP-FedAGS: losses are not sent, the weights are 1 / K. V1 fills the share `explore` of its mask
with coordinates drawn at random, since it would otherwise never leave its first mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as record
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.messages import Message, Record
from fedveil.methods.disclosure import Adaptation, BoundedUpload, LocalSteps, UploadReading
from fedveil.methods.dp_fedags import Share, accumulated_gradient
from fedveil.methods.fields import STRICT, Clip, LocalTraining, NoiseMultiplier, NonNegative, PositiveFinite
from fedveil.methods.method import At, ClientSum, Method, register
from fedveil.privacy.mechanisms import SparseVector, SumMechanism, TopKGaussian, Unnoised, gaussian
from fedveil.privacy.private_sum import CohortNoise, NoisySum, exact_total, private_sum
from fedveil.privacy.releases import ADVERSARIES, Plan, PostProcessing, Release
from fedveil.streams import ClientStreams, ServerStreams, named_stream
from fedveil.task import Task
from fedveil.training.private_sgd import dropout_streams, private_gradient
from fedveil.tree import Params, State, expand, flatten, moved, unflatten, with_axis, without_axis

if TYPE_CHECKING:
    from torch import Tensor

Variant = Literal["everywhere", "public-mask", "top-k", "sparse-vector"]
_PUBLIC = ("everywhere", "public-mask")


@record(frozen=True)
class Server(Record):
    params: Params
    seen: Tensor
    """The last noisy mean of each coordinate, `[|W|]`; published with the model, so its use is post-processing."""


@record(frozen=True)
class ModelAndMask(Message):
    params: Params
    mask: dict[str, Tensor]
    """`places` `[1, k]`: the coordinates that all clients send; empty where all or private ones are sent."""
    cohort: int = 0
    """The number of invited clients, where the server completes the noise of their sum."""


@record(frozen=True)
class Selected(Message):
    values: Tensor
    own: dict[str, Tensor]
    """`places` `[K, k]` where each client chose its own coordinates; empty where the mask is public."""
    cohort: int = 0
    """The size of the cohort, if that was announced to the client."""


def public_mask(published: Tensor, count: int, explore: float, round: int) -> Tensor:
    """`count` positions in ascending order: the largest |published|, and a share drawn at random in each round.

    Computed from published values and a public seed only.
    """
    order = torch.from_numpy(named_stream(0, "public mask", round).permutation(len(published))).to(
        published.device
    )
    largest = count - min(count, math.ceil(explore * count))
    best = order[published[order].abs().argsort(descending=True, stable=True)][:largest]
    taken = torch.zeros(len(published), dtype=torch.bool, device=published.device)
    taken[best] = True
    others = order[~taken[order]][: count - largest]
    return torch.cat([best, others]).sort().values


def scattered(values: Tensor, places: Tensor, size: int) -> Tensor:
    """Rows of `size` with `values` `[K, k]` at `places` `[1 or K, k]` and zero elsewhere; equal places are summed."""
    dense = values.new_zeros(values.shape[0], size)
    return dense.scatter_add_(1, places.long().expand(values.shape), values)


@register(
    "dp-fedags-proven",
    "DP-FedAGS with a guarantee: selected coordinates are clipped and noised, nothing else is sent",
    server=Server,
    down=ModelAndMask,
    up=Selected,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class DPFedAGSProven(LocalTraining, Method[Server, ModelAndMask, Selected]):
    variant: Variant = "public-mask"
    """Which coordinates a client sends: all, those of a public mask, its largest by a private choice, or those that
    pass a noisy threshold."""
    unit: Literal["client", "record"] = "client"
    """Who is protected: a whole client, or each record (one step on all records per round)."""
    clip: Clip = 1.0
    noise_multiplier: NoiseMultiplier = 1.0
    selected: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the coordinates that is sent."""
    explore: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of a public mask that is drawn at random."""
    selection_share: Share = 0.1
    """Share of the zCDP budget of "top-k" that is spent on the choice of coordinates."""
    upload_epsilon: PositiveFinite | None = None
    """Epsilon of one upload of "sparse-vector"; needed there."""
    threshold: NonNegative = 0.05
    """Public threshold that a magnitude must pass in "sparse-vector"."""

    @model_validator(mode="after")
    def _one_price(self) -> DPFedAGSProven:
        sparse = self.variant == "sparse-vector"
        if sparse and self.upload_epsilon is None:
            raise InputError(
                "method.upload_epsilon",
                None,
                "sparse-vector needs its epsilon",
                "Give the epsilon of one upload.",
            )
        if not sparse and self.upload_epsilon is not None:
            raise InputError(
                "method.upload_epsilon",
                self.upload_epsilon,
                f"{self.variant} depends on noise_multiplier",
                'Leave it out, or use variant = "sparse-vector".',
            )
        if self.variant not in _PUBLIC and not math.isfinite(self.clip):
            raise InputError(
                "method.clip",
                self.clip,
                f"{self.variant} chooses by noise scaled to the clip",
                "Use a finite clip.",
            )
        if self.variant == "top-k" and self.noise_multiplier == 0:
            raise InputError(
                "method.noise_multiplier", 0.0, "top-k chooses by noise", "Use a number above 0."
            )
        if self.unit == "record":
            self._require_one_step()
        return self

    def unused_fields(self) -> Mapping[str, str]:
        unused = dict(super().unused_fields())
        if self.variant == "everywhere":
            unused["selected"] = 'Leave it out: "everywhere" sends every coordinate.'
        if self.variant != "public-mask":
            unused["explore"] = 'Leave it out: only a "public-mask" is drawn at random in part.'
        if self.variant not in ("top-k", "sparse-vector"):
            unused["selection_share"] = 'Leave it out: only "top-k" and "sparse-vector" choose by noise.'
        if self.variant != "sparse-vector":
            unused["threshold"] = 'Leave it out, or set variant = "sparse-vector".'
        if self.unit == "record":
            unused["last_batch"] = unused["batch_size"] = (
                "Leave it out: records are protected in one step on all of them."
            )
        return unused

    def _require_one_step(self) -> None:
        """Refuse configurations for which the sensitivity of a record is not proven."""
        if self.variant not in _PUBLIC:
            raise InputError(
                "method.variant",
                self.variant,
                "is proven for clients only",
                'Use "everywhere" or "public-mask".',
            )
        plain = {"epochs": 1, "momentum": 0.0, "weight_decay": 0.0, "local_steps": None}
        for field, only in plain.items():
            if getattr(self, field) != only:
                raise InputError(
                    f"method.{field}",
                    getattr(self, field),
                    "records are protected in one step on all of them",
                    f"Use {only}." if only is not None else "Leave it out.",
                )

    @property
    def _completed(self) -> bool:
        """Whether the server completes the noise of the sum."""
        return self.variant in _PUBLIC and self.unit == "client"

    def count(self, parameters: int) -> int:
        """How many coordinates a client sends."""
        if self.variant == "everywhere":
            return parameters
        return max(1, math.ceil(self.selected * parameters))

    def init_server(self, params: Params, plan: Plan) -> Server:
        place = next(iter(params.values())).device
        return Server(params, torch.zeros(sum(leaf.numel() for leaf in params.values()), device=place))

    def broadcast(self, at: At, server: Server, clients: Sequence[int]) -> ModelAndMask:
        mask: dict[str, Tensor] = {}
        if self.variant == "public-mask":
            places = public_mask(server.seen, self.count(len(server.seen)), self.explore, at.round)
            mask["places"] = places.to(torch.int32).unsqueeze(0)
        return ModelAndMask(with_axis(server.params), mask, len(clients) if self._completed else 0)

    def client_update(
        self, task: Task, at: At, down: ModelAndMask, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Selected, State]:
        if self.unit == "record":
            return Selected(self._of_records(task, down, data, rng), {}), state
        chosen, after = self._gradient(task, at, down, data, state, rng)
        if self.variant == "top-k":
            return self._own_largest(chosen["values"], rng), after
        if self.variant == "sparse-vector":
            return self._above_threshold(chosen["values"], rng), after
        noisy = self._noise(at.plan).upload(down.cohort)(chosen, rng.noise())
        return Selected(noisy["values"], {}, down.cohort), after

    def _gradient(
        self, task: Task, at: At, down: ModelAndMask, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Params, State]:
        """The gradients `[K, k]`, restricted to the public mask if there is one."""
        trained = self.train(task, at, down.params, data, rng)
        gradient = flatten(accumulated_gradient(down.params, trained.params, self.lr_at(at)))
        if down.mask:
            gradient = gradient.index_select(1, down.mask["places"][0].long())
        return {"values": gradient}, state

    def client_sum(self) -> ClientSum[Server, ModelAndMask]:
        """Under secure aggregation sigma is the noise of the sum, not that of each upload."""
        if self.unit == "record":
            raise InputError(
                "method.unit",
                self.unit,
                "clients add their noise themselves",
                'Use unit = "client", or aggregation.kind = "plain".',
            )
        if self.variant not in _PUBLIC:
            raise InputError(
                "method.variant",
                self.variant,
                "each client sends its own positions, so the server needs single uploads",
                f'Use {" or ".join(_PUBLIC)}, or aggregation.kind = "plain".',
            )
        mechanism = gaussian(self.clip, self.noise_multiplier)

        def shapes(down: ModelAndMask) -> dict[str, torch.Size]:
            parameters = sum(leaf[0].numel() for leaf in down.params.values())
            return {"values": torch.Size([self.count(parameters)])}

        what = "the sum of the selected coordinates"
        return ClientSum(mechanism, self._gradient, self._after_sum, what, shapes=shapes)

    def _after_sum(self, at: At, server: Server, total: NoisySum) -> Server:
        """The server after the mean of the coordinates that all clients sent."""
        everywhere = torch.arange(len(server.seen), device=server.seen.device).unsqueeze(0)
        places = self.broadcast(at, server, ()).mask.get("places", everywhere)
        mean = total.mean()["values"]
        seen = server.seen.clone()
        seen[places[0].long()] = mean.to(seen)
        return self._moved(at, server, scattered(mean.unsqueeze(0), places, len(server.seen))[0], seen)

    def record_mechanism(self) -> SumMechanism:
        """Protects the sum of the records' gradients; `releases` accounts for it, `unit = "record"`."""
        return gaussian(self.clip, self.noise_multiplier)

    def _of_records(self, task: Task, down: ModelAndMask, data: ClientData, rng: ClientStreams) -> Tensor:
        """The noisy mean of clipped gradients of all records, on the mask, `[K, k]`."""
        everything = data.everything()
        mask = torch.arange(everything.y.shape[1], device=data.x.device) < data.sizes[:, None].to(
            data.x.device
        )
        gradient = private_gradient(
            task,
            expand(down.params, data.count),
            replace(everything, mask=mask),
            data.sizes.double().clamp(min=1),
            self.record_mechanism(),
            rng.noise(),
            dropout_streams(rng),
        )
        flat = flatten(gradient)
        return flat.index_select(1, down.mask["places"][0].long()) if down.mask else flat

    def bounded_upload(self, at: At, down: ModelAndMask, up: Selected) -> BoundedUpload | None:
        if self.variant == "sparse-vector" or self.unit == "record":
            return None
        values = {"values": up.values}
        if self.variant == "top-k":
            count = self.count(sum(leaf[0].numel() for leaf in down.params.values()))
            return BoundedUpload.of_values(values, self._top_k(count).values)
        return BoundedUpload.of_values(values, self._noise(at.plan).upload(down.cohort))

    def exact_sum(self, at: At, down: ModelAndMask, up: Selected) -> Selected | None:
        if self.variant not in _PUBLIC:
            return None
        total = exact_total({"values": up.values}, self._noise(at.plan).upload(down.cohort))
        return None if total is None else Selected(total["values"], {}, up.cohort)

    def _noise(self, plan: Plan) -> CohortNoise:
        """V0's and V1's noise of clients and server; `releases` accounts for it."""
        return CohortNoise(self.clip, self.noise_multiplier, "local", plan)

    def _top_k(self, count: int) -> TopKGaussian:
        """V2's mechanism: both parts together are 1 / (2 sigma^2)-zCDP."""
        rho = 0.5 / self.noise_multiplier**2
        choice = math.sqrt(8 * self.selection_share * rho / count)
        return TopKGaussian(
            self.clip, count, choice, self.noise_multiplier / math.sqrt(1 - self.selection_share)
        )

    def _own_largest(self, gradient: Tensor, rng: ClientStreams) -> Selected:
        mechanism = self._top_k(self.count(gradient.shape[1]))
        values, places = mechanism.select(gradient, rng.noise("selection"), rng.noise())
        return Selected(values, {"places": places.to(torch.int32)})

    def _sparse_vector(self, count: int) -> SparseVector:
        """V3's mechanism; threshold and queries share half of the budget as 1 : (2c)^(2/3), answers get the rest."""
        assert self.upload_epsilon is not None
        half = self.upload_epsilon / 2
        ratio = (2 * count) ** (2 / 3)
        bar = half / (1 + ratio)
        return SparseVector(self.clip, self.threshold * self.clip, count, bar, half - bar, half)

    def _above_threshold(self, gradient: Tensor, rng: ClientStreams) -> Selected:
        count = self.count(gradient.shape[1])
        released = self._sparse_vector(count)({"values": gradient}, rng.noise())["values"]
        places = released.abs().topk(count, dim=1).indices
        return Selected(released.gather(1, places), {"places": places.to(torch.int32)})

    def server_update(
        self,
        task: Task,
        at: At,
        server: Server,
        clients: Sequence[int],
        up: Selected | None,
        rng: ServerStreams,
    ) -> Server:
        if up is None and not self._completed:
            return server
        size, present = len(server.seen), len(clients)
        uploads: Params | None = None
        top_up: SumMechanism = Unnoised()
        if up is not None:
            dense = up.values if self.variant in _PUBLIC else scattered(up.values, up.own["places"], size)
            uploads = {"values": dense}
        if self._completed:
            top_up = self._noise(at.plan).top_up(present, 0 if up is None else up.cohort)
        width = self.count(size) if self.variant == "public-mask" else size
        like = {"values": next(iter(server.params.values())).new_zeros(width)}
        total = private_sum(uploads, like, present, at.plan, top_up, rng.noise("top-up"))
        return self._after_sum(at, server, total)

    def _moved(self, at: At, server: Server, mean: Tensor, seen: Tensor) -> Server:
        gradient = without_axis(unflatten(mean.unsqueeze(0), with_axis(server.params)))
        return Server(moved(server.params, gradient, -self.lr_at(at)), seen.to(server.seen))

    def model(self, server: Server) -> Params:
        return server.params

    def releases(self, plan: Plan) -> Sequence[Release]:
        what = f"each client's selected coordinates ({self.variant})"
        if self.unit == "record":
            noise, mean = self.record_mechanism().protection(), PostProcessing("a mean of the uploads")
            return (
                Release(what, "record", ADVERSARIES, noise, adjacency="zero-out"),
                Release("the mean of the selected coordinates", "record", ADVERSARIES, mean),
            )
        if self.variant == "sparse-vector":
            return (Release(what, "client", ADVERSARIES, self._sparse_vector(1).protection()),)
        if self.variant == "top-k":
            return (Release(what, "client", ADVERSARIES, self._top_k(1).protection()),)
        upload, averaged = self._noise(plan).releases()
        return replace(upload, what=what), replace(averaged, what="the mean of the selected coordinates")

    def local_training(self, at: At) -> LocalSteps:
        if self.unit == "record":
            return LocalSteps(self.lr_at(at), None)
        local = super().local_training(at)
        return replace(local, clip=self.clip) if math.isfinite(self.clip) else local  # of the gradient itself

    def read_upload(self, at: At, down: ModelAndMask, up: Selected) -> UploadReading:
        size = sum(leaf[0].numel() for leaf in down.params.values())
        everywhere = {"places": torch.arange(size, device=up.values.device).unsqueeze(0)}
        places = (up.own or down.mask or everywhere)["places"]
        gradient = unflatten(scattered(up.values, places, size), down.params)
        return UploadReading.of_gradient(down.params, gradient, self.lr_at(at))

    def adaptation(self, at: At, dimension: int, examples: int) -> Adaptation:
        if self.variant != "everywhere":
            return Adaptation("mask")
        if self.unit == "record":
            return Adaptation.to_noise(self.record_mechanism().std / max(1, examples))
        return super().adaptation(at, dimension, examples)
