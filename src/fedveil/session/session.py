"""Run one method over clients: everything a run needs, wired together."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from fedveil.data.client_data import (
    Array,
    ArrayClients,
    Clients,
    digest_of,
    first_not_finite,
    labels_of,
    tensor_of,
)
from fedveil.data.dataset import Examples
from fedveil.data.own import examples_from_torch
from fedveil.engines.engine import Engine
from fedveil.engines.simulation import Execution, Simulation
from fedveil.errors import LARGEST_SEED, DataError, InputError, known_name, whole_number, within
from fedveil.evaluation.accuracy import evaluate_clients, evaluate_personal
from fedveil.messages import Record
from fedveil.methods.method import AnyMethod
from fedveil.privacy.releases import Plan, Sampler
from fedveil.session.callbacks.evaluate import EvaluateOnTest
from fedveil.session.checkpoint import Checkpoint
from fedveil.session.loop import Callback, Outcome, run_rounds
from fedveil.session.privacy_guard import PrivacyGuard, PrivacySettings, unit_of
from fedveil.session.results import Checkpoints, Result, ResultFolder, RoundLog, Transcript, environment
from fedveil.streams import NoiseSource
from fedveil.task import Batch, Task, cross_entropy
from fedveil.tree import with_axis

_CLIENTS_SCORED = 1000  # per-client scores beyond this number are a table nobody reads


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


def check_fit(task: Task, clients: Clients) -> None:
    """Refuse examples that the model cannot read and labels that it has no output for."""
    largest = max(range(len(clients.sizes)), key=clients.sizes.__getitem__)
    data = clients.load([largest])
    if not data.largest:
        raise DataError("no client has an example. Give at least one client some data.")
    labels = clients.y if isinstance(clients, ArrayClients) else data.y[0]
    _check_examples(task, data.x[0, :1], labels)


def check_apart(task: Task, method: AnyMethod, plan: Plan, clients: Clients) -> None:
    """Refuse, where records are protected, a model or loss that mixes them: clipping then bounds nobody's influence.

    Layers of batch norm are refused by name; this finds a forward pass that does the like.
    """
    if unit_of(method, plan) != "record":
        return
    largest = max(range(len(clients.sizes)), key=clients.sizes.__getitem__)
    data = clients.load([largest])
    x, y = data.x[:, :1].to(task.device), data.y[:, :1].to(task.device)
    other = 1 - x if x.is_floating_point() else torch.zeros_like(x)
    w = with_axis(task.init(0))
    with torch.no_grad():
        alike, beside = (
            task.losses(w, Batch(torch.cat([x, second], 1), torch.cat([y, y], 1)))[0, 0]
            for second in (x, other)
        )
    if not torch.allclose(alike, beside, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise InputError(
            "model",
            type(task.module).__name__,
            "an example's loss depends on the others of its batch, so one record's influence cannot be bounded",
            "Normalise within an example (torch.nn.GroupNorm), or use a method that protects whole clients.",
        )


def first_server(task: Task, method: AnyMethod, plan: Plan, seed: int) -> Record:
    """The server before the first round; a field that does not fit the model is refused here."""
    with within("method"):
        server: Record = method.init_server(task.init(seed), plan)
    return server


def check_test(task: Task, test: Examples | tuple[Array, Array] | None) -> tuple[Tensor, Tensor] | None:
    """The test examples as tensors, refused where they do not fit the model; None where there are none."""
    if test is None:
        return None
    x, y = (test.x, test.y) if isinstance(test, Examples) else (tensor_of(test[0]), labels_of(test[1]))
    if len(x) != len(y):
        raise DataError(f"test: x has {len(x)} examples and y has {len(y)}; they must be as many.")
    if not len(x):
        return None
    if (bad := first_not_finite(x)) is not None:
        raise DataError(f"test: example {bad} holds NaN or infinity. Clean or drop it.")
    try:
        _check_examples(task, x[:1], y)
    except DataError as error:
        raise DataError(f"test: {error}") from error
    return x, y


def _pair(client: tuple[Array, Array] | Examples | TorchDataset[Any]) -> tuple[Array, Array]:
    if isinstance(client, TorchDataset):
        client = examples_from_torch(client)
    return (client.x, client.y) if isinstance(client, Examples) else client


def _check_examples(task: Task, x: Tensor, labels: Tensor) -> None:
    try:
        with torch.no_grad():
            scores = task.outputs(with_axis(task.init(0)), x[None].to(task.device))
    except (RuntimeError, IndexError) as error:  # a token beyond the embeddings is an IndexError
        needed = {str(p.dtype).removeprefix("torch.") for p in task.module.parameters()}
        raise DataError(
            f"the model cannot read examples of shape {list(x.shape[1:])} and type "
            f"{str(x.dtype).removeprefix('torch.')} (its parameters are {' and '.join(sorted(needed))}): {error}"
        ) from error
    if task.example_loss is not cross_entropy:
        return
    if labels.is_floating_point() or labels.dim() != 1:
        kind = f"{str(labels.dtype).removeprefix('torch.')} of shape {list(labels.shape[1:])}"
        raise DataError(
            f"each label is {kind}; cross-entropy needs one whole number. Use y.long().flatten()."
        )
    low, high, outputs = int(labels.min()), int(labels.max()), int(scores.shape[-1])
    if low < 0 or high >= outputs:
        wrong = low if low < 0 else high
        raise DataError(
            f"label {wrong} has no output: the model has outputs 0 to {outputs - 1}. Relabel or widen it."
        )


def run(
    task: Task,
    clients: Clients | Sequence[tuple[Array, Array] | Examples | TorchDataset[Any]],
    method: AnyMethod,
    *,
    rounds: int,
    cohort: int | None = None,
    sampler: Sampler = "fixed",
    seed: int = 0,
    test: Examples | tuple[Array, Array] | None = None,
    local_test: Clients | None = None,
    classes: int | None = None,
    privacy: PrivacySettings | None = None,
    results: Path | str | None = None,
    config: str | None = None,
    facts: dict[str, Any] | None = None,
    evaluate_every: int = 1,
    checkpoint_every: int = 10,
    transcript: bool | Sequence[int] = False,
    transcript_exchanges: int | None = None,
    min_clients: int = 0,
    execution: Execution = "auto",
    workers: int = 0,
    max_memory: int | None = None,
    observers: Sequence[Callback] = (),
    score_clients: bool = True,
) -> Result:
    """Train over the clients' data and say how private that was.

    Clients in a list are each a pair (x, y) of tensors or NumPy arrays, `Examples`, or a `torch.utils.data.Dataset`.
    With `results` (a folder) every round is recorded, an interrupted run goes on where it stopped, to the same
    result, and a finished one is read back; a folder that holds another run is refused. `config` is the text kept
    there as `config.toml`; `facts` are added to its summary. `score_clients` tests the final model on each client's
    own examples, or on `local_test`.
    """
    source: Clients = (
        ArrayClients.from_arrays([_pair(client) for client in clients])
        if isinstance(clients, Sequence)
        else clients
    )
    seed = whole_number("run.seed", seed, 0, LARGEST_SEED)
    workers = whole_number("run.workers", workers, 0)
    known_name("run.execution", "execution", execution, get_args(Execution))
    plan = make_plan(source, rounds=rounds, cohort=cohort, sampler=sampler)
    check_fit(task, source)
    check_apart(task, method, plan, source)
    method.check_clients(task, source)

    def simulate(_run: str) -> Engine:
        return Simulation(
            task,
            source,
            method,
            plan,
            seed=seed,
            execution=execution,
            workers=workers,
            max_memory=max_memory,
        )

    return run_on(
        simulate,
        task,
        method,
        plan,
        seed=seed,
        test=test,
        data=source,
        classes=classes,
        scored_on=(local_test or source) if score_clients else None,
        held_out=local_test is not None,
        privacy=privacy,
        results=results,
        config=config,
        facts=facts,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        transcript=transcript,
        transcript_exchanges=transcript_exchanges,
        min_clients=min_clients,
        observers=observers,
    )


def run_on(
    engine_of: Callable[[str], Engine],
    task: Task,
    method: AnyMethod,
    plan: Plan,
    *,
    seed: int = 0,
    test: Examples | tuple[Array, Array] | None = None,
    data: Clients | None = None,
    classes: int | None = None,
    scored_on: Clients | None = None,
    held_out: bool = False,
    privacy: PrivacySettings | None = None,
    results: Path | str | None = None,
    config: str | None = None,
    facts: dict[str, Any] | None = None,
    evaluate_every: int = 1,
    checkpoint_every: int = 10,
    transcript: bool | Sequence[int] = False,
    transcript_exchanges: int | None = None,
    min_clients: int = 0,
    observers: Sequence[Callback] = (),
    noise_source: NoiseSource = "seeded",
) -> Result:
    """Train through the engine that `engine_of` gives for the run's name, wherever its clients are.

    Where the clients' `data` are on this machine, a folder that was begun on others is refused.
    With `noise_source` "entropy" a round that is repeated draws fresh noise, so it is charged again; cohorts are
    then drawn from entropy too, since the sampling that accounting counts on must be secret.
    """
    evaluate_every = whole_number("run.evaluate_every", evaluate_every, 1)
    checkpoint_every = whole_number("run.checkpoint_every", checkpoint_every, 1)
    _check_min_clients(min_clients, plan)
    settings = privacy or PrivacySettings()
    tested = check_test(task, test)
    server = first_server(task, method, plan, seed)
    folder = None if results is None else ResultFolder(Path(results))
    if folder is not None:
        folder.require_unheld()
    ledger = settings.ledger or (None if folder is None else folder.path / "ledger.jsonl")
    described = _describe(task, method, plan, seed)
    # On a shared ledger another run must not pass for this one resumed: it may have other data. One without a folder
    # cannot be resumed.
    name = f"{seed} {secrets.token_hex(6)}" if folder is None else folder.run()
    fresh = noise_source == "entropy"
    guard = PrivacyGuard(  # refuses before anything is written
        method, plan, settings, name, ledger, replay_safe=not fresh
    )
    with ExitStack() as stack:
        start: Checkpoint | None = None
        history: list[dict[str, Any]] = []
        if folder is not None:
            stack.enter_context(folder.held())
            folder.require(described)
            digest = None if data is None else digest_of(data, tested)
            folder.require_data(digest)
            if folder.finished:
                return folder.read()
            start = folder.start(
                config or described, described, name, method.server_type, digest, replay_safe=not fresh
            )
            history = folder.rounds()
            if start is not None:
                guard.require_charged(start.round)
        engine = engine_of(name)
        stack.callback(engine.close)
        watching: list[Callback] = [guard]
        if tested is not None:
            watching.append(EvaluateOnTest(task, *tested, classes, evaluate_every))
        watching.append(RoundLog(history, None if folder is None else folder.path / "rounds.jsonl"))
        saver: Checkpoints | None = None
        if folder is not None:
            saver = Checkpoints(folder.path / "checkpoint", engine, checkpoint_every)
            watching.append(saver)
            if transcript:
                which = None if isinstance(transcript, bool) else transcript
                watching.append(Transcript(folder.path / "transcript", which, transcript_exchanges))
        watching.extend(observers)
        if start is not None:
            server = start.server.map(lambda _, leaf: leaf.to(task.device))
            engine.restore(start.states)
        try:
            outcome = run_rounds(
                task,
                method,
                engine,
                plan,
                server,
                seed=seed,
                start=0 if start is None else start.round,
                observers=watching,
                noise_source=noise_source,
                min_clients=min_clients,
                cohort_seed=secrets.randbits(128) if fresh else seed,
            )
        except BaseException:  # Ctrl-C and failures alike leave the last whole round behind
            if saver is not None:
                saver.save()
            raise
        model = method.model(outcome.server)
        summary = _summary(task, method, plan, seed, guard, outcome, history, tested, model)
        if scored_on is not None:
            ids = range(min(plan.clients, _CLIENTS_SCORED))
            own_model = partial(method.personal_model, outcome.server)
            personal = evaluate_personal(task, own_model, engine.state(), tested, scored_on)
            summary["per_client"] = evaluate_clients(task, model, scored_on, ids)
            summary["per_client_on"] = "held-out examples" if held_out else "training examples"
            summary["personal"] = None if personal is None else asdict(personal)
        summary.update(facts or {})
        if folder is not None:
            folder.finish(model, summary)
        return Result(summary, history, model, None if folder is None else folder.path)


def _check_min_clients(min_clients: int, plan: Plan) -> None:
    if min_clients > plan.cohort:
        raise InputError(
            "run.min_clients", min_clients, f"a cohort has {plan.cohort}", f"Use 0 to {plan.cohort}."
        )
    if min_clients and plan.sampler == "poisson":
        raise InputError(
            "run.min_clients",
            min_clients,
            "dropping small Poisson rounds would tell how many came, which the accounting does not allow",
            "Leave it out, or use another sampler.",
        )


def _summary(
    task: Task,
    method: AnyMethod,
    plan: Plan,
    seed: int,
    guard: PrivacyGuard,
    outcome: Outcome,
    history: Sequence[dict[str, Any]],
    test: tuple[Tensor, Tensor] | None,
    model: dict[str, Tensor],
) -> dict[str, Any]:
    scored = history[-1] if history and "accuracy" in history[-1] else {}
    if test is not None and not scored:
        scored = EvaluateOnTest(task, *test, None, 1).score(model).metrics()
    statement = guard.statement(outcome.rounds)
    return {
        "method": method.name,
        "seed": seed,
        "accuracy": scored.get("accuracy"),
        "loss": scored.get("loss"),
        "rounds": outcome.rounds,
        "seconds": sum(line["seconds"] for line in history),
        "bytes_up": sum(line["bytes_up"] for line in history),
        "bytes_down": sum(line["bytes_down"] for line in history),
        "stopped": outcome.stopped,
        "privacy": statement.to_json(),
        "privacy_in_words": statement.in_words(),
        "per_class": scored.get("per_class"),
        "plan": {
            "clients": plan.clients,
            "cohort": plan.cohort,
            "sampler": plan.sampler,
            "rounds": plan.rounds,
            "smallest_client": plan.records_per_client,
            "largest_client": plan.largest_client,
        },
        "parameters": task.parameter_count,
        "environment": environment(),
    } | {name: scored[name] for name in ("mcc", "perplexity") if name in scored}


def _describe(task: Task, method: AnyMethod, plan: Plan, seed: int) -> str:
    """What identifies a run, as TOML (every value a JSON string is a TOML string too)."""
    facts = {"method": repr(method), "plan": repr(plan), "seed": str(seed), "model": repr(task.module)}
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in facts.items())
