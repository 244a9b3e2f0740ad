"""The server half of one-shot methods: clients make synthetic sets on their own, the server trains a model on them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass as record
from typing import TYPE_CHECKING

from fedveil.messages import Message, Record
from fedveil.methods.method import At, Method, Up
from fedveil.privacy.releases import Plan
from fedveil.streams import ServerStreams
from fedveil.task import Task
from fedveil.training.surrogate import descend
from fedveil.tree import Params

if TYPE_CHECKING:
    from torch import Tensor


@record(frozen=True)
class Server(Record):
    """The model, and the parameters that its training starts from."""

    params: Params
    start: Params


@record(frozen=True)
class Nothing(Message):
    """The clients need nothing from the server."""


def train_on_sets(
    task: Task, start: Params, images: Tensor, labels: Tensor, shares: Tensor, lr: float, steps: int
) -> Params:
    """The model trained from `start` on all sets, where client k's set has weight `shares[k]`."""
    params, _ = descend(task, start, images, labels, shares, lr=lr, radius=math.inf, max_steps=steps)
    return params


class OneShot(Method[Server, Nothing, Up]):
    """Each round makes new sets and trains the model on them from its initial parameters."""

    def init_server(self, params: Params, plan: Plan) -> Server:
        return Server(params, params)

    def broadcast(self, at: At, server: Server, clients: Sequence[int]) -> Nothing:
        return Nothing()

    @abstractmethod
    def train(self, task: Task, at: At, start: Params, up: Up) -> Params:
        """The model trained from `start` on the sets of a cohort."""

    def server_update(
        self, task: Task, at: At, server: Server, clients: Sequence[int], up: Up | None, rng: ServerStreams
    ) -> Server:
        return server if up is None else Server(self.train(task, at, server.start, up), server.start)

    def model(self, server: Server) -> Params:
        return server.params
