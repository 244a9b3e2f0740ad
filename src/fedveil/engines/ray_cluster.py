"""Chunks of clients as tasks on a Ray cluster: the simulator's work on several machines, with the same bits.

The clients' data is placed once on every machine, where all its worker processes read it without a copy. A task gets
the broadcast and the states of some chunks, and returns uploads and new states, which depend on nothing else, so a task
whose worker or machine fails is computed again. Workers on the run's machine read the broadcast from shared memory and
write their answers into it (`upload_tables.py`); only other machines are sent the one and send the others. A task costs
as much as several clients, so cores take several chunks at first and fewer towards the end.

Ray sends pickled objects: whoever can reach a cluster can run code on it. Use one whose network you trust.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from fedveil.engines.machine_memory import MachineMemory
from fedveil.engines.processes import let_threads_sleep, raise_failure
from fedveil.engines.ray_worker import (
    Broadcast,
    Chunk,
    Elsewhere,
    Memory,
    Packed,
    Placed,
    Reply,
    Tables,
    Unexpected,
    compute,
)
from fedveil.engines.shared_memory import Leaf, layout
from fedveil.engines.upload_tables import Expected
from fedveil.engines.worker import ClientWorker, Computed
from fedveil.errors import FedveilError, InputError
from fedveil.messages import Message
from fedveil.methods.method import At
from fedveil.tree import State

_RETRIES = 5  # retries of a task whose worker or machine fails


class RayWorkers:
    """Runs chunks of the cohort on every core of a Ray cluster."""

    def __init__(self, worker: ClientWorker, address: str, capacity: int = 0, *, sums: bool = False) -> None:
        """
        Args:
            worker: The client half of the run.
            address: Of a running cluster, "auto" for the one of this machine, "local" to start one here.
            capacity: Bytes of the memory in which workers on this machine leave uploads; 0 for none.
            sums: Whether the sum of a chunk's uploads will do, where the method's sums are exact.
        """
        if worker.task.device.type != "cpu":
            raise InputError(
                "run.device", str(worker.task.device), "the Ray engine computes on processors", 'Use "cpu".'
            )
        self._connected_here = _connect(address)
        self._sums = sums
        self._placed = ray.put(Placed.of(worker))
        node = ray.get_runtime_context().get_node_id()
        self._shared = MachineMemory.made(node, capacity)
        self._broadcasts = MachineMemory.made(node, capacity) if self._shared is not None else None
        self._alone = True  # until a worker on another machine turns up
        resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
        self._cores = max(1, int(resources.get("CPU", 1)))
        self._expected: dict[int, Expected] = {}  # by the exchange's number within a round
        self._tables: dict[str, Tensor] = {}
        self._task = ray.remote(num_cpus=1, max_retries=_RETRIES)(compute)

    def run(
        self,
        clients: Sequence[int],
        chunks: Sequence[Sequence[int]],
        down: Message,
        states: Mapping[int, State],
        at: At,
    ) -> Computed:
        """The uploads and new states of all chunks, rows in the order of `clients`.

        The tensors are overwritten by the next call.
        """
        sums = self._sums and max(map(len, chunks)) > 2  # a sum has twice the bytes of an upload
        sent = down.tensors()
        own = {name: leaf for name, leaf in sent.items() if leaf.shape[0] != 1}
        shared = {name: leaf for name, leaf in sent.items() if name not in own}
        let_threads_sleep()
        try:
            broadcast = self._broadcast(down.head(), shared)
            orders = [
                _chunk_of([clients[row] for row in rows], rows, own, states, at, sums) for rows in chunks
            ]
            expected = None if sums else self._expected.get(at.exchange)
            found = self._spread(broadcast, shared, orders, expected)
            return found or self._spread(broadcast, shared, orders, None) or _changing()
        except RayError as error:
            raise FedveilError(
                f"the Ray cluster could not compute a chunk of clients, after {_RETRIES} more attempts: "
                f"{type(error).__name__}. Look at its machines; the same command resumes from the last checkpoint."
            ) from error

    @property
    def _memory(self) -> Memory | None:
        if self._shared is None or self._broadcasts is None:
            return None
        return Memory(self._broadcasts.address, self._shared.address)

    def _broadcast(self, head: dict[str, Any], shared: Mapping[str, Tensor]) -> Broadcast:
        leaves = layout(shared)
        if self._broadcasts is None or not self._broadcasts.memory.fits(leaves):
            return Broadcast(head, self._memory, None)
        for leaf in leaves:
            self._broadcasts.memory.view(leaf).copy_(shared[leaf.name])
        return Broadcast(head, self._memory, leaves)

    def _spread(
        self,
        broadcast: Broadcast,
        shared: Mapping[str, Tensor],
        orders: Sequence[Chunk],
        expected: Expected | None,
    ) -> Computed | None:
        """The answers to all orders; None if an upload is unexpected."""
        total = sum(len(order.rows) for order in orders)
        tables = None
        if self._shared is not None and not orders[0].sums:
            tables = Tables(total, None if expected is None else expected.for_rows(total))
        sent: Any = None
        if not self._alone or broadcast.leaves is None:
            sent = _sent(shared)
        running: dict[Any, range] = {}

        def begin(portion: range) -> None:
            chunks = [orders[number] for number in portion]
            running[self._task.remote([self._placed], broadcast, sent, chunks, tables)] = portion

        for portion in portions(len(orders), self._cores):
            begin(portion)
        replies: dict[int, Reply] = {}
        unexpected = False
        while running:
            [done], _ = ray.wait(list(running), num_returns=1)
            portion = running.pop(done)
            answer: list[Reply | Unexpected] | Elsewhere | dict[str, str] = ray.get(done)
            if isinstance(answer, dict):
                raise_failure(answer)
            if isinstance(answer, Elsewhere):
                self._alone, sent = False, sent or _sent(shared)
                begin(portion)
                continue
            for number, reply in zip(portion, answer, strict=True):
                if isinstance(reply, Unexpected):
                    unexpected = True
                else:
                    replies[number] = reply
                    self._put(reply, number, orders)
        return None if unexpected else self._collected(replies, orders)

    def _collected(self, replies: Mapping[int, Reply], orders: Sequence[Chunk]) -> Computed:
        first = replies[0]
        if any(reply.kinds != first.kinds for reply in replies.values()):
            raise FedveilError(
                "clients of one exchange answered with tensors of different shapes; "
                "the method must pad its uploads to one shape"
            )
        left = [reply.left for reply in replies.values() if reply.left is not None]
        if left:
            self._expected[orders[0].at.exchange] = max(left, key=lambda tables: len(tables.trained))
        up: dict[str, Tensor] = {}
        states: State = {}
        for leaf, table in self._places(first, orders).items():
            kind, _, name = leaf.partition("/")
            (up if kind == "up" else states)[name] = table
        return Computed(first.kind.assemble(first.head, up), states, first.row_size)

    def _put(self, reply: Reply, number: int, orders: Sequence[Chunk]) -> None:
        """Write received tensors into the tables."""
        if not reply.sent:
            return
        places, rows = self._places(reply, orders), _place_of(orders[number].rows)
        for name, leaf in reply.sent.items():
            summed = reply.row_size is not None and name.startswith("up/")
            places[name][slice(number, number + 1) if summed else rows] = leaf.mapped()

    def _places(self, reply: Reply, orders: Sequence[Chunk]) -> dict[str, Tensor]:
        """The tables of such a reply: shared ones wherever workers of this machine may have written to them."""
        total = sum(len(order.rows) for order in orders)
        if self._shared is not None and reply.row_size is None:
            leaves = Expected(reply.kinds, {}).for_rows(total).leaves
            if self._shared.memory.fits(leaves):
                return {leaf.name: self._shared.memory.view(leaf) for leaf in leaves}
        summed = reply.row_size is not None
        return {
            leaf.name: self._table(leaf, len(orders) if summed and leaf.name.startswith("up/") else total)
            for leaf in reply.kinds
        }

    def _table(self, like: Leaf, rows: int) -> Tensor:
        """The memory of one upload, reused between exchanges: allocating new pages is as slow as copying."""
        found = self._tables.get(like.name)
        if found is None or found.shape != (rows, *like.shape) or found.dtype != like.torch_dtype:
            found = self._tables[like.name] = torch.empty(rows, *like.shape, dtype=like.torch_dtype)
        return found

    def holds(self, tensor: Tensor) -> bool:
        if self._shared is not None and self._shared.memory.holds(tensor):
            return True
        place = tensor.untyped_storage().data_ptr()
        return any(place == table.untyped_storage().data_ptr() for table in self._tables.values())

    def close(self) -> None:
        del self._placed
        for memory in (self._shared, self._broadcasts):
            if memory is not None:
                memory.close()
        if self._connected_here:
            ray.shutdown()


def _sent(shared: Mapping[str, Tensor]) -> Any:
    """A reference to these tensors, placed once on every machine that gets a task with it."""
    return ray.put({name: Packed.of(leaf) for name, leaf in shared.items()})


def portions(count: int, cores: int) -> list[range]:
    """The chunks of each task: equal parts of half of what is left, so that the cores end at about the same time."""
    found: list[range] = []
    first = 0
    while first < count:
        size = math.ceil((count - first) / (2 * cores))
        starts = range(first, min(count, first + cores * size), size)
        found += [range(start, min(count, start + size)) for start in starts]
        first += cores * size
    return found


def _chunk_of(
    ids: list[int],
    rows: Sequence[int],
    own: Mapping[str, Tensor],
    states: Mapping[int, State],
    at: At,
    sums: bool,
) -> Chunk:
    known = [client for client in ids if client in states]
    names = states[known[0]] if known else ()
    held = {name: Packed.of(torch.stack([states[client][name] for client in known])) for name in names}
    picked = torch.as_tensor(list(rows), dtype=torch.long)
    sent = {name: Packed.of(leaf.index_select(0, picked)) for name, leaf in own.items()}
    return Chunk(ids, list(rows), sent, known, held, at, sums)


def _changing() -> NoReturn:
    raise FedveilError(
        "a method's uploads change their kind from call to call; the same clients must answer alike"
    )


def _place_of(rows: Sequence[int]) -> slice | Tensor:
    together = list(rows) == list(range(rows[0], rows[0] + len(rows)))
    return slice(rows[0], rows[0] + len(rows)) if together else torch.tensor(rows)


def _connect(address: str) -> bool:
    """Connect to the cluster unless this process is connected to one; True if this call did."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if (
        address == "local"
    ):  # Ray would give its workers way to everything else on the machine, unlike our own pool
        os.environ.setdefault("RAY_worker_niceness", "0")
    own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(
            "run.address",
            address,
            f"no Ray cluster can be reached there ({type(error).__name__})",
            'Start one with `ray start --head`, or use "local" for one on this machine alone.',
        ) from error
    return True
