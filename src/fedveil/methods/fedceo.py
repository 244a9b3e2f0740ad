"""FedCEO: clients collaborate through a low-rank tensor, under user-level differential privacy.

Li et al.: Clients Collaborate: Flexible Differentially Private Federated Learning with Guaranteed Improvement of
Utility-Privacy Trade-off. ICML 2025, Algorithm 2.

Symbols: C `clip`, sigma `noise_multiplier`, K `plan.cohort`, I `interval`, lambda `lam`, theta `theta`, eta `lr`,
w' `Server.params`, w_hat_k `Server.personal`, W_N the stack of uploads, t the round.

Deviations:
- As UDP-FedAvg (Algorithm 1): `server_lr` in place of line 10's second eta, `noise_scope`, Poisson cohorts.
- `lam = "auto"`: the threshold of each layer is the edge of its noise, (sqrt(d) + sqrt(h)) s sqrt(K), for uploads
  whose entries carry noise of standard deviation s, since the DFT over K slots sums K of them.
- Vectors have no matrix structure: averaged, or folded as n x 1 (`biases`). Layers not in `layers` are averaged.
- A personal model belongs to a slot of the cohort, for its client is rarely drawn twice in a row. A slot without
  predecessor starts from w'. After smoothing, the mean moves from w' by the clients' updates, which is line 17
  where cohorts are whole and of one size.
- `unit = "record"`: DP-SGD inside each client and no noise on its update, as the authors' code does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass as record
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedveil.data.client_data import ClientData
from fedveil.errors import InputError
from fedveil.linalg import t_tsvd
from fedveil.messages import Message, Record
from fedveil.methods.fields import STRICT, Clip, LocalTraining, NoiseMultiplier
from fedveil.methods.method import At, Method, register
from fedveil.methods.udp_fedavg import (
    NoiseScope,
    clip_and_noise,
    gaussian_or_nothing,
    private_mean,
    sum_multiplier,
    upload_multiplier,
)
from fedveil.privacy.releases import ADVERSARIES, Plan, PostProcessing, Release
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.training.private_sgd import accumulated_noise, private_sgd, private_steps
from fedveil.tree import Params, State, add, concatenate, expand, mean, rows, sub, tree_map, with_axis


@record(frozen=True)
class Server(Record):
    params: Params
    personal: Params
    """One model per slot after a smoothing round; empty after any other."""


@record(frozen=True)
class Start(Message):
    params: Params
    slot: Tensor
    """Whose smoothed model this is: 0 for the shared one, j + 1 for slot j."""


@record(frozen=True)
class NoisyModel(Message):
    params: Params
    slot: Tensor


@register(
    "fedceo",
    "user-level DP; every few rounds the server smooths the clients' models across a low-rank tensor",
    server=Server,
    down=Start,
    up=NoisyModel,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class FedCEO(LocalTraining, Method[Server, Start, NoisyModel]):
    clip: Clip = 1.0
    noise_multiplier: NoiseMultiplier = 1.0
    noise_scope: NoiseScope = "shared"
    unit: Literal["client", "record"] = "client"
    interval: int = 10
    lam: float | Literal["auto"] = "auto"
    theta: float = 1.0
    layers: str | list[str] = "all"
    biases: Literal["average", "fold"] = "average"
    server_lr: Annotated[float, Field(gt=0)] = 1.0

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise InputError("interval", self.interval, "counts rounds", "Use 1 to smooth in every round.")
        if self.lam != "auto" and not (math.isfinite(self.lam) and self.lam > 0):
            raise InputError(
                "lam", self.lam, "must be positive and finite", 'Use "auto", or more for less smoothing.'
            )
        if not (math.isfinite(self.theta) and self.theta >= 1):
            raise InputError("theta", self.theta, "must be at least 1", "Use 1 for a constant threshold.")
        if isinstance(self.layers, str) and not re.fullmatch(r"all|last:[1-9]\d*", self.layers):
            raise InputError(
                "layers", self.layers, "selects no layer", 'Use "all", "last:2" or a list of layer names.'
            )

    def init_server(self, params: Params, plan: Plan) -> Server:
        self.smoothed_layers(params)  # refuse unknown names before anything starts
        return Server(params, {})

    def broadcast(self, at: At, server: Server, clients: Sequence[int]) -> Start:
        held = _slots(server.personal)
        if held == 0:
            return Start(with_axis(server.params), torch.zeros(1, dtype=torch.long))  # line 8
        slot = torch.tensor([j + 1 if j < held else 0 for j in range(len(clients))], dtype=torch.long)
        return Start(_starts(server, slot), slot)  # line 6

    def client_update(
        self, task: Task, at: At, down: Start, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[NoisyModel, State]:
        start = expand(down.params, data.count)
        slot = down.slot.expand(data.count)
        if self.unit == "record":
            trained = private_sgd(
                task,
                start,
                data,
                rng,
                lr=self.lr_at(at),
                batch_size=self.batch_size,
                epochs=self.epochs,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                clip=self.clip,
                multiplier=self.noise_multiplier,
            )
            return NoisyModel(add(start, sub(trained, start), scale=self.server_lr), slot), state
        delta = sub(self.train(task, at, start, data, rng).params, start)
        multiplier = upload_multiplier(self.noise_multiplier, self.noise_scope, at.plan)
        noisy = clip_and_noise(delta, self.clip, multiplier, rng.noise())  # Algorithm 1, lines 8-10
        return NoisyModel(add(start, noisy, scale=self.server_lr), slot), state

    def server_update(
        self,
        task: Task,
        at: At,
        server: Server,
        clients: Sequence[int],
        up: NoisyModel | None,
        rng: ServerStreams,
    ) -> Server:
        if at.round % self.interval == 0:
            if up is None:
                return Server(server.params, {})
            smooth = self.smooth(up.params, at)  # lines 12-14
            return Server(mean(smooth), smooth)
        relative = None
        if up is not None:
            relative = add(sub(up.params, _starts(server, up.slot)), with_axis(server.params))
        return Server(
            private_mean(  # line 17
                server.params,
                relative,
                len(clients),
                at,
                clip=self.clip,
                sigma=self.noise_multiplier if self.unit == "client" else 0.0,
                scope=self.noise_scope,
                server_lr=self.server_lr,
                rng=rng,
            ),
            {},
        )

    def smooth(self, stack: Params, at: At) -> Params:
        """The minimiser of Eq. 2 layer by layer (Theorem 3.1): one model per slot."""
        chosen = self.smoothed_layers(stack)
        out: Params = {}
        for name, leaf in stack.items():
            vector = leaf.dim() <= 2
            if name not in chosen or (vector and self.biases == "average"):
                out[name] = leaf.mean(0, keepdim=True).expand_as(leaf).contiguous()
                continue
            folded = (
                leaf.reshape(len(leaf), -1, 1) if vector else leaf.flatten(2)
            )  # K x n x 1, K x o x (i kh kw)
            out[name] = t_tsvd(folded, self.threshold(at, *folded.shape)).reshape(leaf.shape)
        return out

    def threshold(self, at: At, slots: int, d: int, h: int) -> float:
        """`theta^(t/I) / (2 lambda)`, with `1 / (2 lambda)` the noise's edge where lambda is chosen automatically."""
        growth: float = self.theta ** (at.round / self.interval)
        if self.lam != "auto":
            return growth / (2 * self.lam)  # tau = lambda / theta^(t/I), threshold = 1 / (2 tau)
        return growth * (math.sqrt(d) + math.sqrt(h)) * self.noise_std(at) * math.sqrt(slots)

    def noise_std(self, at: At) -> float:
        """The standard deviation of the noise in each entry of one upload."""
        if self.unit == "client":
            if math.isinf(self.clip):
                return 0.0
            multiplier = upload_multiplier(self.noise_multiplier, self.noise_scope, at.plan)
            return self.server_lr * multiplier * self.clip
        noise = accumulated_noise(
            self.lr_at(at), self.batch_size, self.epochs, self.momentum, at.plan.records_per_client
        )
        return self.server_lr * noise * self.noise_multiplier * self.clip if math.isfinite(self.clip) else 0.0

    def smoothed_layers(self, params: Params) -> set[str]:
        """The names of the parameters that go through T-tSVD."""
        wanted = list(dict.fromkeys(_layer(name) for name in params))
        if isinstance(self.layers, list):
            unknown = [name for name in self.layers if name not in wanted]
            if unknown or not self.layers:
                raise InputError(
                    "layers", self.layers, "the model has other layers", f"Use some of {', '.join(wanted)}."
                )
            wanted = self.layers
        elif self.layers != "all":
            wanted = wanted[-int(self.layers.removeprefix("last:")) :]
        return {name for name in params if _layer(name) in wanted}

    def with_model(self, server: Server, params: Params) -> Server:
        moved = sub(params, server.params)
        return Server(params, tree_map(torch.add, server.personal, with_axis(moved)))

    def model(self, server: Server) -> Params:
        return server.params

    def releases(self, plan: Plan) -> Sequence[Release]:
        if self.unit == "record":
            steps, rate = private_steps(plan, self.batch_size, self.epochs)
            return (
                Release(
                    "each client's noisy model",
                    "record",
                    ADVERSARIES,
                    gaussian_or_nothing(self.noise_multiplier, self.clip),
                    accesses=steps,
                    rate=rate,
                ),
                Release(
                    "the smoothed and averaged models",
                    "record",
                    ADVERSARIES,
                    PostProcessing("computed from the noisy models"),
                ),
            )
        upload = gaussian_or_nothing(
            upload_multiplier(self.noise_multiplier, self.noise_scope, plan), self.clip
        )
        total = gaussian_or_nothing(sum_multiplier(self.noise_multiplier, self.noise_scope, plan), self.clip)
        return (
            Release("each client's noisy model", "client", ("server",), upload),
            Release(
                "the smoothed personal models, which carry single uploads",
                "client",
                ("observer", "client"),
                upload,
                every=self.interval,
            ),
            Release(
                "the averaged model",
                "client",
                ("observer", "client"),
                total,
                participation="hidden",
                except_every=self.interval,
            ),
        )

    def paper_claim(self, plan: Plan) -> str | None:
        return "user-level (epsilon, delta)-DP, epsilon = c2 K sqrt(T log(1/delta)) / (N sigma), c2 not given"


def _layer(name: str) -> str:
    """The layer a parameter belongs to: `fc1` of `fc1.weight`."""
    return name.rpartition(".")[0] or name


def _slots(personal: Params) -> int:
    return next(iter(personal.values())).shape[0] if personal else 0


def _starts(server: Server, slot: Tensor) -> Params:
    """The models that these slots started from."""
    if not server.personal:
        return expand(with_axis(server.params), len(slot))
    return rows(concatenate([with_axis(server.params), server.personal]), slot.tolist())
