"""FedCEO: clients collaborate through a low-rank tensor, under user-level differential privacy.

Li et al.: Clients Collaborate: Flexible Differentially Private Federated Learning with Guaranteed Improvement of
Utility-Privacy Trade-off. ICML 2025, Algorithm 2.

Symbols: C `clip`, sigma `noise_multiplier`, K `plan.cohort`, I `interval`, lambda `lam`, theta `theta`, eta `lr`,
w' `Server.params`, w_hat_k `Server.personal`, W_N the stack of uploads, t the round.

Deviations:
- As UDP-FedAvg (Algorithm 1): `server_lr` in place of line 10's second eta, `noise_scope`, Poisson cohorts.
- `lam = "auto"`, `layers`, `biases`: see smoothing.py.
- A personal model belongs to a slot of the cohort, since its client is rarely drawn twice in a row. A slot without
  predecessor starts from w'. After smoothing, the clients' mean update is added to w', which equals line 17 for
  cohorts without dropouts and of constant size.
- `restart = "slot"` is the above. `"mean"`: every client continues from the mean of the smoothed models. That mean is
  the shrunken mean of the uploads, so no single upload is released, and the releases are those of UDP-FedAvg.
  `"own"`: each client continues from its own last noisy upload, from whatever round; see fedceo_own.py.
- `smooth_last = false`: the final round is averaged and not smoothed.
- `unit = "record"`: DP-SGD inside each client and no noise on its update, as in the authors' code; see
  fedceo_record.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as record
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.data.dataset import Dataset
from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.messages import Message, Record
from fedveil.methods import fedceo_own
from fedveil.methods.disclosure import (
    Adaptation,
    BoundedUpload,
    Earlier,
    LocalSteps,
    TrainingStart,
    UploadReading,
)
from fedveil.methods.fedceo_record import RecordUnit
from fedveil.methods.fields import (
    STRICT,
    Clip,
    LocalTraining,
    NoiseMultiplier,
    ServerLearningRate,
    without_local_noise,
)
from fedveil.methods.method import At, ClientSum, Method, register
from fedveil.methods.smoothing import Smoothing
from fedveil.privacy.mechanisms import SumMechanism, gaussian
from fedveil.privacy.private_sum import CohortNoise, NoiseScope, NoisySum, noisy_models, private_sum
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.tree import (
    Params,
    State,
    concatenate,
    expand,
    mean,
    rows,
    sub,
    tree_map,
    with_axis,
    without_axis,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor


@record(frozen=True)
class Server(Record):
    params: Params
    personal: Params
    """One model per slot after a smoothing round; empty after other rounds."""


@record(frozen=True)
class Start(Message):
    params: Params
    slot: Tensor
    """The origin of this model: 0 for the shared one, j + 1 for the smoothed model of slot j."""
    cohort: int = 0
    """The number of clients invited to this round."""


@record(frozen=True)
class NoisyModel(Message):
    params: Params
    slot: Tensor
    cohort: int = 0
    """The number of clients that share the noise, if it was announced."""


@register(
    "fedceo",
    "user-level DP; every few rounds the server smooths the clients' models across a low-rank tensor",
    server=Server,
    down=Start,
    up=NoisyModel,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class FedCEO(LocalTraining, Smoothing, Method[Server, Start, NoisyModel]):
    clip: Clip = 1.0
    noise_multiplier: NoiseMultiplier = 1.0
    noise_scope: NoiseScope = "shared"
    """Whether each client adds a share of the noise of the sum ("shared"), or all of it, which also protects against
    the server ("local")."""
    unit: Literal["client", "record"] = "client"
    """Who is protected: a whole client, or each record, by DP-SGD inside the client."""
    server_lr: ServerLearningRate = 1.0
    restart: Literal["slot", "mean", "own"] = "slot"
    """Where clients start after smoothing: from the model of their slot, from the mean of the smoothed models, or
    from their own last upload."""
    smooth_last: bool = True
    """Whether the final round is smoothed too."""

    @model_validator(mode="after")
    def _possible(self) -> FedCEO:
        if self.unit == "record":
            self.refuse_local_steps()
        if self.restart == "own" and (self.noise_multiplier == 0 or not math.isfinite(self.clip)):
            raise InputError(
                "restart",
                self.restart,
                "would reuse weights without noise in later rounds",
                'Use noise and a finite clip, or restart = "slot".',
            )
        return self

    def unused_fields(self) -> Mapping[str, str]:
        if self.unit == "client":
            return super().unused_fields()
        return {
            "last_batch": 'Leave it out: with unit = "record" every batch is a Poisson sample.',
            "noise_scope": 'Leave it out: with unit = "record" every client adds its noise itself.',
        }

    def unused_for(self, rounds: int) -> Mapping[str, str]:
        unused = dict(super().unused_for(rounds))
        if rounds < self.interval:
            smoothing = ("lam", "theta", "layers", "biases", "smooth_last")
            unused |= dict.fromkeys(smoothing, f"the first smoothing is in round {self.interval}")
        elif rounds % self.interval:
            unused["smooth_last"] = f"the last round is no multiple of interval = {self.interval}"
        return unused

    def smooths(self, at: At) -> bool:
        """Whether this round ends with smoothing."""
        return at.round % self.interval == 0 and (self.smooth_last or at.round != at.plan.rounds)

    def _restarts(self, at: At) -> bool:
        """Whether clients start this round from their own last uploads."""
        return self.restart == "own" and fedceo_own.is_restart(at.round, self.interval)

    def init_client(self, task: Task, data: ClientData, rng: ClientStreams) -> State:
        return fedceo_own.nothing_sent(task.init(0), data.count) if self.restart == "own" else {}

    def protection(self, plan: Plan) -> ClientUnit | RecordUnit:
        """Protects the updates; `releases` accounts for it."""
        if self.unit == "record":
            return RecordUnit(self, gaussian(self.clip, self.noise_multiplier), self.server_lr)
        return ClientUnit(self, CohortNoise(self.clip, self.noise_multiplier, self.noise_scope, plan))

    def init_server(self, params: Params, plan: Plan) -> Server:
        self.refuse_folding_nothing(params)  # and unknown names, before training starts
        return Server(params, {})

    def broadcast(self, at: At, server: Server, clients: Sequence[int]) -> Start:
        held = _slots(server.personal)
        if held == 0:
            return Start(with_axis(server.params), torch.zeros(1, dtype=torch.long), len(clients))  # line 8
        slot = torch.tensor([j + 1 if j < held else 0 for j in range(len(clients))], dtype=torch.long)
        return Start(_starts(server, slot), slot, len(clients))  # line 6

    def client_update(
        self, task: Task, at: At, down: Start, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[NoisyModel, State]:
        start = expand(down.params, data.count)
        if self._restarts(at):
            start = fedceo_own.own_start(state, start)
        slot = down.slot.expand(data.count)
        models = self.protection(at.plan).models(task, at, start, data, rng, down.cohort)
        kept = fedceo_own.sent(models) if self.restart == "own" else state
        return NoisyModel(models, slot, down.cohort), kept

    def bounded_upload(self, at: At, down: Start, up: NoisyModel) -> BoundedUpload | None:
        mechanism = self.protection(at.plan).upload(down.cohort)
        if mechanism is None or self._restarts(at):
            return None
        return BoundedUpload.of_models(up.params, down.params, mechanism, self.server_lr)

    def server_update(
        self,
        task: Task,
        at: At,
        server: Server,
        clients: Sequence[int],
        up: NoisyModel | None,
        rng: ServerStreams,
    ) -> Server:
        if self.smooths(at) and self.restart == "slot":
            if up is None:
                return Server(server.params, {})
            smooth = self.smooth(up.params, at.round, self.noise_std(at, up.cohort))  # lines 12-14
            return Server(mean(smooth), smooth)
        if self._restarts(at):  # line 17; the result is charged as released
            return Server(server.params if up is None else self._smoothed(at, mean(up.params)), {})
        return self._after_sum(at, server, self._sum(at, server, len(clients), up, rng))

    def _sum(
        self, at: At, server: Server, present: int, up: NoisyModel | None, rng: ServerStreams
    ) -> NoisySum:
        """The sum of the noisy updates, with the noise that the server adds."""
        unit, cohort = self.protection(at.plan), 0 if up is None else up.cohort
        return private_sum(
            None if up is None else up.params,
            server.params,
            present,
            at.plan,
            unit.top_up(present, cohort),
            rng.noise("top-up"),
            upload=unit.upload(cohort),
            start=None if up is None else _starts(server, up.slot),
            lr=self.server_lr,
        )

    def _after_sum(self, at: At, server: Server, summed: NoisySum) -> Server:
        """Line 17, and in smoothing rounds the smoothed mean."""
        shared = summed.added_to(server.params, self.server_lr)
        return Server(self._smoothed(at, shared), {})

    def _smoothed(self, at: At, shared: Params) -> Params:
        """The mean, in smoothing rounds with its singular values lowered."""
        if not self.smooths(at):
            return shared
        return without_axis(self.smooth(with_axis(shared), at.round, self.noise_std(at), of=at.plan.cohort))

    def client_sum(self) -> ClientSum[Server, Start]:
        if self.restart != "mean" or self.unit == "record":
            field, value = ("unit", "record") if self.restart == "mean" else ("restart", self.restart)
            instead = 'unit = "client"' if self.restart == "mean" else 'restart = "mean"'
            raise InputError(
                f"method.{field}",
                value,
                "needs single uploads on the server, not only their sum",
                f'Use {instead}, or aggregation.kind = "plain".',
            )
        without_local_noise(self.noise_scope, "shared")
        return ClientSum(gaussian(self.clip, self.noise_multiplier), self._contribution, self._after_sum)

    def _contribution(
        self, task: Task, at: At, down: Start, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Params, State]:
        """Each client's contribution before clipping, where all start from the same model."""
        return sub(self.train(task, at, down.params, data, rng).params, down.params), state

    def noise_std(self, at: At, cohort: int = 0) -> float:
        """The standard deviation of the noise in each entry of one upload, in a cohort of this announced size."""
        return self.server_lr * self.protection(at.plan).std(at, cohort)

    def with_model(self, server: Server, params: Params) -> Server:
        moved = sub(params, server.params)
        return Server(params, tree_map(torch.add, server.personal, with_axis(moved)))

    def model(self, server: Server) -> Params:
        return server.params

    def cohort_models(self, server: Server) -> Params | None:
        return server.personal or None

    def releases(self, plan: Plan) -> Sequence[Release]:
        unit = self.protection(plan)
        if isinstance(unit, RecordUnit):
            return unit.releases(plan)
        upload, averaged = unit.noise.releases()
        if self.restart == "mean":
            return upload, averaged
        if self.restart == "own":
            return fedceo_own.releases(upload, averaged, self.interval)
        smoothed = replace(
            upload,
            what="the smoothed personal models, which carry single uploads",
            visible_to=("observer", "client"),
            every=self.interval,
        )
        averaged = replace(averaged, except_every=self.interval, following=False)
        # Slots follow the clients' order, so a participant after smoothing shifts those behind it to other models,
        # which changes their updates: the sum does not hide participation, and a participant's own slot discloses
        # information about those before it.
        moved = replace(
            averaged,
            what="the averaged model of a round that starts from personal models",
            participation="seen",
            following=True,
        )
        return upload, smoothed, averaged, moved

    def paper_claim(self, plan: Plan) -> str | None:
        return "user-level (epsilon, delta)-DP, epsilon = c2 K sqrt(T log(1/delta)) / (N sigma), c2 not given"

    def local_training(self, at: At) -> LocalSteps:
        local = replace(super().local_training(at), share=self.server_lr)
        return local.clipped(self.clip * self.server_lr) if self.unit == "client" else local

    def adaptation(self, at: At, dimension: int, examples: int) -> Adaptation:
        unit = self.protection(at.plan)
        if isinstance(unit, RecordUnit):
            return unit.adaptation(at, examples)
        return super().adaptation(at, dimension, examples)

    def read_upload(self, at: At, down: Start, up: NoisyModel) -> UploadReading | None:
        reading = super().read_upload(at, down, up)
        if reading is None or not self._restarts(at):
            return reading
        return replace(reading, gradient=None)  # the change is relative to a model that was not sent

    def training_start(self, at: At, down: Start, earlier: Earlier) -> TrainingStart:
        if self._restarts(at):
            return TrainingStart(fedceo_own.earlier_start(earlier, down.params))
        return super().training_start(at, down, earlier)

    def pictures(self, at: At, up: NoisyModel, dataset: Dataset) -> Mapping[str, Figure]:
        """The last smoothed layer before and after, in the first and the last smoothing round."""
        last = at.plan.rounds - at.plan.rounds % self.interval
        if (
            self.restart != "slot"
            or not self.smooths(at)
            or last == 0
            or at.round not in (self.interval, last)
        ):
            return {}
        chosen = self.smoothed_layers(up.params)
        matrices = [name for name in up.params if name in chosen and up.params[name].dim() > 2]
        if not matrices:
            return {}
        from fedveil.figures.fedceo import smoothing_figures

        stack = up.params[matrices[-1]].flatten(2).cpu()
        threshold = self.threshold(at.round, self.noise_std(at, up.cohort), *stack.shape)
        figures = smoothing_figures(
            stack, threshold, title=f"{matrices[-1]}, round {at.round}", classes=dataset.classes
        )
        return {f"figures/{kind}-round-{at.round}": figure for kind, figure in figures.items()}


@record(frozen=True)
class ClientUnit:
    """Algorithm 1, lines 8-10: a client's whole update is clipped and noised."""

    method: FedCEO
    noise: CohortNoise

    def models(
        self, task: Task, at: At, start: Params, data: ClientData, rng: ClientStreams, cohort: int
    ) -> Params:
        """The uploads: models `[K, ...]` with a clipped and noisy update."""
        delta = sub(self.method.train(task, at, start, data, rng).params, start)
        return noisy_models(self.upload(cohort), start, delta, rng.noise(), self.method.server_lr)

    def upload(self, cohort: int) -> SumMechanism:
        """The mechanism that protects one update."""
        return self.noise.upload(cohort)

    def top_up(self, present: int, cohort: int) -> SumMechanism:
        """The noise that the server adds to the sum of `present` updates."""
        return self.noise.top_up(present, cohort)

    def std(self, at: At, cohort: int) -> float:
        """The standard deviation of the noise in each entry of an update."""
        return self.upload(cohort).std


def _slots(personal: Params) -> int:
    return next(iter(personal.values())).shape[0] if personal else 0


def _starts(server: Server, slot: Tensor) -> Params:
    """The models that these slots started from."""
    if not server.personal:
        return expand(with_axis(server.params), len(slot))
    return rows(concatenate([with_axis(server.params), server.personal]), slot.tolist())
