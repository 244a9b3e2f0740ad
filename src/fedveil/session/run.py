"""A run in this process: `run` for users, `simulate` for given options and plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.data.client_data import Array, ArrayClients, Clients, client_ids
from fedveil.data.dataset import Examples
from fedveil.data.shared_records import PRIVATE_STOP, REMOVE, shared_records
from fedveil.engines.engine import Engine
from fedveil.engines.simulation import Execution, Simulation
from fedveil.errors import InputError, whole_number
from fedveil.lazy_torch import torch
from fedveil.methods.method import AnyMethod
from fedveil.methods.secure import securely_aggregated
from fedveil.privacy.releases import Plan, Sampler
from fedveil.secure_sum.settings import SecureSum
from fedveil.session.checks import check_clients
from fedveil.session.loop import Callback
from fedveil.session.options import (
    AvailableData,
    EarlyStopping,
    PrivacySettings,
    RunOptions,
    SimulationOptions,
)
from fedveil.session.privacy_guard import noise_for
from fedveil.session.results import Result
from fedveil.session.session import run_session
from fedveil.streams import NoiseSource
from fedveil.task import Task

if TYPE_CHECKING:
    from torch.utils.data import Dataset as TorchDataset


def make_plan(
    clients: Clients, *, rounds: int, cohort: int | None = None, sampler: Sampler = "fixed"
) -> Plan:
    """The public outline of a run; refuses impossible ones.

    Args:
        clients: The clients and their sizes.
        rounds: Number of rounds.
        cohort: Clients in a round, for "poisson" their expected number; default: all.
        sampler: "fixed", "poisson" or "all".

    Returns:
        The plan.
    """
    sizes = clients.sizes
    count = len(sizes)
    cohort = count if cohort is None else whole_number("run.cohort", cohort, 1)
    if sampler == "all" and cohort != count:
        raise InputError("run.cohort", cohort, 'sampler "all" takes every client', "Leave run.cohort out.")
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
    aggregation: SecureSum | None = None,
    callbacks: Sequence[Callback] = (),
    early_stopping: EarlyStopping | None = None,
    public: Examples | tuple[Array, Array] | None = None,
) -> Result:
    """Train on the clients' data and state the privacy of the result.

    Args:
        task: The model and its loss.
        clients: `ArrayClients`, `LazyClients`, or a list with one entry per client: a pair (x, y) of tensors or NumPy
            arrays, `Examples`, or a `torch.utils.data.Dataset`.
        method: A method with its fields, such as `METHODS["udp-fedavg"](clip=0.5)`.
        rounds: Number of rounds.
        cohort: Clients per round, for `sampler="poisson"` the expected number; default: all.
        sampler: "fixed" (a cohort of this size), "poisson" (each client independently) or "all".
        seed: Determines the initial model and, with seeded noise, everything else.
        noise: "entropy" (the default) or "seeded"; always "seeded" for methods that protect nothing.
        test: Test examples.
        local_test: Test examples of each client.
        classes: Number of classes, if it cannot be derived from the examples.
        score_clients: Score the final model on each client's own examples, or on `local_test`.
        privacy: Delta, budget and ledger.
        results: Folder that records the run; an interrupted run resumes from it.
        config: The configuration as TOML, stored with the results.
        facts: Further entries for the summary.
        evaluate_every: Test after every so many rounds, and after the last.
        checkpoint_every: Write a checkpoint after every so many rounds.
        transcript: Record the messages of all rounds, or of these.
        transcript_exchanges: Record only the first so many exchanges of a round.
        min_clients: A round with fewer answers changes nothing.
        execution: "stacked", "one-by-one" or "auto".
        workers: Number of processes; 0 chooses.
        max_memory: Limit for the clients' tensors, in bytes.
        cluster: Address of a Ray cluster to compute on, "auto" or "local"; None: this machine's own processes.
        aggregation: `SecureSum(...)`: the server learns only the sum of the uploads; None: all of them.
        callbacks: Called at every round.
        early_stopping: The rule for stopping early, by scores on `public`; only rounds that ran are charged.
        public: Public examples, for early stopping.

    Returns:
        The result: summary, history, model, and privacy statement.

    Raises:
        FedveilError: The clients, the method and the options cannot be combined; nothing has been written.

    Guarantees:
        - The statement in `summary["privacy"]` covers every message that was sent
          (`tests/contract/test_noise_and_guarantees.py`).
        - A round is charged to the ledger before its messages are sent (`tests/unit/session/test_privacy_guard.py`).
    """
    source = _clients_of(clients)
    plan = make_plan(source, rounds=rounds, cohort=cohort, sampler=sampler)
    method = securely_aggregated(method, aggregation)
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
        early_stopping=early_stopping,
    )
    if early_stopping is not None and public is not None:
        _require_public(public, source)
    data = AvailableData(test, classes, source, local_test, score_clients, public=public)
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


def _require_public(public: Examples | tuple[Array, Array], clients: Clients) -> None:
    """Refuse public examples that share records with the clients' data."""
    inputs = _pair(public)[0]
    own = []
    for client in client_ids(clients):
        data = clients.load([client])
        own.append(data.x[0, : int(data.sizes[0])])
    shared = shared_records(torch.as_tensor(inputs).to(own[0].dtype), torch.cat(own))
    if shared is not None:
        raise InputError("public", f"{len(inputs)} examples", f"{shared}: {PRIVATE_STOP}", REMOVE)


def _clients_of(clients: Clients | Sequence[tuple[Array, Array] | Examples | TorchDataset[Any]]) -> Clients:
    if isinstance(clients, Sequence):
        return ArrayClients.from_arrays([_pair(client) for client in clients])
    return clients


def _pair(client: tuple[Array, Array] | Examples | TorchDataset[Any]) -> tuple[Array, Array]:
    if isinstance(client, torch.utils.data.Dataset):
        from fedveil.data.own import examples_from_torch  # loads readers of tables

        client = examples_from_torch(client)
    return (client.x, client.y) if isinstance(client, Examples) else client
