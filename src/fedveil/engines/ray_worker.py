"""What a task on a Ray cluster is sent and what a worker process of the cluster does with it (`ray_cluster.py`)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from torch import Tensor

from fedveil.data.client_data import ArrayClients, Clients
from fedveil.engines.engine import require_finite
from fedveil.engines.machine_memory import Address
from fedveil.engines.processes import failure, keep_freed_memory
from fedveil.engines.shared_memory import Leaf, SharedMemory, dtype_name, layout
from fedveil.engines.upload_tables import Expected, UploadTables
from fedveil.engines.worker import ClientWorker
from fedveil.errors import FedveilError
from fedveil.messages import Message
from fedveil.methods.method import AnyMethod, At
from fedveil.plugins import load_plugins
from fedveil.streams import NoiseSource
from fedveil.task import Task
from fedveil.tree import own_memory


@dataclass(frozen=True)
class Packed:
    """A tensor as Ray places it in shared memory: one block of bytes that readers map without a copy."""

    dtype: str
    shape: tuple[int, ...]
    content: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, leaf: Tensor) -> Packed:
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
class PackedClients:
    """`ArrayClients` by its blocks."""

    x: Packed
    y: Packed
    parts: Packed
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, clients: ArrayClients) -> PackedClients:
        parts = torch.cat(clients.parts)
        return cls(Packed.of(clients.x), Packed.of(clients.y), Packed.of(parts), tuple(clients.sizes))

    def unpacked(self) -> ArrayClients:
        parts = list(torch.split(self.parts.mapped(), list(self.sizes)))
        return ArrayClients(self.x.mapped(), self.y.mapped(), parts)


@dataclass(frozen=True)
class Placed:
    """Data that every worker of the cluster needs for the whole run."""

    task: Task
    clients: PackedClients | Clients
    method: AnyMethod
    seed: int
    noise_source: NoiseSource
    versions: Mapping[str, str]

    @classmethod
    def of(cls, worker: ClientWorker) -> Placed:
        clients = worker.clients
        packed = PackedClients.of(clients) if type(clients) is ArrayClients else clients
        return cls(
            worker.task, packed, worker.method, worker.seed, worker.noise_source, _versions(worker.method)
        )

    def worker(self) -> ClientWorker:
        if (own := _versions(self.method)) != self.versions:
            raise FedveilError(
                f"a machine of the Ray cluster has {_listed(own)}, the run {_listed(self.versions)}. "
                "Install the same versions everywhere, so that results do not depend on the machine."
            )
        clients = self.clients.unpacked() if isinstance(self.clients, PackedClients) else self.clients
        return ClientWorker(self.task, clients, self.method, self.seed, self.noise_source)


@dataclass(frozen=True)
class Memory:
    """The memory that workers on the run's machine share with it."""

    broadcasts: Address
    uploads: Address


@dataclass(frozen=True)
class Tables:
    """Tables of `total` rows for the answers of tasks on the run's machine."""

    total: int
    expected: Expected | None


@dataclass(frozen=True)
class Chunk:
    """Clients that are computed together, their rows of the broadcast, and their states."""

    clients: list[int]
    rows: list[int]
    own: dict[str, Packed]
    known: list[int]
    states: dict[str, Packed]
    at: At
    sums: bool


@dataclass(frozen=True)
class Reply:
    """What a chunk returns: uploads or their sum, and states."""

    kind: type[Message]
    head: dict[str, Any]
    kinds: list[Leaf]
    """Of the tensors, by "up/name" and "state/name", as tables without rows."""
    sent: dict[str, Packed]
    """Empty if the tensors were written into the tables."""
    left: Expected | None
    row_size: int | None


class Unexpected:
    """The answer of a chunk with an unexpected upload, which may have been overwritten."""


class Elsewhere:
    """The answer of a task on another machine that was not sent the broadcast."""


@dataclass(frozen=True)
class Broadcast:
    """The part of an exchange that all clients share."""

    head: dict[str, Any]
    memory: Memory | None
    leaves: list[Leaf] | None
    """In that memory; None if it is too small."""


def _versions(method: AnyMethod) -> dict[str, str]:
    """The versions that results depend on."""
    return {name: metadata.version(name) for name in ("fedveil", "torch", "numpy")} | {
        "numerics": f"{method.numerics}"
    }


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


_LOADED: dict[Any, ClientWorker] = {}  # of the run that this process works for
_OPENED: dict[Memory, tuple[SharedMemory | None, UploadTables | None]] = {}


@dataclass(frozen=True)
class _Place:
    """Where this process leaves answers."""

    tables: UploadTables
    where: Tables


def _loaded(placed: Any) -> ClientWorker:
    if placed not in _LOADED:
        torch.set_num_threads(1)
        keep_freed_memory()
        load_plugins(())  # of this machine: what is placed names their classes
        _LOADED.clear()
        _LOADED[placed] = ray.get(placed).worker()
    return _LOADED[placed]


def _opened(memory: Memory) -> tuple[SharedMemory | None, UploadTables | None]:
    """The run's broadcast and tables; None on another machine."""
    if memory not in _OPENED:
        _OPENED.clear()
        node = ray.get_runtime_context().get_node_id()
        uploads = memory.uploads.opened(node)
        _OPENED[memory] = memory.broadcasts.opened(node), None if uploads is None else UploadTables(uploads)
    return _OPENED[memory]


def compute(
    placed: Sequence[Any],
    broadcast: Broadcast,
    sent: Mapping[str, Packed] | None,
    chunks: Sequence[Chunk],
    where: Tables | None,
) -> list[Reply | Unexpected] | Elsewhere | dict[str, str]:
    """A task: the uploads and new states of some chunks' clients, or the error."""
    try:
        worker = _loaded(placed[0])
        here, tables = (None, None) if broadcast.memory is None else _opened(broadcast.memory)
        if here is not None and broadcast.leaves is not None:
            shared = {leaf.name: here.view(leaf) for leaf in broadcast.leaves}
        elif sent is not None:
            shared = {name: leaf.copied() for name, leaf in sent.items()}
        else:
            return Elsewhere()
        place = None if where is None or tables is None else _Place(tables, where)
        return [_answer(worker, broadcast.head, shared, chunk, place) for chunk in chunks]
    except Exception as error:
        return failure(error)


def _answer(
    worker: ClientWorker,
    head: dict[str, Any],
    shared: Mapping[str, Tensor],
    chunk: Chunk,
    place: _Place | None,
) -> Reply | Unexpected:
    own = {name: leaf.copied() for name, leaf in chunk.own.items()}
    down = worker.method.down_type.assemble(head, {**shared, **own})
    held = {name: leaf.copied() for name, leaf in chunk.states.items()}
    known = {
        client: {name: table[row] for name, table in held.items()} for row, client in enumerate(chunk.known)
    }
    worker.task.memory = own_memory
    if place is not None:
        place.tables.open(chunk.rows, place.where.expected)
        worker.task.memory = place.tables.lend
    up, after = worker.update(chunk.clients, down, known, chunk.at)
    total = worker.method.exact_sum(chunk.at, down, up) if chunk.sums else None
    row_size = None
    if total is not None:
        require_finite(up, chunk.clients, chunk.at)
        up, row_size = total, up.row_bytes()
    tensors = {f"up/{name}": leaf for name, leaf in up.tensors().items()}
    tensors |= {f"state/{name}": leaf for name, leaf in after.items()}
    kinds, left = layout(tensors, rows=0), None
    if place is not None and place.tables.fit(tensors, place.where.total):
        left = place.tables.put(tensors, place.where.total)
        if left is None:
            return Unexpected()
        tensors = {}
    packed = {name: Packed.of(leaf) for name, leaf in tensors.items()}
    return Reply(type(up), up.head(), kinds, packed, left, row_size)
