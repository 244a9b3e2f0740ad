"""Worker processes of the simulator, forked from it: they share its data without a copy and end with it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from fedveil.engines.processes import failure, keep_freed_memory, let_threads_sleep, raise_failure
from fedveil.engines.shared_memory import Leaf, SharedMemory, layout, require_room
from fedveil.engines.upload_tables import Expected, UploadTables
from fedveil.engines.worker import ClientWorker, Computed
from fedveil.errors import FedveilError
from fedveil.lazy_torch import torch
from fedveil.messages import Message
from fedveil.methods.method import At
from fedveil.privacy.releases import Plan
from fedveil.tree import State

if TYPE_CHECKING:
    from torch import Tensor


def can_fork() -> bool:
    return "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()


class Pool:
    """A fixed number of workers that process the chunks of a cohort."""

    def __init__(self, worker: ClientWorker, count: int, capacity: int) -> None:
        self.uploads = SharedMemory(capacity)
        self._downloads = SharedMemory(capacity)
        self._up_type = worker.method.up_type
        self._expected: dict[int, dict[str, Any]] = {}  # by the exchange's number within a round
        self._connections: list[Connection] = []
        self._processes = []
        context = multiprocessing.get_context("fork")
        for _ in range(count):
            ours, theirs = context.Pipe()
            others = [*self._connections, ours]
            process = context.Process(
                target=_serve, args=(worker, theirs, others, self._downloads, self.uploads), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(
        self,
        clients: Sequence[int],
        chunks: Sequence[Sequence[int]],
        down: Message,
        states: Mapping[int, State],
        at: At,
    ) -> Computed:
        """The uploads and new states of all chunks, rows in the order of `clients`.

        The tensors are in shared memory and are overwritten by the next call.
        """
        known = [client for client in clients if client in states]
        sent = {f"down/{name}": leaf for name, leaf in down.tensors().items()}
        if known:
            for name in states[known[0]]:
                sent[f"state/{name}"] = torch.stack([states[client][name] for client in known])
        leaves = layout(sent)
        require_room(self._downloads, leaves)
        for leaf in leaves:
            self._downloads.view(leaf).copy_(sent[leaf.name])
        order = {
            "head": down.head(),
            "leaves": [leaf.to_json() for leaf in leaves],
            "known": known,
            "plan": asdict(at.plan),
            "at": [at.round, at.exchange],
            "clients": list(clients),
        }
        expected = self._expected.get(at.exchange)
        replies = self._spread(order, chunks, expected)
        if any(reply["unexpected"] for reply in replies):
            replies = self._spread(order, chunks, None)
        self._expected[at.exchange] = max((reply["tables"] for reply in replies), key=_lends)
        return self._collect(replies)

    def _spread(
        self, order: dict[str, Any], chunks: Sequence[Sequence[int]], expected: dict[str, Any] | None
    ) -> list[dict[str, Any]]:
        """Distribute chunks to workers in decreasing portions, so that all end at about the same time."""
        order_text = json.dumps(order | {"expected": expected}).encode()
        let_threads_sleep()
        for connection in self._connections:
            _send(connection, order_text)
        waiting = list(chunks)
        idle = list(self._connections)
        busy: list[Connection] = []
        replies: list[dict[str, Any]] = []
        while waiting or busy:
            while waiting and idle:
                share = max(1, len(waiting) // (2 * len(self._connections)))
                taken, waiting = waiting[:share], waiting[share:]
                connection = idle.pop()
                _send(connection, json.dumps({"chunks": [list(rows) for rows in taken]}).encode())
                busy.append(connection)
            for ready in wait(busy):
                assert isinstance(ready, Connection)
                replies += _receive(ready)
                busy.remove(ready)
                idle.append(ready)
        return replies

    def _collect(self, replies: Sequence[dict[str, Any]]) -> Computed:
        first = replies[0]
        if any(reply["tables"]["leaves"] != first["tables"]["leaves"] for reply in replies):
            raise FedveilError(
                "clients of one exchange answered with tensors of different shapes; "
                "the method must pad its uploads to one shape",
                field="uploads",
            )
        up: dict[str, Tensor] = {}
        state: State = {}
        for leaf in map(Leaf.from_json, first["tables"]["leaves"]):
            kind, _, name = leaf.name.partition("/")
            (up if kind == "up" else state)[name] = self.uploads.view(leaf)
        return Computed(self._up_type.assemble(first["head"], up), state)

    def holds(self, tensor: Tensor) -> bool:
        return self.uploads.holds(tensor)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _lends(tables: dict[str, Any]) -> int:
    return len(tables["trained"])


def _send(connection: Connection, data: bytes) -> None:
    with _worker_lives():
        connection.send_bytes(data)


@contextmanager
def _worker_lives() -> Iterator[None]:
    """Turn the death of a worker into an error with a remedy."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise FedveilError(
            "a worker process ended unexpectedly, perhaps for lack of memory. "
            "Set run.workers = 1 or a smaller run.max_memory; the same command resumes from the last checkpoint.",
            field="run.workers",
        ) from error


def _receive(connection: Connection) -> list[dict[str, Any]]:
    with _worker_lives():
        reply: dict[str, Any] = json.loads(connection.recv_bytes())
    if "chunks" not in reply:
        raise_failure(reply)
    replies: list[dict[str, Any]] = reply["chunks"]
    return replies


def _serve(
    worker: ClientWorker,
    connection: Connection,
    others: Sequence[Connection],
    downloads: SharedMemory,
    uploads: SharedMemory,
) -> None:
    """The loop of a worker: receive chunks, compute, write their rows, reply; until the simulator ends."""
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the simulator
    torch.set_num_threads(1)
    keep_freed_memory()
    tables = UploadTables(uploads)
    worker.task.memory = tables.lend
    exchange: _Exchange | None = None
    while True:
        try:
            job = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            os._exit(0)
        try:
            if "chunks" not in job:
                exchange = _Exchange(worker, job, downloads, tables)
                continue
            assert exchange is not None, "chunks before their order"
            reply: dict[str, Any] = {"chunks": [exchange.work(rows) for rows in job["chunks"]]}
        except Exception as error:
            reply = failure(error)
        try:
            connection.send_bytes(json.dumps(reply).encode())
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)


class _Exchange:
    """An exchange in a worker: the broadcast, the clients, and the tables for their answers."""

    def __init__(
        self, worker: ClientWorker, order: dict[str, Any], downloads: SharedMemory, tables: UploadTables
    ) -> None:
        down: dict[str, Tensor] = {}
        held: State = {}
        for leaf in map(Leaf.from_json, order["leaves"]):
            kind, _, name = leaf.name.partition("/")
            (down if kind == "down" else held)[name] = downloads.view(leaf)
        self._worker = worker
        self._tables = tables
        self._clients: list[int] = order["clients"]
        self._message = worker.method.down_type.assemble(order["head"], down)
        self._held = held
        self._known = {client: row for row, client in enumerate(order["known"])}
        self._at = At(Plan(**order["plan"]), *order["at"])
        self._expected = None if order["expected"] is None else Expected.from_json(order["expected"])
        if self._expected is not None:
            self._expected = self._expected.for_rows(len(self._clients))

    def work(self, rows: Sequence[int]) -> dict[str, Any]:
        """Compute the answers of the clients in these rows into the tables."""
        ids = [self._clients[row] for row in rows]
        known = {
            client: {name: table[self._known[client]] for name, table in self._held.items()}
            for client in ids
            if client in self._known
        }
        self._tables.open(rows, self._expected)
        up, after = self._worker.update(ids, self._message.rows(rows), known, self._at)
        tensors = {f"up/{name}": leaf for name, leaf in up.tensors().items()}
        tensors |= {f"state/{name}": leaf for name, leaf in after.items()}
        tables = self._tables.put(tensors, len(self._clients))
        if tables is None:
            return {"unexpected": True}
        return {"unexpected": False, "head": up.head(), "tables": tables.to_json()}
