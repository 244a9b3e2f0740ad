"""FedEM: clients perturb their inputs to lower the loss, and send the gradients at the perturbed inputs.

FedEM: A Privacy-Preserving Framework for Concurrent Utility Preservation in Federated Learning. Algorithm 1.

Symbols: eta `lr`, alpha_u `perturbation_lr`, N `perturbation_steps`, rho_u^min `rho_min`, rho_u^max `rho_max`,
delta_k the state `delta`, theta_u a copy of the model that only the perturbation is learnt on.

Deviations:
- Line 4 lets the server draw the first delta_k and send it; here the client draws it, so that the server does
  not know it. It is drawn anew in every round, as the paper's line 4 is inside its loop over rounds.
- `delta` has one perturbation for each position in a batch, and norms are per example.
- On texts `delta` perturbs the token embeddings (appendix D.4); on padding it is zero.
- Line 16 averages over clients; the default weighs by the examples in the batch, the same where all have as many.
- With `block` > 1 a client walks through so many batches per message, stepping on its own gradient in between, and
  sends their sum: where a message costs seconds (a deployment), one per batch is out of reach. 1 is the paper's.
- Appendix D.1 names a ResNet-18 as the perturbation model and 15 of its updates per round; line 8 makes theta_u a copy
  of the model, and lines 9 to 13 take N steps for each batch. The algorithm is followed.
- theta_u's update after the last perturbation step (line 12, n = N) is omitted, since its result is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.methods.disclosure import LocalSteps
from fedveil.methods.fedsgd import Gradient, batch_in_step, batches_per_round
from fedveil.methods.fields import (
    STRICT,
    BatchSize,
    LearningRate,
    LearningRateSchedule,
    NonNegative,
    Weighting,
)
from fedveil.methods.method import At, Demand, register, unprotected
from fedveil.methods.shared_model import AggregatedModel, Model, Server, averaging_weights
from fedveil.numerics import NUMERICS
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams, normal
from fedveil.task import Batch, Task
from fedveil.training.batching import LastBatch, largest_batch
from fedveil.training.local_sgd import scheduled_lr
from fedveil.training.small_batches import differentiator, is_known
from fedveil.tree import Params, State, add, expand, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor

Norm = Literal["l2", "linf"]
Directions = Callable[[], "Tensor"]


def example_norm(delta: Tensor, norm: Norm) -> Tensor:
    """The norm of every example `[K, B]`, in float64."""
    flat = delta.flatten(2).double()
    return flat.norm(dim=2) if norm == "l2" else flat.abs().amax(2)


def project_to_shell(
    delta: Tensor, rho_min: float, rho_max: float, norm: Norm, directions: Directions
) -> Tensor:
    """Scale every example of `delta [K, B, ...]` to `rho_min <= |delta| <= rho_max`.

    Under "linf" the upper bound clamps coordinate by coordinate, as projected gradient descent does. An example
    that is zero and must not be takes the direction that `directions` gives it.
    """
    size = example_norm(delta, norm)
    lowest = 1e-12
    if rho_min > 0 and bool((size < lowest).any()):
        fallback = directions()
        lost = _per_example(size < lowest, delta)
        delta = torch.where(lost, fallback, delta)
        size = torch.where(size < lowest, example_norm(fallback, norm), size)
    if norm == "linf":
        delta = delta.clamp(-rho_max, rho_max)
        size = size.clamp(max=rho_max)
    if bool(((size >= rho_min) & (size <= rho_max)).all()):
        return delta
    target = size.clamp(min=rho_min, max=rho_max)
    factor = torch.where(size > 0, target / size.clamp(min=lowest), torch.zeros_like(size))
    return (delta.double() * _per_example(factor, delta)).to(delta.dtype)


def _per_example(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(*values.shape, *([1] * (like.dim() - 2)))


@register(
    "fedem",
    "clients train on inputs perturbed to lower the loss, against gradient inversion",
    server=Server,
    down=Model,
    up=Gradient,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class FedEM(AggregatedModel[Gradient]):
    numerics = NUMERICS + 1  # 1: small batches of images are differentiated for all clients at once
    lr: LearningRate = 0.1
    batch_size: BatchSize = 8
    lr_schedule: LearningRateSchedule = "constant"
    weighting: Weighting = "size"
    perturbation_steps: Annotated[int, Field(ge=0, description="perturbation steps per batch")] = 15
    perturbation_lr: Annotated[float, Field(gt=0, description="step size of the perturbation")] = 0.1
    rho_min: NonNegative = 0.0
    """Smallest norm of an example's perturbation."""
    rho_max: NonNegative = 8 / 255
    """Largest norm of an example's perturbation."""
    norm: Norm = "l2"
    """The norm of both bounds."""
    block: Annotated[int, Field(ge=1, description="batches per message")] = 1
    last_batch: LastBatch = "merge"
    """The remainder of a round that is smaller than a batch: "keep" makes it a batch of its own, "drop" leaves it out,
    "merge" adds it to the previous batch if it is less than half of one."""

    @model_validator(mode="after")
    def _possible(self) -> FedEM:
        if self.rho_min > self.rho_max:
            raise InputError(
                "method.rho_min",
                self.rho_min,
                f"is above rho_max = {self.rho_max:g}, so no perturbation fits",
                "Use 0 <= rho_min <= rho_max.",
            )
        return self

    def _batches(self, plan: Plan) -> int:
        return batches_per_round(plan, self.batch_size, self.last_batch)

    @property
    def _width(self) -> int:
        """The most examples of a batch: a client keeps a perturbation for each place."""
        return largest_batch(self.batch_size, self.last_batch)

    def unused_fields(self) -> Mapping[str, str]:
        if self.perturbation_steps == 0:
            return {"perturbation_lr": "Leave it out, or use perturbation_steps above 0."}
        return {}

    def exchanges(self, plan: Plan) -> int:
        return math.ceil(self._batches(plan) / self.block)

    def computes_together(self, task: Task) -> bool:
        return is_known(task, self._width)

    def demand(self, plan: Plan, records: int, classes: int) -> Demand:
        return Demand(self.block * (1 + self.perturbation_steps), examples=self._width)

    def init_client(self, task: Task, data: ClientData, rng: ClientStreams) -> State:
        return {"delta": task.no_offset(data.x, self._width)}

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Gradient, State]:
        theta = expand(down.params, data.count)
        first = at.exchange * self.block
        last = min(first + self.block, self._batches(at.plan))
        total, state = self._batch(task, at, first, theta, data, state, rng)
        for index in range(first + 1, last):  # the client takes the server's step on its own gradient
            here = add(theta, total.gradient, scale=-self._lr(at))
            more, state = self._batch(task, at, index, here, data, state, rng)
            total = Gradient(add(total.gradient, more.gradient), total.size + more.size)
        return total, state

    def _batch(
        self,
        task: Task,
        at: At,
        index: int,
        theta: Params,
        data: ClientData,
        state: State,
        rng: ClientStreams,
    ) -> tuple[Gradient, State]:
        """The gradient of batch `index` of the round, and the perturbation learnt on it."""
        rng = replace(rng, exchange=index)
        batch = batch_in_step(data, self.batch_size, index, rng, self.last_batch)  # line 8
        sizes = torch.full_like(data.sizes, batch.y.shape[1]) if batch.mask is None else batch.mask.sum(1)
        dropout = rng.of_exchange("dropout") if task.has_dropout else None
        if self.rho_max == 0:  # x + 0 is x: the rest is FedSGD
            gradient = differentiator(task, batch).grad(theta, batch, dropout)
            return Gradient(gradient, sizes), state
        delta = self._first_delta(state["delta"], rng) if index == 0 else state["delta"]  # line 4
        width = batch.y.shape[1]
        learnt = self._perturb(task, at, theta, batch, delta[:, :width], rng)
        if (
            batch.mask is not None
        ):  # padding keeps its perturbation, independent of the other clients in the stack
            learnt = torch.where(_per_example(batch.mask, learnt), learnt, delta[:, :width])
        seen = task.perturbed(batch, learnt)
        gradient = differentiator(task, seen).grad(theta, seen, dropout)  # line 14
        return Gradient(gradient, sizes), {"delta": torch.cat([learnt, delta[:, width:]], dim=1)}

    def _first_delta(self, like: Tensor, rng: ClientStreams) -> Tensor:
        """A random point of the shell for each place in a batch."""
        drawn = normal(rng.unknown_to_server(rng.of_round("perturbation")), like.shape[1:], like)
        radii = rng.unknown_to_server(rng.of_round("perturbation radius"))
        radius = torch.stack([torch.from_numpy(s.random(self._width)) for s in radii]).to(like)
        wanted = self.rho_min + (self.rho_max - self.rho_min) * radius
        unit = wanted / example_norm(drawn, self.norm).to(like).clamp(min=1e-12)
        return self._project(drawn * _per_example(unit, drawn), rng)

    def _perturb(
        self, task: Task, at: At, theta: Params, batch: Batch, delta: Tensor, rng: ClientStreams
    ) -> Tensor:
        def inside(moved: Tensor) -> Tensor:
            return self._project(task.within(batch, moved), rng, lambda drawn: task.within(batch, drawn))

        gradients = differentiator(task, batch)
        theta_u = theta  # line 8; never edited in place, so theta stays what it is
        delta = inside(delta)  # the texts of this batch have other lengths than the last one's
        for step in range(self.perturbation_steps):
            ascent = gradients.input_grad(theta_u, task.perturbed(batch, delta))
            delta = inside(delta - self.perturbation_lr * ascent.sign())  # lines 10, 11
            if step + 1 < self.perturbation_steps:
                seen = task.perturbed(batch, delta)
                theta_u = add(theta_u, gradients.grad(theta_u, seen), scale=-self._lr(at))  # line 12
        return delta

    def _project(
        self, delta: Tensor, rng: ClientStreams, within: Callable[[Tensor], Tensor] = lambda drawn: drawn
    ) -> Tensor:
        def directions() -> Tensor:
            full = (self._width, *delta.shape[2:])
            streams = rng.unknown_to_server(rng.of_exchange("direction"))
            return within(normal(streams, full, delta)[:, : delta.shape[1]])

        return project_to_shell(delta, self.rho_min, self.rho_max, self.norm, directions)

    def aggregate(self, task: Task, at: At, w: Params, up: Gradient) -> Params:
        step = weighted_sum(up.gradient, averaging_weights(up.size, self.weighting))
        return add(w, step, scale=-self._lr(at))  # line 16

    def _lr(self, at: At) -> float:
        return scheduled_lr(self.lr, self.lr_schedule, at.round, at.plan.rounds)

    def releases(self, plan: Plan) -> Sequence[Release]:
        return unprotected(
            "the gradient of each client's perturbed batch",
            "the perturbation is a function of the data without noise of known scale; attacks alone can measure it",
        )

    def paper_claim(self, plan: Plan) -> str | None:
        return (
            "no epsilon of differential privacy; a reconstruction score epsilon_p that is bounded once the "
            "perturbation exceeds a threshold (Lemmas 1 and 2)"
        )

    def round_training(self, at: At) -> LocalSteps:
        return LocalSteps(self._lr(at), self.batch_size, last_batch=self.last_batch)

    def batches_behind(self, at: At, data: ClientData, rng: ClientStreams) -> Sequence[Batch]:
        numbers = range(at.exchange * self.block, (at.exchange + 1) * self.block)
        return [batch_in_step(data, self.batch_size, number, rng, self.last_batch) for number in numbers]

    def input_perturbation(self, state: State) -> Tensor:
        return state["delta"]
