"""CENTAUR: clients share a representation under user-level DP and keep their own heads.

Shen, Ye, Kang, Hassani, Shokri: Share Your Representation Only: Guaranteed Improvement of the Privacy-Utility
Tradeoff in Federated Learning. ICLR 2023, Algorithms 1 and 2.

Symbols: theta_g the representation in `Server.params`, theta_l the client's state, C `clip`,
sigma `noise_multiplier`, K `plan.cohort`.

Deviations:
- `head` counts the last layers that are personal; all before them are the representation.
- The paper's analysis of linear models orthonormalises the noisy representation at the server. Deep networks have
  no such constraint; `rank` keeps that many singular directions of every noisy weight matrix (None keeps all).
- Noise is added by the clients as in UDP-FedAvg and completed by the trusted server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.data.client_data import ClientData
from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.methods.fields import STRICT, Epochs
from fedveil.methods.method import At, register
from fedveil.methods.shared_model import Server
from fedveil.methods.user_level import CohortModel, NoisyModel, SummedUpdates, UserLevelAveraging
from fedveil.privacy.releases import Plan
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.tree import Params, State, expand, with_axis

if TYPE_CHECKING:
    from torch import Tensor


@register(
    "centaur",
    "user-level DP on a shared representation; each client keeps its own head",
    server=Server,
    down=CohortModel,
    up=NoisyModel,
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Centaur(UserLevelAveraging):
    remembers = True

    head: Annotated[int, Field(ge=1, description="how many of the last layers are personal")] = 1
    head_epochs: Epochs = 1
    rank: Annotated[int, Field(ge=1)] | None = None
    """Singular directions kept of every noisy weight matrix; all if not given."""

    def init_server(self, params: Params, plan: Plan) -> Server:
        self.head_of(params)  # refuses a head that covers the whole model
        return super().init_server(params, plan)

    def init_client(self, task: Task, data: ClientData, rng: ClientStreams) -> State:
        start = task.init(rng.seed)
        head = {name: start[name] for name in self.head_of(start)}
        return {name: leaf.expand(data.count, *leaf.shape).clone() for name, leaf in head.items()}

    def broadcast(self, at: At, server: Server, clients: Sequence[int]) -> CohortModel:
        head = self.head_of(server.params)
        shared = {name: leaf for name, leaf in server.params.items() if name not in head}
        return CohortModel(with_axis(shared), len(clients))

    def client_update(
        self, task: Task, at: At, down: CohortModel, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[NoisyModel, State]:
        shared = expand(down.params, data.count)
        start = {**shared, **state}
        tuned = self.train(task, at, start, data, rng, epochs=self.head_epochs, trainable=set(state)).params
        trained = self.train(task, at, tuned, data, rng, trainable=set(shared)).params
        delta = {name: trained[name] - leaf for name, leaf in shared.items()}
        return self.noisy_model(at, down, delta, rng), {name: tuned[name] for name in state}

    def server_update(
        self,
        task: Task,
        at: At,
        server: Server,
        clients: Sequence[int],
        up: NoisyModel | SummedUpdates | None,
        rng: ServerStreams,
    ) -> Server:
        head = self.head_of(server.params)
        sent = {name: leaf for name, leaf in server.params.items() if name not in head}
        shared = self.averaged(at, sent, clients, up, rng)
        own = {name: server.params[name] for name in head}
        found = own | {name: _truncate(leaf, self.rank) for name, leaf in shared.items()}
        return Server({name: found[name] for name in server.params})

    def head_of(self, params: Params) -> list[str]:
        """The names of the personal parameters."""
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in params))
        if self.head >= len(layers):
            raise InputError(
                "head", self.head, "leaves no representation to share", f"Use 1 to {len(layers) - 1}."
            )
        return [name for name in params if name.rpartition(".")[0] in layers[-self.head :]]

    def personal_model(self, server: Server, state: State) -> Params:
        clients = next(iter(state.values())).shape[0]
        whole = expand(with_axis(server.params), clients)
        return {name: state.get(name, leaf) for name, leaf in whole.items()}


def _truncate(leaf: Tensor, rank: int | None) -> Tensor:
    """The weight matrix with only its `rank` largest singular values; vectors are unchanged."""
    matrix = leaf.flatten(1) if leaf.dim() > 1 else None
    if rank is None or matrix is None or rank >= min(matrix.shape):
        return leaf
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    kept: Tensor = (left[:, :rank] * values[:rank]) @ right[:rank]
    return kept.reshape(leaf.shape)
