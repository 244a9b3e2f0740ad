"""The simulator: a cohort is a batch of clients, distributed in chunks over worker processes.

A client's computation runs on one thread with the client's own random streams, and the number of workers affects the
time only. Chunks depend on the cohort, the cores and `max_memory`: products of stacked layers round by the place of a
client's memory in its chunk, so in single precision other chunks may change the last digit of a client's result.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from fedveil.data.client_data import Clients
from fedveil.engines.engine import Answers
from fedveil.engines.pool import Pool, can_fork
from fedveil.engines.worker import ClientWorker, Computed, one_thread
from fedveil.lazy_torch import nn
from fedveil.messages import Message, Record
from fedveil.methods.method import AnyMethod, At
from fedveil.privacy.releases import Plan
from fedveil.streams import NoiseSource
from fedveil.task import Task
from fedveil.tree import State, concatenate
from fedveil.tree import rows as rows_of

if TYPE_CHECKING:
    from torch import Tensor

Execution = Literal["auto", "stacked", "one-by-one"]
R = TypeVar("R", bound=Record)

_LARGEST_CHUNK = 40  # clients: a larger chunk saves little overhead and needs more memory
_WORTH_A_WORKER = 2e8  # multiply-adds of a round below which workers cost more time than they save


class Workers(Protocol):
    """Processes that compute chunks of a cohort, here or on other machines."""

    def run(
        self,
        clients: Sequence[int],
        chunks: Sequence[Sequence[int]],
        down: Message,
        states: Mapping[int, State],
        at: At,
    ) -> Computed:
        """The uploads and new states of all chunks, rows in the order of `clients`; the next call overwrites them."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Whether the next call overwrites this tensor."""
        ...

    def close(self) -> None: ...


class Simulation:
    """Simulates all clients on this machine, or with `cluster` on a Ray cluster."""

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
        cluster: str | None = None,
        sums: bool = False,
    ) -> None:
        """`sums`: no callback reads single uploads, so workers on other machines may send sums (`Method.exact_sum`)."""
        self._worker = ClientWorker(task, clients, method, seed, noise_source)
        self._sizes = clients.sizes
        self._states: dict[int, State] = {}
        together = method.computes_together(task)
        self._stacked = execution == "stacked" or (execution == "auto" and (_stacking_pays(task) or together))
        self._chunk = self._largest_chunk(max_memory)
        workers = workers or _sensible_workers(self._worker, plan)
        self._workers = self._started(plan, workers, cluster, sums)
        # A multiple of the cores, so that none idles at the end; not of the workers: same bits for any number.
        self._shares = 1 if together and self._workers is None else cores()

    def _started(self, plan: Plan, count: int, cluster: str | None, sums: bool) -> Workers | None:
        """Start worker processes; None to compute in this process."""
        parameters = self._worker.task.module.parameters()
        row = 4 * sum(p.numel() * p.element_size() for p in parameters) + 65536
        capacity = _largest_cohort(plan) * row + (16 << 20)
        if cluster is not None:
            from fedveil.engines.ray_cluster import RayWorkers  # Ray is loaded where it is asked for

            return RayWorkers(self._worker, cluster, capacity, sums=sums)
        return None if count == 1 or not can_fork() else Pool(self._worker, count, capacity)

    def exchange(self, clients: Sequence[int], down: Message, at: At) -> Answers:
        if not clients:
            return Answers((), None)
        chunks = self._chunks(clients)
        if self._workers is None:
            found = self._run_here(clients, chunks, down, at)
        else:
            found = self._workers.run(clients, chunks, down, self._states, at)
        if found.states:
            for row, client in enumerate(clients):
                self._states[client] = {name: leaf[row].clone() for name, leaf in found.states.items()}
        return Answers(tuple(clients), found.up, row_size=found.row_size)

    def _run_here(
        self, clients: Sequence[int], chunks: Sequence[Sequence[int]], down: Message, at: At
    ) -> Computed:
        parts: list[tuple[Message, State]] = []
        with one_thread():
            for rows in chunks:
                ids = [clients[row] for row in rows]
                parts.append(self._worker.update(ids, down.rows(rows), self._states, at))
        up = type(parts[0][0]).concatenate([up for up, _ in parts])
        after = concatenate([state for _, state in parts])
        order = [row for rows in chunks for row in rows]
        if order == list(range(len(order))):
            return Computed(up, after)
        back = sorted(range(len(order)), key=order.__getitem__)
        return Computed(up.rows(back), rows_of(after, back))

    def leave_out(self, client: int, at: At, problem: str) -> bool:
        return False

    def own(self, record: R) -> R:
        if (workers := self._workers) is None:
            return record
        return record.map(lambda _, leaf: leaf.clone() if workers.holds(leaf) else leaf)

    def state(self) -> Mapping[int, State]:
        return self._states

    def restore(self, state: Mapping[int, State]) -> None:
        self._states = dict(state)

    def saved(self) -> None:
        """Do nothing: the states are in memory."""

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _chunks(self, clients: Sequence[int]) -> list[list[int]]:
        """Rows of the cohort that are computed together: clients of similar size, so that there is little padding."""
        if not self._stacked:
            return [[row] for row in range(len(clients))]
        rounds = math.ceil(len(clients) / (self._chunk * self._shares))
        size = math.ceil(len(clients) / (rounds * self._shares))
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
    """The largest cohort for which memory is reserved; a Poisson cohort exceeds it with probability below 1e-20."""
    if plan.sampler != "poisson":
        return plan.cohort
    return min(plan.clients, math.ceil(plan.cohort + 12 * math.sqrt(plan.cohort) + 60))


def _stacking_pays(task: Task) -> bool:
    """Whether stacking clients is faster: not for convolutions on a CPU, nor for models that cannot be stacked."""
    if not task.stacks:
        return False
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return task.device.type != "cpu" or not any(isinstance(m, convolutions) for m in task.module.modules())


def _sensible_workers(worker: ClientWorker, plan: Plan) -> int:
    task, method = worker.task, worker.method
    if task.device.type != "cpu":
        return 1
    exchanges = method.exchanges(plan)
    work = 3.0 * plan.cohort * plan.largest_client * task.parameter_count
    if exchanges > 1:  # of one exchange: its workers wait for each other
        steps = method.demand(plan, plan.largest_client, 1).steps
        example = worker.clients.load([0]).x.shape[2:]
        work = 3.0 * plan.cohort * plan.largest_client * task.multiplications(example) / exchanges * steps
    return min(cores(), plan.cohort) if work > _WORTH_A_WORKER else 1
