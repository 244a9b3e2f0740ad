"""The server half of methods with one model that all clients are sent: what it keeps and sends, and how it moves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass as record
from typing import Literal

from torch import Tensor

from fedveil.messages import Message, Record
from fedveil.methods.method import At, Method, Up
from fedveil.privacy.releases import Plan
from fedveil.streams import ServerStreams
from fedveil.task import Task
from fedveil.tree import Params, with_axis


@record(frozen=True)
class Server(Record):
    params: Params


@record(frozen=True)
class Model(Message):
    params: Params


def averaging_weights(sizes: Tensor, weighting: Literal["size", "uniform"]) -> Tensor:
    """What each client counts: n_k / n, or 1 / K."""
    if weighting == "uniform":
        return sizes.new_full(sizes.shape, 1.0).double() / len(sizes)
    return sizes.double() / sizes.sum().clamp(min=1)


class SharedModel(Method[Server, Model, Up]):
    """The server keeps one model and sends it to the whole cohort."""

    def init_server(self, params: Params, plan: Plan) -> Server:
        return Server(params)

    def broadcast(self, at: At, server: Server, clients: Sequence[int]) -> Model:
        return Model(with_axis(server.params))

    def model(self, server: Server) -> Params:
        return server.params


class AggregatedModel(SharedModel[Up]):
    """A shared model that becomes `aggregate` of the answers, and stays as it was where nobody took part."""

    @abstractmethod
    def aggregate(self, task: Task, at: At, w: Params, up: Up) -> Params:
        """The model after `up`, the answers to the model `w`."""

    def server_update(
        self, task: Task, at: At, server: Server, clients: Sequence[int], up: Up | None, rng: ServerStreams
    ) -> Server:
        return server if up is None else Server(self.aggregate(task, at, server.params, up))
