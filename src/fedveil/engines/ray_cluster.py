"""Chunks of clients as tasks on a Ray cluster: the simulator's work on several machines, with the same bits.

The clients' data is placed once on every machine, where all its worker processes read it without a copy. A task gets
the broadcast and the states of its chunk, and returns uploads and new states, which depend on nothing else, so a task
whose worker or machine fails is computed again. Workers on the run's machine write both into shared memory
(`upload_tables.py`); only other machines send them.

Ray sends pickled objects: whoever can reach a cluster can run code on it. Use one whose network you trust.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from fedveil.data.client_data import ArrayClients, Clients
from fedveil.engines.engine import require_finite
from fedveil.engines.machine_memory import Address, MachineMemory
from fedveil.engines.processes import failure, keep_freed_memory, let_threads_sleep, raise_failure
from fedveil.engines.shared_memory import Leaf, dtype_name, layout
from fedveil.engines.upload_tables import Expected, UploadTables
from fedveil.engines.worker import ClientWorker, Computed
from fedveil.errors import FedveilError, InputError
from fedveil.messages import Message
from fedveil.methods.method import AnyMethod, At
from fedveil.streams import NoiseSource
from fedveil.task import Task
from fedveil.tree import State, own_memory

_RETRIES = 5  # retries of a task whose worker or machine fails


@dataclass(frozen=True)
class _Packed:
    """A tensor as Ray places it in shared memory: one block of bytes that readers map without a copy."""

    dtype: str
    shape: tuple[int, ...]
    content: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, leaf: Tensor) -> _Packed:
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        return cls(dtype_name(leaf.dtype), tuple(leaf.shape), flat.view(torch.uint8).numpy())

    def mapped(self) -> Tensor:
        """The tensor in shared memory, which must not be written to."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns of memory that cannot be written to
            flat = torch.from_numpy(self.content)
        return flat.view(Leaf("", self.dtype, 0, (), 0).torch_dtype).reshape(self.shape)

    def copied(self) -> Tensor:
        """A copy of the tensor with torch's alignment, since rounding of products may depend on alignment."""
        return self.mapped().clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _PackedClients:
    """`ArrayClients` by its blocks."""

    x: _Packed
    y: _Packed
    parts: _Packed
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, clients: ArrayClients) -> _PackedClients:
        parts = torch.cat(clients.parts)
        return cls(_Packed.of(clients.x), _Packed.of(clients.y), _Packed.of(parts), tuple(clients.sizes))

    def unpacked(self) -> ArrayClients:
        parts = list(torch.split(self.parts.mapped(), list(self.sizes)))
        return ArrayClients(self.x.mapped(), self.y.mapped(), parts)


@dataclass(frozen=True)
class _Placed:
    """Data that every worker of the cluster needs for the whole run."""

    task: Task
    clients: _PackedClients | Clients
    method: AnyMethod
    seed: int
    noise_source: NoiseSource
    versions: Mapping[str, str]

    @classmethod
    def of(cls, worker: ClientWorker) -> _Placed:
        clients = worker.clients
        packed = _PackedClients.of(clients) if type(clients) is ArrayClients else clients
        return cls(
            worker.task, packed, worker.method, worker.seed, worker.noise_source, _versions(worker.method)
        )

    def worker(self) -> ClientWorker:
        if (own := _versions(self.method)) != self.versions:
            raise FedveilError(
                f"a machine of the Ray cluster has {_listed(own)}, the run {_listed(self.versions)}. "
                "Install the same versions everywhere, so that results do not depend on the machine."
            )
        clients = self.clients.unpacked() if isinstance(self.clients, _PackedClients) else self.clients
        return ClientWorker(self.task, clients, self.method, self.seed, self.noise_source)


@dataclass(frozen=True)
class _Tables:
    """Tables of `total` rows for the answers of tasks on the run's machine."""

    address: Address
    total: int
    expected: Expected | None


@dataclass(frozen=True)
class _Chunk:
    """The input of one task: clients, their rows of the broadcast, and their states."""

    clients: list[int]
    rows: list[int]
    own: dict[str, _Packed]
    known: list[int]
    states: dict[str, _Packed]
    at: At
    sums: bool


@dataclass(frozen=True)
class _Reply:
    """The output of a task: uploads or their sum, and states."""

    kind: type[Message]
    head: dict[str, Any]
    kinds: list[Leaf]
    """Of the tensors, by "up/name" and "state/name", as tables without rows."""
    sent: dict[str, _Packed]
    """Empty if the tensors were written into the tables."""
    left: Expected | None
    row_size: int | None


class _Unexpected:
    """The answer of a task with an unexpected upload, which may have been overwritten."""


@dataclass(frozen=True)
class _Broadcast:
    """The part of an exchange that all clients share."""

    head: dict[str, Any]
    shared: dict[str, _Packed]


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
        self._placed = ray.put(_Placed.of(worker))
        self._shared = MachineMemory.made(ray.get_runtime_context().get_node_id(), capacity)
        self._expected: dict[int, Expected] = {}  # by the exchange's number within a round
        self._tables: dict[str, Tensor] = {}
        self._task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_compute)

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
        shared = {name: _Packed.of(leaf) for name, leaf in sent.items() if name not in own}
        let_threads_sleep()
        try:
            broadcast = ray.put(_Broadcast(down.head(), shared))
            orders = [
                _chunk_of([clients[row] for row in rows], rows, own, states, at, sums) for rows in chunks
            ]
            found = self._spread(broadcast, orders, None if sums else self._expected.get(at.exchange))
            return found or self._spread(broadcast, orders, None) or _changing()
        except RayError as error:
            raise FedveilError(
                f"the Ray cluster could not compute a chunk of clients, after {_RETRIES} more attempts: "
                f"{type(error).__name__}. Look at its machines; the same command resumes from the last checkpoint."
            ) from error

    def _spread(self, broadcast: Any, orders: Sequence[_Chunk], expected: Expected | None) -> Computed | None:
        """The answers to all orders; None if an upload is unexpected."""
        total = sum(len(order.rows) for order in orders)
        tables = None
        if self._shared is not None and not orders[0].sums:
            rows = None if expected is None else expected.for_rows(total)
            tables = _Tables(self._shared.address, total, rows)
        running = {
            self._task.remote([self._placed], broadcast, order, tables): number
            for number, order in enumerate(orders)
        }
        replies: dict[int, _Reply] = {}
        unexpected = False
        while running:
            [done], _ = ray.wait(list(running), num_returns=1)
            number = running.pop(done)
            reply: _Reply | _Unexpected | dict[str, str] = ray.get(done)
            if isinstance(reply, dict):
                raise_failure(reply)
            if isinstance(reply, _Unexpected):
                unexpected = True
            else:
                replies[number] = reply
                self._put(reply, number, orders)
        return None if unexpected else self._collected(replies, orders)

    def _collected(self, replies: Mapping[int, _Reply], orders: Sequence[_Chunk]) -> Computed:
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

    def _put(self, reply: _Reply, number: int, orders: Sequence[_Chunk]) -> None:
        """Write received tensors into the tables."""
        if not reply.sent:
            return
        places, rows = self._places(reply, orders), _place_of(orders[number].rows)
        for name, leaf in reply.sent.items():
            summed = reply.row_size is not None and name.startswith("up/")
            places[name][slice(number, number + 1) if summed else rows] = leaf.mapped()

    def _places(self, reply: _Reply, orders: Sequence[_Chunk]) -> dict[str, Tensor]:
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
        if self._shared is not None:
            self._shared.close()
        if self._connected_here:
            ray.shutdown()


def _chunk_of(
    ids: list[int],
    rows: Sequence[int],
    own: Mapping[str, Tensor],
    states: Mapping[int, State],
    at: At,
    sums: bool,
) -> _Chunk:
    known = [client for client in ids if client in states]
    names = states[known[0]] if known else ()
    held = {name: _Packed.of(torch.stack([states[client][name] for client in known])) for name in names}
    picked = torch.as_tensor(list(rows), dtype=torch.long)
    sent = {name: _Packed.of(leaf.index_select(0, picked)) for name, leaf in own.items()}
    return _Chunk(ids, list(rows), sent, known, held, at, sums)


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


def _versions(method: AnyMethod) -> dict[str, str]:
    """The versions that results depend on."""
    return {name: metadata.version(name) for name in ("fedveil", "torch", "numpy")} | {
        "numerics": f"{method.numerics}"
    }


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


# In a worker process of the cluster.

_LOADED: dict[Any, ClientWorker] = {}  # of the run that this process works for
_OPENED: dict[Address, UploadTables | None] = {}


def _loaded(placed: Any) -> ClientWorker:
    if placed not in _LOADED:
        torch.set_num_threads(1)
        keep_freed_memory()
        _LOADED.clear()
        _LOADED[placed] = ray.get(placed).worker()
    return _LOADED[placed]


def _opened(address: Address) -> UploadTables | None:
    """The run's tables; None on another machine."""
    if address not in _OPENED:
        _OPENED.clear()
        memory = address.opened(ray.get_runtime_context().get_node_id())
        _OPENED[address] = None if memory is None else UploadTables(memory)
    return _OPENED[address]


def _compute(
    placed: Sequence[Any], broadcast: _Broadcast, chunk: _Chunk, where: _Tables | None
) -> _Reply | _Unexpected | dict[str, str]:
    """A task: the uploads and new states of a chunk's clients, or the error."""
    try:
        return _answer(_loaded(placed[0]), broadcast, chunk, where)
    except Exception as error:
        return failure(error)


def _answer(
    worker: ClientWorker, broadcast: _Broadcast, chunk: _Chunk, where: _Tables | None
) -> _Reply | _Unexpected:
    sent = {name: leaf.copied() for name, leaf in (broadcast.shared | chunk.own).items()}
    down = worker.method.down_type.assemble(broadcast.head, sent)
    held = {name: leaf.copied() for name, leaf in chunk.states.items()}
    known = {
        client: {name: table[row] for name, table in held.items()} for row, client in enumerate(chunk.known)
    }
    tables = None if where is None else _opened(where.address)
    worker.task.memory = own_memory
    if where is not None and tables is not None:
        tables.open(chunk.rows, where.expected)
        worker.task.memory = tables.lend
    up, after = worker.update(chunk.clients, down, known, chunk.at)
    total = worker.method.exact_sum(chunk.at, down, up) if chunk.sums else None
    row_size = None
    if total is not None:
        require_finite(up, chunk.clients, chunk.at)
        up, row_size = total, up.row_bytes()
    tensors = {f"up/{name}": leaf for name, leaf in up.tensors().items()}
    tensors |= {f"state/{name}": leaf for name, leaf in after.items()}
    kinds, left = layout(tensors, rows=0), None
    if where is not None and tables is not None and tables.fit(tensors, where.total):
        left = tables.put(tensors, where.total)
        if left is None:
            return _Unexpected()
        tensors = {}
    packed = {name: _Packed.of(leaf) for name, leaf in tensors.items()}
    return _Reply(type(up), up.head(), kinds, packed, left, row_size)
