"""FedLAP and FedLAP-DP: clients share synthetic images that approximate their loss, not gradients.

Wang, Chen, Kerkouche, Fritz: FedLAP-DP: Federated Learning by Sharing Differentially Private Loss Approximations.
Algorithms 1 and 2.

Symbols: w `params`, r `radius`, r_k the radius a client measures, S_k `images` and `labels`, R_i `trajectories`,
R_l `model_updates`, eta `lr`, tau `image_lr`, lambda `squared_weight`, B `batch_size`,
C `clip`, sigma `noise_multiplier`, N_k `size`.

Deviations:
- Algorithms 1 and 2 print one real batch per while-step, and R_b (10, without DP 5) image updates on it. The epsilons
  that the paper states are those of 10 fresh batches per step (4 x 5 x 10 = 200 a round), so R_b is read as
  `real_batches`; each has `image_updates` = 5, as in the authors' code, which reads 40 batches per step without DP.
- Real batches are Poisson samples of rate min(1, B / n_k), summed and divided by their expected size min(B, n_k),
  with and without DP, since accounting requires Poisson sampling. n_k counts as public, as do label sets.
- Noise is added once to the clipped sum; Algorithm 2 prints it inside the sum.
- Images start from noise (the authors' code starts from real images without DP), and their steps have the momentum
  `image_momentum` of that code; Algorithms 1 and 2 print plain steps, which 0 gives.
- The server, and the walk on which r_k is measured, take `server_steps` steps at most: a radius may never be reached.
  A step reads all images; with `server_batch` it is an epoch of such batches (the authors' code: 512, 100 epochs).
- r_k is at least one step, so that the server always moves.
- Vectors are left out of the cosine unless `include_vectors` (see `training/gradient_matching.py`).
- The paper's smaller rate q1 for the first batch of a round (Eq. 15) is not used, since participation is visible to
  whoever observes the models. With full participation, the paper's setting, q1 = q2.
- Dropout is not applied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as record
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.lazy_torch import torch
from fedveil.messages import Message, Record
from fedveil.methods.fields import STRICT, LearningRate, Weighting
from fedveil.methods.method import At, Method, Up, register, unprotected
from fedveil.methods.shared_model import averaging_weights
from fedveil.methods.synthetic import Count, Matching, PrivateMatching, SyntheticSet
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.training.surrogate import approximate, descend, measure_path
from fedveil.tree import Params, State, with_axis

if TYPE_CHECKING:
    from torch import Tensor


@record(frozen=True)
class Server(Record):
    """The model, and the `radius` and number of `steps` of the last round's descent."""

    params: Params
    radius: float
    steps: int


@record(frozen=True)
class ModelAndRadius(Message):
    params: Params
    radius: Tensor


@record(frozen=True)
class MeasuredSet(Message):
    images: Tensor
    labels: Tensor
    radius: Tensor
    size: Tensor


def global_radius(
    strategy: Literal["min", "median", "max", "fixed", "constant"], measured: Tensor, radius: float
) -> float:
    """r_g of the server: derived from the clients' radii, infinite (`fixed` steps), or the constant it sent."""
    if strategy == "constant":
        return radius
    if strategy == "fixed":
        return math.inf
    place = {"min": 0.0, "median": 0.5, "max": 1.0}[strategy]
    return float(measured.double().quantile(place))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LocalApproximation(Matching, Method[Server, ModelAndRadius, Up]):
    """The part that both methods share: the broadcast, and the descent on the synthetic sets."""

    server_batch: Count | None = None
    """Images per step of the server; a step then is an epoch of such batches. All at once if not given."""

    def init_server(self, params: Params, plan: Plan) -> Server:
        return Server(params, 0.0, 0)

    def broadcast(self, at: At, server: Server, clients: Sequence[int]) -> ModelAndRadius:
        return ModelAndRadius(with_axis(server.params), torch.tensor([self.radius], dtype=torch.float64))

    def descend(
        self,
        task: Task,
        at: At,
        w: Params,
        images: Tensor,
        labels: Tensor,
        shares: Tensor,
        radius: float,
        rng: ServerStreams,
    ) -> Server:
        """The server after the descent from `w` on the synthetic sets (Eq. 11)."""
        params, steps = descend(
            task,
            w,
            images,
            labels,
            shares,
            lr=self.lr_at(at),
            radius=radius,
            max_steps=self.server_steps,
            shuffle=None if self.server_batch is None else (self.server_batch, rng.of_exchange("batches")),
        )
        return Server(params, radius, steps)

    def model(self, server: Server) -> Params:
        return server.params


@register(
    "fedlap",
    "clients share synthetic images that approximate their loss near the model",
    server=Server,
    down=ModelAndRadius,
    up=MeasuredSet,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class FedLAP(LocalApproximation[MeasuredSet]):
    ipc: Count = 50
    real_batches: Count = 40
    radius_strategy: Literal["min", "median", "max", "fixed", "constant"] = "min"
    """The radius of the server's descent: the smallest, median or largest radius of the clients, all steps ("fixed"),
    or the radius it sent ("constant")."""
    radius_examples: Count | None = None
    """Examples on which a client measures its radius; all if not given."""
    weighting: Weighting = "size"

    def unused_fields(self) -> Mapping[str, str]:
        unused = dict(super().unused_fields())
        if self.radius_strategy in ("fixed", "constant"):
            unused["radius_examples"] = 'Leave it out, or set radius_strategy to "min", "median" or "max".'
        if self.radius_strategy == "fixed" and self.model_updates == 0:
            unused["radius"] = 'Leave it out: with "fixed" and model_updates = 0 no walk ends at a radius.'
        return unused

    def client_update(
        self, task: Task, at: At, down: ModelAndRadius, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[MeasuredSet, State]:
        images, labels = self.begin(task, down.params, data, state, rng)
        radius = float(down.radius)
        images = approximate(task, lambda _: down.params, data, images, labels, rng, self.loops(at, radius))
        measured = self._measure(task, at, down, data, images, labels, rng)
        return MeasuredSet(images, labels, measured, data.sizes), self.remembered(images)

    def _measure(
        self,
        task: Task,
        at: At,
        down: ModelAndRadius,
        data: ClientData,
        images: Tensor,
        labels: Tensor,
        rng: ClientStreams,
    ) -> Tensor:
        """r_k of each client (Fig. 2); not measured if the strategy does not use it."""
        radius = float(down.radius)
        if self.radius_strategy in ("fixed", "constant"):
            return torch.full((data.count,), radius, dtype=images.dtype)
        path = measure_path(
            task,
            down.params,
            images,
            labels,
            self._examples(data, rng),
            lr=self.lr_at(at),
            radius=radius,
            steps=self.server_steps,
        )
        found = torch.where(data.sizes.to(path.real.device) > 0, path.radii(radius), radius)
        return found.to(images.dtype)

    def _examples(self, data: ClientData, rng: ClientStreams) -> ClientData:
        """The examples on which the real loss is evaluated: all, or `radius_examples` of each client."""
        most = self.radius_examples
        if most is None or data.largest <= most:
            return data
        sizes = data.sizes.clamp(max=most)
        positions = torch.zeros(data.count, most, dtype=torch.long)
        for row, n, stream in zip(positions, data.sizes.tolist(), rng.of_exchange("radius"), strict=True):
            chosen = torch.from_numpy(stream.permutation(n)[:most])
            row[: len(chosen)] = chosen
        batch = data.take(positions.to(data.x.device))
        return ClientData(batch.x, batch.y, sizes)

    def server_update(
        self,
        task: Task,
        at: At,
        server: Server,
        clients: Sequence[int],
        up: MeasuredSet | None,
        rng: ServerStreams,
    ) -> Server:
        if up is None:
            return server
        radius = global_radius(self.radius_strategy, up.radius, self.radius)
        shares = averaging_weights(up.size, self.weighting)
        return self.descend(task, at, server.params, up.images, up.labels, shares, radius, rng)

    def releases(self, plan: Plan) -> Sequence[Release]:
        return unprotected("the synthetic images, radius and size of each client", "no noise is added")


@register(
    "fedlap-dp",
    "FedLAP under record-level DP: synthetic images made from noisy clipped gradients",
    server=Server,
    down=ModelAndRadius,
    up=SyntheticSet,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class FedLAPDP(PrivateMatching, LocalApproximation[SyntheticSet]):
    trajectories: Count = 4
    model_updates: Annotated[int, Field(ge=0)] = 2
    radius: Annotated[float, Field(gt=0, description="largest distance from the start of a round")] = 1.5
    lr: LearningRate = 0.002

    def client_update(
        self, task: Task, at: At, down: ModelAndRadius, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[SyntheticSet, State]:
        images, labels = self.begin(task, down.params, data, state, rng)
        loops = self.private_loops(at, float(down.radius))
        images = approximate(task, lambda _: down.params, data, images, labels, rng, loops)
        return SyntheticSet(images, labels), self.remembered(images)

    def server_update(
        self,
        task: Task,
        at: At,
        server: Server,
        clients: Sequence[int],
        up: SyntheticSet | None,
        rng: ServerStreams,
    ) -> Server:
        if up is None:
            return server
        shares = torch.full((len(clients),), 1 / len(clients), dtype=torch.float64)
        return self.descend(task, at, server.params, up.images, up.labels, shares, self.radius, rng)

    def paper_claim(self, plan: Plan) -> str | None:
        return (
            "record-level (epsilon, 1e-5)-DP by Eq. 15: epsilon 2.79 after 1 round, 10.18 after 15, for 200 "
            "batches of 256 out of 10,000 records in each round and sigma = 1"
        )
