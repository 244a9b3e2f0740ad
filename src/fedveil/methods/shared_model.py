"""The server half of methods with one shared model: its state, its broadcast and its update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass as record
from typing import TYPE_CHECKING

from fedveil.data.client_data import ClientData
from fedveil.lazy_torch import torch
from fedveil.messages import Message, Record
from fedveil.methods.fields import Weighting
from fedveil.methods.method import At, ClientSum, Method, Up
from fedveil.privacy.mechanisms import Unnoised
from fedveil.privacy.private_sum import NoisySum
from fedveil.privacy.releases import Plan
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.tree import Params, State, per_row, sub, with_axis

if TYPE_CHECKING:
    from torch import Tensor


@record(frozen=True)
class Server(Record):
    """The server's state: one model.

    Args:
        params: The model.
    """

    params: Params


@record(frozen=True)
class Model(Message):
    """A model as a message.

    Args:
        params: Leaves `[K, ...]`.
    """

    params: Params


def averaging_weights(sizes: Tensor, weighting: Weighting) -> Tensor:
    """The weight of each client in the average.

    Args:
        sizes: Number of examples of each client, `[K]`.
        weighting: "size": n_k / n; "uniform": 1 / K.

    Returns:
        Weights `[K]` that add up to 1.
    """
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
    """A shared model that is replaced by `aggregate` of the answers, and kept if nobody answered."""

    @abstractmethod
    def aggregate(self, task: Task, at: At, w: Params, up: Up) -> Params:
        """The model after `up`, the answers to the model `w`."""

    def server_update(
        self, task: Task, at: At, server: Server, clients: Sequence[int], up: Up | None, rng: ServerStreams
    ) -> Server:
        return server if up is None else Server(self.aggregate(task, at, server.params, up))


_WEIGHT = "weight of the client"  # cannot be a parameter's name, which has no spaces
Train = Callable[[Task, At, Params, ClientData, ClientStreams], Params]


def averaged_securely(weighting: Weighting, train: Train) -> ClientSum[Server, Model]:
    """Averaging by sums without noise: of weights n_k / (size of the largest client), and of weighted updates.

    With uniform weights the sum is divided by the number of clients in it.
    """

    def contribution(
        task: Task, at: At, down: Model, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Params, State]:
        update = sub(train(task, at, down.params, data, rng), down.params)
        if weighting == "uniform":
            return update, state
        weight = (data.sizes.double() / at.plan.largest_client).clamp(max=1)
        weighted = {name: leaf * per_row(weight, leaf) for name, leaf in update.items()}
        return {_WEIGHT: weight, **weighted}, state

    def update(_at: At, server: Server, total: NoisySum) -> Server:
        if weighting == "uniform":
            return Server(total.added_to(server.params))
        weight = float(total.total[_WEIGHT].sum())
        if weight <= 0:
            return server
        rest = {name: leaf / weight for name, leaf in total.total.items() if name != _WEIGHT}
        return Server(NoisySum(rest, 1).added_to(server.params))

    def shapes(down: Model) -> dict[str, torch.Size]:
        weight = {} if weighting == "uniform" else {_WEIGHT: torch.Size()}
        return weight | {name: leaf.shape[1:] for name, leaf in down.params.items()}

    what = "the sum of the clients' updates, and of their weights"
    return ClientSum(Unnoised(), contribution, update, what, shapes=shapes)
