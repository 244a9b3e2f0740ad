"""The simulator: a cohort is a batch of clients, spread in chunks over worker processes.

A client's result depends only on the client: every client computation runs on one thread with the client's own
random streams, so the number of workers changes the time and nothing else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from torch import nn

from fedveil.data.client_data import Clients
from fedveil.engines.engine import Answers
from fedveil.engines.pool import Pool, can_fork
from fedveil.engines.worker import ClientWorker, one_thread
from fedveil.messages import Message, Record
from fedveil.methods.method import AnyMethod, At
from fedveil.privacy.releases import Plan
from fedveil.streams import NoiseSource
from fedveil.task import Task
from fedveil.tree import State, concatenate

Execution = Literal["auto", "stacked", "one-by-one"]
R = TypeVar("R", bound=Record)

_LARGEST_CHUNK = 40  # of clients: more save little of what a chunk costs beside its work, and need memory
_WORTH_A_WORKER = 2e8  # multiply-adds of a round below which talking to workers costs more than it saves


class Simulation:
    """All clients in this machine's memory, or made when they take part."""

    def __init__(
        self,
        task: Task,
        clients: Clients,
        method: AnyMethod,
        plan: Plan,
        *,
        seed: int,
        noise_source: NoiseSource = "seeded",
        execution: Execution = "auto",
        workers: int = 0,
        max_memory: int | None = None,
    ) -> None:
        self._worker = ClientWorker(task, clients, method, seed, noise_source)
        self._sizes = clients.sizes
        self._states: dict[int, State] = {}
        self._stacked = execution == "stacked" or (execution == "auto" and _stacking_pays(task))
        self._count = workers or _sensible_workers(task, plan)
        self._chunk = self._largest_chunk(max_memory)
        self._pool: Pool | None = None
        if self._count > 1 and can_fork():
            cohort = _largest_cohort(plan)
            row = 4 * sum(p.numel() * p.element_size() for p in task.module.parameters()) + 65536
            self._pool = Pool(self._worker, self._count, capacity=cohort * row + (16 << 20))

    def exchange(self, clients: Sequence[int], down: Message, at: At) -> Answers:
        if not clients:
            return Answers((), None)
        chunks = self._chunks(clients)
        if self._pool is None:
            up, after = self._run_here(clients, chunks, down, at)
        else:
            up, after = self._pool.run(clients, chunks, down, self._states, at)
        if after:
            for row, client in enumerate(clients):
                self._states[client] = {name: leaf[row].clone() for name, leaf in after.items()}
        return Answers(tuple(clients), up)

    def _run_here(
        self, clients: Sequence[int], chunks: Sequence[Sequence[int]], down: Message, at: At
    ) -> tuple[Message, State]:
        parts: list[tuple[Message, State]] = []
        with one_thread():
            for rows in chunks:
                ids = [clients[row] for row in rows]
                parts.append(self._worker.update(ids, down.rows(rows), self._states, at))
        up = type(parts[0][0]).concatenate([up for up, _ in parts])
        after = concatenate([state for _, state in parts])
        order = [row for rows in chunks for row in rows]
        if order == list(range(len(order))):
            return up, after
        back = sorted(range(len(order)), key=order.__getitem__)
        return up.rows(back), {name: leaf[back] for name, leaf in after.items()}

    def leave_out(self, client: int, at: At, problem: str) -> bool:
        return False

    def own(self, record: R) -> R:
        if self._pool is None:
            return record
        uploads = self._pool.uploads
        return record.map(lambda _, leaf: leaf.clone() if uploads.holds(leaf) else leaf)

    def state(self) -> Mapping[int, State]:
        return self._states

    def restore(self, state: Mapping[int, State]) -> None:
        self._states = dict(state)

    def saved(self) -> None:
        """Nothing depends on it: the states are in memory."""

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _chunks(self, clients: Sequence[int]) -> list[list[int]]:
        """Rows of the cohort that are computed together: clients of like size, so that little is padding."""
        if not self._stacked:
            return [[row] for row in range(len(clients))]
        # A multiple of the cores, so that none idles at the end; not of the workers: same bits for any number.
        rounds = math.ceil(len(clients) / (self._chunk * cores()))
        size = math.ceil(len(clients) / (rounds * cores()))
        order = sorted(range(len(clients)), key=lambda row: (-self._sizes[clients[row]], row))
        return [order[i : i + size] for i in range(0, len(order), size)]

    def _largest_chunk(self, max_memory: int | None) -> int:
        if max_memory is None:
            return _LARGEST_CHUNK
        # Per client: its examples whole and as a batch; parameters, start, gradient and momentum.
        x = self._worker.clients.load([0]).x
        example = x[0, :1].numel() * x.element_size()
        per_client = 2 * example * max(self._sizes) + 16 * self._worker.task.parameter_count
        return max(1, min(_LARGEST_CHUNK, max_memory // max(1, per_client * cores())))


def cores() -> int:
    """The processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _largest_cohort(plan: Plan) -> int:
    """What room is kept for; a Poisson cohort is larger with a probability below 1e-20."""
    if plan.sampler != "poisson":
        return plan.cohort
    return min(plan.clients, math.ceil(plan.cohort + 12 * math.sqrt(plan.cohort) + 60))


def _stacking_pays(task: Task) -> bool:
    """On a CPU batching clients does not pay for convolutions; everywhere else it does, if the model can be."""
    if not task.stacks:
        return False
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return task.device.type != "cpu" or not any(isinstance(m, convolutions) for m in task.module.modules())


def _sensible_workers(task: Task, plan: Plan) -> int:
    if task.device.type != "cpu":
        return 1
    work = 3.0 * task.parameter_count * plan.cohort * plan.largest_client
    return min(cores(), plan.cohort) if work > _WORTH_A_WORKER else 1
