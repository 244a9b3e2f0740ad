"""Worker processes of the simulator, forked from it: they see its data without a copy and die with it."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from fedveil.engines.arena import Arena, Leaf, layout
from fedveil.engines.worker import ClientWorker
from fedveil.errors import FedveilError
from fedveil.messages import Message
from fedveil.methods.method import At
from fedveil.privacy.releases import Plan
from fedveil.tree import State


def can_fork() -> bool:
    return "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()


class Pool:
    """A fixed number of workers that take chunks of the cohort until none is left."""

    def __init__(self, worker: ClientWorker, count: int, capacity: int) -> None:
        self.uploads = Arena(capacity)
        self._downloads = Arena(capacity)
        self._up_type = worker.method.up_type
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
    ) -> tuple[Message, State]:
        """The uploads and new states of all chunks, rows in the order of `clients`.

        The tensors lie in shared memory and are overwritten by the next call.
        """
        known = [client for client in clients if client in states]
        sent = {f"down/{name}": leaf for name, leaf in down.tensors().items()}
        if known:
            for name in states[known[0]]:
                sent[f"state/{name}"] = torch.stack([states[client][name] for client in known])
        leaves = layout(sent)
        _require_room(self._downloads, leaves)
        for leaf in leaves:
            self._downloads.view(leaf).copy_(sent[leaf.name])
        order = {
            "head": down.head(),
            "leaves": [leaf.to_json() for leaf in leaves],
            "known": known,
            "plan": asdict(at.plan),
            "at": [at.round, at.exchange],
            "total": len(clients),
        }
        jobs = [json.dumps(order | {"rows": list(r), "ids": [clients[i] for i in r]}) for r in chunks]
        return self._collect(self._spread(jobs))

    def _spread(self, jobs: list[str]) -> list[dict[str, Any]]:
        waiting = list(reversed(jobs))
        idle = list(self._connections)
        busy: list[Connection] = []
        replies: list[dict[str, Any]] = []
        while waiting or busy:
            while waiting and idle:
                connection = idle.pop()
                connection.send_bytes(waiting.pop().encode())
                busy.append(connection)
            for ready in wait(busy):
                assert isinstance(ready, Connection)
                replies.append(_receive(ready))
                busy.remove(ready)
                idle.append(ready)
        return replies

    def _collect(self, replies: Sequence[dict[str, Any]]) -> tuple[Message, State]:
        first = replies[0]
        if any(reply["leaves"] != first["leaves"] for reply in replies):
            raise FedveilError(
                "clients of one exchange answered with tensors of different shapes; "
                "the method must pad its uploads to one shape"
            )
        up: dict[str, Tensor] = {}
        state: State = {}
        for leaf in map(Leaf.from_json, first["leaves"]):
            kind, _, name = leaf.name.partition("/")
            (up if kind == "up" else state)[name] = self.uploads.view(leaf)
        return self._up_type.assemble(first["head"], up), state

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _receive(connection: Connection) -> dict[str, Any]:
    try:
        reply: dict[str, Any] = json.loads(connection.recv_bytes())
    except EOFError as error:
        raise FedveilError(
            "a worker process ended unexpectedly, perhaps for lack of memory. "
            "Set run.workers = 1 or a smaller run.max_memory."
        ) from error
    if "error" in reply:
        raise FedveilError(reply["error"])
    if "crash" in reply:
        raise RuntimeError("in a worker process:\n" + reply["crash"])
    return reply


def _require_room(arena: Arena, leaves: Sequence[Leaf]) -> None:
    if not arena.fits(leaves):
        raise FedveilError(
            "this method's messages are larger than the memory shared with worker processes. "
            "Set run.workers = 1."
        )


def _keep_freed_memory() -> None:
    """Let this process keep the memory it frees: glibc would hand it back, and take it anew, at every step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


def _serve(
    worker: ClientWorker,
    connection: Connection,
    others: Sequence[Connection],
    downloads: Arena,
    uploads: Arena,
) -> None:
    """A worker's life: take a chunk, compute, write its rows, say where; end when the simulator is gone."""
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the simulator decides when to stop
    torch.set_num_threads(1)
    _keep_freed_memory()
    while True:
        try:
            job = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            os._exit(0)
        try:
            reply = _work(worker, job, downloads, uploads)
        except FedveilError as error:
            reply = {"error": str(error)}
        except Exception:
            reply = {"crash": traceback.format_exc()}
        try:
            connection.send_bytes(json.dumps(reply).encode())
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)


def _work(worker: ClientWorker, job: dict[str, Any], downloads: Arena, uploads: Arena) -> dict[str, Any]:
    down: dict[str, Tensor] = {}
    held: State = {}
    for leaf in map(Leaf.from_json, job["leaves"]):
        kind, _, name = leaf.name.partition("/")
        (down if kind == "down" else held)[name] = downloads.view(leaf)
    wanted = set(job["ids"])
    known = {
        client: {name: table[row] for name, table in held.items()}
        for row, client in enumerate(job["known"])
        if client in wanted
    }
    message = worker.method.down_type.assemble(job["head"], down).rows(job["rows"])
    at = At(Plan(**job["plan"]), *job["at"])
    up, after = worker.update(job["ids"], message, known, at)
    tensors = {f"up/{name}": leaf for name, leaf in up.tensors().items()}
    tensors |= {f"state/{name}": leaf for name, leaf in after.items()}
    leaves = layout(tensors, rows=job["total"])
    _require_room(uploads, leaves)
    first, last = job["rows"][0], job["rows"][-1]
    together = job["rows"] == list(range(first, last + 1))
    rows = slice(first, last + 1) if together else torch.tensor(job["rows"])
    for leaf in leaves:
        uploads.view(leaf)[rows] = tensors[leaf.name]
    return {"head": up.head(), "leaves": [leaf.to_json() for leaf in leaves]}
