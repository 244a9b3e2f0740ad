"""A run in this process: `run` from Python, `simulate` with options and a plan that are made already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset as TorchDataset

from fedveil.data.client_data import Array, ArrayClients, Clients
from fedveil.data.dataset import Examples
from fedveil.data.own import examples_from_torch
from fedveil.engines.engine import Engine
from fedveil.engines.simulation import Execution, Simulation
from fedveil.errors import InputError, whole_number
from fedveil.methods.method import AnyMethod
from fedveil.privacy.releases import Plan, Sampler
from fedveil.session.checks import check_clients
from fedveil.session.loop import Callback
from fedveil.session.options import AvailableData, PrivacySettings, RunOptions, SimulationOptions
from fedveil.session.privacy_guard import noise_for
from fedveil.session.results import Result
from fedveil.session.session import run_session
from fedveil.streams import NoiseSource
from fedveil.task import Task


def make_plan(
    clients: Clients, *, rounds: int, cohort: int | None = None, sampler: Sampler = "fixed"
) -> Plan:
    """The public outline of a run; impossible ones are refused."""
    sizes = clients.sizes
    count = len(sizes)
    cohort = count if cohort is None or sampler == "all" else whole_number("run.cohort", cohort, 1)
    rounds = whole_number("run.rounds", rounds, 1)
    if cohort > count:
        raise InputError("run.cohort", cohort, f"there are {count} clients", f"Use 1 to {count}.")
    return Plan(count, cohort, sampler, rounds, max(1, min(sizes)), max(1, max(sizes)))


def run(
    task: Task,
    clients: Clients | Sequence[tuple[Array, Array] | Examples | TorchDataset[Any]],
    method: AnyMethod,
    *,
    rounds: int,
    cohort: int | None = None,
    sampler: Sampler = "fixed",
    seed: int = 0,
    noise: NoiseSource | None = None,
    test: Examples | tuple[Array, Array] | None = None,
    local_test: Clients | None = None,
    classes: int | None = None,
    score_clients: bool = True,
    privacy: PrivacySettings | None = None,
    results: Path | str | None = None,
    config: str | None = None,
    facts: Mapping[str, Any] | None = None,
    evaluate_every: int = 1,
    checkpoint_every: int = 10,
    transcript: bool | Sequence[int] = False,
    transcript_exchanges: int | None = None,
    min_clients: int = 0,
    execution: Execution = "auto",
    workers: int = 0,
    max_memory: int | None = None,
    cluster: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train over the clients' data and say how private that was.

    Args:
        clients: `ArrayClients`, `LazyClients`, or a list with one entry per client: a pair (x, y) of tensors or NumPy
            arrays, `Examples`, or a `torch.utils.data.Dataset`.
        noise: `RunOptions.noise_source`; "entropy" if not given, "seeded" always for methods that protect nothing.
        results: The folder of `RunOptions.results`; every round is recorded there.
        score_clients: Score the final model on each client's own examples, or on `local_test`.
        others: The fields of `RunOptions`, `SimulationOptions` and `AvailableData`.

    Raises:
        FedveilError: The clients, the method and the options do not fit together; nothing has been written.
    """
    source = _clients_of(clients)
    plan = make_plan(source, rounds=rounds, cohort=cohort, sampler=sampler)
    options = RunOptions(
        seed=seed,
        results=None if results is None else Path(results),
        config=config,
        facts=facts or {},
        privacy=privacy or PrivacySettings(),
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        transcript=transcript,
        transcript_exchanges=transcript_exchanges,
        min_clients=min_clients,
        noise_source=noise_for(method, plan, noise, own_data=True),
    )
    data = AvailableData(test, classes, source, local_test, score_clients)
    spread = SimulationOptions(execution, workers, max_memory, cluster)
    return simulate(task, source, method, plan, options, spread, data, callbacks)


def simulate(
    task: Task,
    clients: Clients,
    method: AnyMethod,
    plan: Plan,
    options: RunOptions,
    simulation: SimulationOptions,
    data: AvailableData,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Check that clients, method and model fit, then train with the simulator."""
    check_clients(task, method, plan, clients)

    def engine_of(_run: str) -> Engine:
        return Simulation(
            task,
            clients,
            method,
            plan,
            seed=options.seed,
            noise_source=options.noise_source,
            execution=simulation.execution,
            workers=simulation.workers,
            max_memory=simulation.max_memory,
            cluster=simulation.cluster,
            sums=not options.transcript and not any(callback.reads_uploads for callback in callbacks),
        )

    return run_session(engine_of, task, method, plan, options, data, callbacks)


def _clients_of(clients: Clients | Sequence[tuple[Array, Array] | Examples | TorchDataset[Any]]) -> Clients:
    if isinstance(clients, Sequence):
        return ArrayClients.from_arrays([_pair(client) for client in clients])
    return clients


def _pair(client: tuple[Array, Array] | Examples | TorchDataset[Any]) -> tuple[Array, Array]:
    if isinstance(client, TorchDataset):
        client = examples_from_torch(client)
    return (client.x, client.y) if isinstance(client, Examples) else client
