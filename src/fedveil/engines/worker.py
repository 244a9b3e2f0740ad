"""The client half of a method for any set of clients, used in every process and on every node."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from fedveil.data.client_data import ClientData, Clients
from fedveil.errors import DivergedError
from fedveil.lazy_torch import torch
from fedveil.messages import Message
from fedveil.methods.method import AnyMethod, At
from fedveil.privacy.clipping import hidden_divergence
from fedveil.streams import ClientStreams, NoiseSource
from fedveil.task import Task
from fedveil.tree import State

_MOST_KEPT = 1 << 28  # largest size in bytes of examples kept between exchanges
log = logging.getLogger("flwr.fedveil")


@dataclass(frozen=True)
class Computed:
    """The uploads and new states of a cohort.

    Attributes:
        row_size: If the rows of `up` are sums of uploads: the size of one client's upload in bytes.
    """

    up: Message
    states: State
    row_size: int | None = None


class ClientWorker:
    def __init__(
        self,
        task: Task,
        clients: Clients,
        method: AnyMethod,
        seed: int,
        noise_source: NoiseSource = "seeded",
        *,
        deployed: bool = False,
    ) -> None:
        """`deployed`, or noise that nobody can reproduce: contributions that are not finite count as zero, since an
        error would disclose data. A seeded simulation reports them."""
        self.task = task
        self.clients = clients
        self.method = method
        self.seed = seed
        self.noise_source: NoiseSource = noise_source
        self.hides = deployed or noise_source == "entropy"
        self._kept: dict[tuple[int, ...], ClientData] = {}
        self._kept_round = 0
        self._room = 0

    def update(
        self, ids: Sequence[int], down: Message, known: Mapping[int, State], at: At
    ) -> tuple[Message, State]:
        """The uploads and new states of these clients, rows in their order."""
        data = self._data(tuple(ids), at)
        rng = ClientStreams(self.seed, at.round, tuple(ids), at.exchange, self.noise_source)
        state = self._states(ids, data, known)
        happened: Sequence[int] = ()
        with ExitStack() as stack:
            if self.hides:
                happened = stack.enter_context(hidden_divergence())
            try:
                up, after = self.method.client_update(self.task, at, down, data, state, rng)
            except DivergedError as error:
                raise DivergedError(
                    f"round {at.round}: {error}. Lower the learning rate or the noise, or look at the clients' "
                    "data; the last checkpoint is kept.",
                    field=error.field,
                ) from error
        if happened:
            log.warning(
                "round %d: %d contributions were not finite and count as zero. If there are many, lower the learning "
                "rate. Whoever sees this line learns something about the data.",
                at.round,
                sum(happened),
            )
        return up, after

    def _data(self, ids: tuple[int, ...], at: At) -> ClientData:
        """The examples of these clients, cached until the end of a round with several exchanges.

        Gathering all examples again in every exchange would cost more than the gradient of a batch.
        """
        if at.round != self._kept_round:
            self._kept, self._kept_round, self._room = {}, at.round, _MOST_KEPT
        if ids in self._kept:
            return self._kept[ids]
        data = _on(self.clients.load(ids), self.task.device)
        size = data.x.numel() * data.x.element_size()
        if size <= self._room and at.exchange + 1 < self.method.exchanges(at.plan):
            self._kept[ids] = data
            self._room -= size
        return data

    def _states(self, ids: Sequence[int], data: ClientData, known: Mapping[int, State]) -> State:
        new = [row for row, client in enumerate(ids) if client not in known]
        streams = ClientStreams(self.seed, 0, tuple(ids))
        if len(new) == len(ids):
            return self.method.init_client(self.task, data, streams)
        made = self.method.init_client(self.task, data.rows(new), streams.rows(new)) if new else {}
        names = made or known[next(client for client in ids if client in known)]
        table: State = {}
        for name in names:
            fresh = iter(made[name]) if new else iter(())
            kept = [known[client][name] if client in known else next(fresh) for client in ids]
            table[name] = torch.stack([leaf.to(data.x.device) for leaf in kept])
        return table


def _on(data: ClientData, device: torch.device) -> ClientData:
    if data.x.device == device:
        return data
    return ClientData(data.x.to(device), data.y.to(device), data.sizes.to(device), data.declared)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run client computations on one thread, so that rounding does not depend on the machine's load."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
