"""cpSGD: rotate, round to few levels, add binomial noise; clients send integers.

Agarwal, Suresh, Yu, Kumar, McMahan: cpSGD: Communication-efficient and differentially-private distributed SGD.
NeurIPS 2018, Sections 4 and 5, Theorem 1.

Symbols: C `clip`, k `levels`, eps `epsilon` and delta `mechanism_delta` of one round, m the binomial trials of
a coordinate, d the number of parameters padded to a power of 2, K `plan.cohort`.

The update is clipped to C, multiplied by a public random Hadamard rotation, so that its coordinates have similar
magnitudes, and rounded at random to multiples of 2 X / (k - 1), X = C sqrt(2 ln(4 d) / d). Each client
adds Binomial(m, 1/2) - m/2 to each coordinate. m is the smallest number that Theorem 1 allows for (eps, delta):
- `noise_scope = "shared"`: the sum of K uploads has m trials, of which each client adds m / K. The server must
  not observe single uploads (secure aggregation), otherwise nothing is proven against it. A participant knows its
  own trials: K - 1 of K shares remain unknown to it, and epsilon is at most K / (K - 1) times as large.
- `noise_scope = "local"`: each upload has m trials.

Deviations: coordinates beyond X are not truncated but use levels beyond k; a rounding that exceeds the bound on the
norm is drawn again (see `privacy.integer_mechanisms.Grid`). The server adds the trials of clients that did not answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass as record
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.lazy_torch import torch
from fedveil.messages import Message
from fedveil.methods.disclosure import LocalSteps, UploadReading
from fedveil.methods.fields import STRICT, LocalTraining, PositiveFinite
from fedveil.methods.method import At, register
from fedveil.methods.shared_model import Model, Server, SharedModel
from fedveil.privacy.clipping import clip_rows
from fedveil.privacy.integer_mechanisms import BinomialShare, CalibratedBinomial
from fedveil.privacy.private_sum import private_sum
from fedveil.privacy.releases import ADVERSARIES, ApproximateDP, Plan, Release, Unprotected
from fedveil.streams import ClientStreams, ServerStreams, named_stream
from fedveil.task import Task
from fedveil.tree import State, add, flatten, sub, unflatten, with_axis, without_axis

if TYPE_CHECKING:
    from torch import Tensor


@record(frozen=True)
class Levels(Message):
    levels: Tensor


def hadamard(rows: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of each row `[K, d]`, d a power of 2; its own inverse."""
    k, d = rows.shape
    half = 1
    while half < d:
        pairs = rows.reshape(k, -1, 2, half)
        rows = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], dim=2)
        half *= 2
    return rows.reshape(k, d) / math.sqrt(d)


def signs(size: int, round: int) -> Tensor:
    """The public random signs of a round."""
    bits = named_stream(0, "rotation", round).integers(0, 2, size)
    return torch.from_numpy(2.0 * bits - 1.0)


def rotate(rows: Tensor, round: int) -> Tensor:
    """Rows `[K, n]` padded to a power of 2 and rotated, in double precision."""
    size = 1 << (rows.shape[1] - 1).bit_length()
    padded = torch.nn.functional.pad(rows.double(), (0, size - rows.shape[1]))
    return hadamard(padded * signs(size, round).to(padded.device))


def rotate_back(rows: Tensor, round: int, size: int) -> Tensor:
    return (hadamard(rows) * signs(rows.shape[1], round).to(rows.device))[:, :size]


@register(
    "cpsgd",
    "rotation, few levels and binomial noise: private integers leave the client",
    server=Server,
    down=Model,
    up=Levels,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class CpSGD(LocalTraining, SharedModel[Levels]):
    clip: PositiveFinite = 1.0
    """Largest L2 norm of a client's update."""
    epsilon: PositiveFinite = 1.0
    """Epsilon of one round; sets the binomial noise."""
    mechanism_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-8
    """Delta of one round."""
    levels: Annotated[int, Field(ge=2)] = 16
    """Levels that a coordinate is rounded to."""
    noise_scope: Literal["shared", "local"] = "shared"
    """Whether the noise protects the sum of the uploads, the only value that the server may observe ("shared"), or
    each upload ("local")."""

    def mechanism(self) -> CalibratedBinomial:
        """The mechanism that protects the sum (shared) or each upload (local)."""
        return CalibratedBinomial(self.clip, self.levels, self.epsilon, self.mechanism_delta)

    def spacing(self, dimension: int) -> float:
        """The distance between two levels."""
        return self.mechanism().spacing(dimension)

    def share(self, dimension: int, plan: Plan) -> BinomialShare:
        """The trials that one client adds, a multiple of 8.

        Shared: a participant knows its own trials, so those of the others alone must meet Theorem 1's condition.
        """
        priced = self.mechanism().of(dimension)
        if self.noise_scope == "local":
            return priced.share(priced.trials)
        own = math.ceil(priced.trials / (8 * plan.cohort))
        least = math.ceil(priced.least_trials / (8 * max(1, plan.cohort - 1)))
        return priced.share(8 * max(own, least))

    def client_update(
        self, task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Levels, State]:
        update = sub(self.train(task, at, down.params, data, rng).params, down.params)
        turned = rotate(flatten(clip_rows(update, self.clip)), at.round)
        share = self.share(turned.shape[1], at.plan)
        kind = torch.int16 if share.largest < 2**15 else torch.int32
        return Levels(share.levels({"turned": turned}, rng.noise()).to(turned.device, kind)), state

    def server_update(
        self,
        task: Task,
        at: At,
        server: Server,
        clients: Sequence[int],
        up: Levels | None,
        rng: ServerStreams,
    ) -> Server:
        if up is None:
            return server
        dimension, present = up.levels.shape[1], len(clients)
        share = self.share(dimension, at.plan)
        absent = max(0, at.plan.cohort - present) if self.noise_scope == "shared" else 0
        levels, like = {"levels": up.levels.to(torch.int64)}, {"levels": up.levels[0]}
        top_up = share.times(absent)
        summed = private_sum(levels, like, present, at.plan, top_up, rng.noise("absent"))
        turned = summed.total["levels"].double() * self.spacing(dimension)
        size = sum(leaf.numel() for leaf in server.params.values())
        first = next(iter(server.params.values()))
        mean = (rotate_back(turned, at.round, size) / summed.cohort).to(first.dtype)
        return Server(add(server.params, without_axis(unflatten(mean, with_axis(server.params)))))

    def exact_sum(self, at: At, down: Model, up: Levels) -> Levels:
        return Levels(up.levels.sum(0, keepdim=True, dtype=torch.int64))

    def releases(self, plan: Plan) -> Sequence[Release]:
        price = self.mechanism().protection()
        if self.noise_scope == "local":
            return (Release("each client's noisy levels", "client", ADVERSARIES, price),)
        alone = "one upload has only its share of the noise; the proof needs secure aggregation"
        return (
            Release("each client's noisy levels", "client", ("server",), Unprotected(alone)),
            Release(
                "the sum of the cohort's noisy levels",
                "client",
                ("observer", "client"),
                price,
                insider=self._against_the_cohort(plan),
            ),
        )

    def _against_the_cohort(self, plan: Plan) -> ApproximateDP | None:
        """The guarantee against a participant, from the trials of the others; None for a cohort of one client.

        Every term of the theorem's epsilon decreases at most as 1 / trials, in any dimension.
        """
        if plan.cohort == 1:
            return None
        whole = self.mechanism().protection()
        return replace(whole, epsilon=whole.epsilon * plan.cohort / (plan.cohort - 1))

    def local_training(self, at: At) -> LocalSteps:
        return super().local_training(at).clipped(self.clip)

    def read_upload(self, at: At, down: Model, up: Levels) -> UploadReading:
        turned = up.levels.double() * self.spacing(up.levels.shape[1])
        like = next(iter(down.params.values()))
        size = sum(leaf[0].numel() for leaf in down.params.values())
        change = unflatten(rotate_back(turned, at.round, size).to(like.dtype), down.params)
        return UploadReading.of_change(down.params, change, self.local_training(at))
