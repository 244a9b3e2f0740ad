"""One run from its options to its result, for every engine."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fedveil.data.client_data import digest_of
from fedveil.data.notes import STOPPING_NOTE
from fedveil.engines.engine import Engine
from fedveil.errors import NobodyAnsweredError
from fedveil.evaluation.accuracy import (
    EXTRA_METRICS,
    evaluate_clients,
    evaluate_cohort,
    evaluate_personal,
    majority_rate,
    outputs_of,
)
from fedveil.evaluation.metrics import metrics_of
from fedveil.messages import Record
from fedveil.methods.method import AnyMethod
from fedveil.privacy.releases import Plan
from fedveil.session.callbacks.evaluate import EvaluateOnTest
from fedveil.session.callbacks.stop_early import StopEarly
from fedveil.session.checkpoint import Checkpoint
from fedveil.session.checks import check_min_clients, check_stopping, check_test, first_server
from fedveil.session.loop import Callback, Outcome, run_rounds
from fedveil.session.options import AvailableData, RunOptions
from fedveil.session.privacy_guard import PrivacyGuard
from fedveil.session.results import Checkpoints, Result, ResultFolder, RoundLog, Transcript, environment
from fedveil.task import Task, cross_entropy
from fedveil.tree import Params

if TYPE_CHECKING:
    from torch import Tensor

_CLIENTS_MEASURED = 20  # number of clients with metrics and intervals of their own
_CLIENTS_SCORED = 1000  # largest number of clients with individual scores

EngineOf = Callable[[str], Engine]
"""Makes the engine of the run with this name."""


def run_session(
    engine_of: EngineOf,
    task: Task,
    method: AnyMethod,
    plan: Plan,
    options: RunOptions,
    data: AvailableData,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train with an engine, record every round, and state the privacy of the result.

    The engine is created last, so that invalid settings are refused before anything is started or written. A finished
    results folder is loaded, an unfinished one is resumed.
    """
    session = open_session(task, method, plan, options, data)
    with ExitStack() as stack:
        start = Start()
        if session.folder is not None:
            stack.enter_context(session.folder.held())
            digest = session.require_same_run(session.folder)
            if session.folder.finished:
                return session.folder.read()
            start = session.start(session.folder, digest)
        engine = engine_of(session.name)
        stack.callback(engine.close)
        outcome = session.train(engine, start, callbacks)
        return session.finish(engine, outcome, start.history)


def open_session(
    task: Task, method: AnyMethod, plan: Plan, options: RunOptions, data: AvailableData
) -> Session:
    """Check and name a run, without writing anything."""
    check_min_clients(options.min_clients, plan)
    test, public = check_test(task, data.test), check_test(task, data.public)
    if options.early_stopping is not None:
        check_stopping(task, options.early_stopping, public)
        notes, ends = (*options.privacy.notes, STOPPING_NOTE), options.early_stopping.ends(plan.rounds)
        options = replace(options, privacy=replace(options.privacy, notes=notes, ends=ends))
    server = first_server(task, method, plan, options.seed)
    folder = None if options.results is None else ResultFolder(options.results)
    if folder is not None:
        folder.require_unheld()
    ledger = options.privacy.ledger or (None if folder is None else folder.path / "ledger.jsonl")
    # Names are unique, so that on a shared ledger another run, perhaps on other data, is not mistaken for a resumed
    # attempt of this one. A run without a folder cannot be resumed.
    name = f"{options.seed} {secrets.token_hex(6)}" if folder is None else folder.run()
    guard = PrivacyGuard(
        method,
        plan,
        options.privacy,
        name,
        ledger,
        noise=options.noise_source,
        deployed=options.deployed,
    )
    return Session(task, method, plan, options, data, test, server, folder, name, guard, public)


@dataclass(frozen=True)
class Start:
    """The start of a run: a checkpoint with the rounds completed so far, or the first round."""

    checkpoint: Checkpoint | None = None
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def round(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.round


@dataclass(frozen=True)
class Session:
    """A run that is checked and has a name."""

    task: Task
    method: AnyMethod
    plan: Plan
    options: RunOptions
    data: AvailableData
    test: tuple[Tensor, Tensor] | None
    server: Record
    folder: ResultFolder | None
    name: str
    guard: PrivacyGuard
    public: tuple[Tensor, Tensor] | None = None

    @property
    def identity(self) -> str:
        """Everything that the result depends on except the data, as TOML (every JSON string is a TOML string too)."""
        facts = {
            "method": repr(self.method),
            "plan": repr(self.plan),
            "seed": str(self.options.seed),
            "model": repr(self.task.module),
        }
        if self.task.example_loss is not cross_entropy:
            facts["loss"] = getattr(self.task.example_loss, "__name__", repr(self.task.example_loss))
        if not self.options.replay_safe:  # a folder with seeded noise is not resumed with fresh noise
            facts["noise"] = self.options.noise_source
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in facts.items())

    def require_same_run(self, folder: ResultFolder) -> str | None:
        """Refuse a folder of another run, numerics or data; returns the digest of the data, if available."""
        folder.require(self.identity)
        folder.require_numerics(self.method.numerics)
        digest = None if self.data.clients is None else digest_of(self.data.clients, self.test)
        folder.require_data(digest)
        return digest

    def start(self, folder: ResultFolder, digest: str | None) -> Start:
        """Start in the folder, or resume from its newest checkpoint if all its rounds are on the ledger.

        Rounds after the checkpoint are releases too where they are repeated with fresh noise.
        """
        before = 0 if self.options.replay_safe else len(folder.rounds())
        checkpoint = folder.start(
            self.options.config or self.identity,
            self.identity,
            self.name,
            self.method.server_type,
            self.method.numerics,
            digest,
            replay_safe=self.options.replay_safe,
        )
        if (done := max(before, 0 if checkpoint is None else checkpoint.round)) > 0:
            self.guard.require_charged(done)
        return Start(checkpoint, folder.rounds())

    def train(self, engine: Engine, start: Start, callbacks: Sequence[Callback]) -> Outcome:
        """Run the remaining rounds."""
        options, saver = self.options, None
        if self.folder is not None:
            place, every = self.folder.path / "checkpoint", options.checkpoint_every
            saver = Checkpoints(place, engine, every, self.method.numerics)
        server = self.server
        if start.checkpoint is not None:
            server = start.checkpoint.server.map(lambda _, leaf: leaf.to(self.task.device))
            engine.restore(start.checkpoint.states)
        try:
            return run_rounds(
                self.task,
                self.method,
                engine,
                self.plan,
                server,
                seed=options.seed,
                start=start.round,
                callbacks=[*self._own_callbacks(start.history, saver), *callbacks],
                noise_source=options.noise_source,
                min_clients=options.min_clients,
            )
        except BaseException as error:  # also Ctrl-C: save a checkpoint of the last complete round
            if saver is not None:
                saver.save()
            if isinstance(error, NobodyAnsweredError):
                released = self.guard.released_in_words(error.round - 1)
                raise NobodyAnsweredError(error.round, error.reasons, released) from error
            raise

    def _own_callbacks(self, history: list[dict[str, Any]], saver: Checkpoints | None) -> list[Callback]:
        """The session's callbacks, in the order of their calls: early stopping precedes charging, scoring precedes
        logging."""
        options, found = self.options, list[Callback]([])
        if options.early_stopping is not None and self.public is not None:  # before the guard charges a round
            found.append(StopEarly(self.task, self.public, options.early_stopping, history))
        found.append(self.guard)
        if self.test is not None:
            found.append(EvaluateOnTest(self.task, *self.test, self.data.classes, options.evaluate_every))
        folder = None if self.folder is None else self.folder.path
        found.append(RoundLog(history, None if folder is None else folder / "rounds.jsonl"))
        if saver is not None:
            found.append(saver)
        if folder is not None and options.transcript:
            rounds = None if isinstance(options.transcript, bool) else options.transcript
            found.append(Transcript(folder / "transcript", rounds, options.transcript_exchanges))
        return found

    def finish(self, engine: Engine, outcome: Outcome, history: list[dict[str, Any]]) -> Result:
        """Build the result, and write it to the run's folder if it has one."""
        model = self.method.model(outcome.server)
        summary = self._summary(outcome, history, model) | self._client_scores(engine, outcome, model)
        summary |= self._metrics(model) | dict(self.options.facts)
        if self.folder is not None:
            summary = self.folder.finish(model, summary, self.guard.ledger_path)
        return Result(summary, history, model, None if self.folder is None else self.folder.path)

    def _client_scores(self, engine: Engine, outcome: Outcome, model: Params) -> dict[str, Any]:
        """Scores of the final model, and of personal models, on the clients' own examples."""
        clients = self.data.scored_on
        if clients is None:
            return {}
        own_model = partial(self.method.personal_model, outcome.server)
        personal = evaluate_personal(self.task, own_model, engine.state(), self.test, clients) or (
            evaluate_cohort(self.task, self.method.cohort_models(outcome.server), self.test)
        )
        ids = range(min(self.plan.clients, _CLIENTS_SCORED))
        return {
            "per_client": evaluate_clients(self.task, model, clients, ids),
            "per_client_on": "training examples" if self.data.local_test is None else "held-out examples",
            "personal": None if personal is None else asdict(personal),
        }

    def _metrics(self, model: Params) -> dict[str, Any]:
        """Metrics with intervals, on the test set and on each client's own held-out examples."""
        if self.task.text is not None or self.test is None:
            return {}
        loss, outputs = self.task.example_loss, outputs_of(self.task, model, self.test[0])
        if outputs.dim() != 2:
            return {}
        classes = max(self.data.classes or 1, outputs.shape[1])  # the test examples may lack some of them
        found: dict[str, Any] = {"all": metrics_of(loss, outputs, self.test[1], classes)}
        own, count = self.data.local_test, self.plan.clients
        if own is not None and count <= _CLIENTS_MEASURED:
            names = self.data.names or [f"client {k}" for k in range(count)]
            parts = ((name, own.load([k])) for k, name in enumerate(names))
            found["clients"] = {
                name: metrics_of(loss, outputs_of(self.task, model, part.x[0]), part.y[0], classes)
                for name, part in parts
                if part.largest
            }
        return {"metrics": found}

    def _summary(
        self, outcome: Outcome, history: Sequence[Mapping[str, Any]], model: Params
    ) -> dict[str, Any]:
        task, plan = self.task, self.plan
        scored = history[-1] if history and "accuracy" in history[-1] else {}
        if self.test is not None and not scored:
            scored = EvaluateOnTest(task, *self.test, None, 1).score(model).metrics()
        answered = [line["answered"] for line in history if line.get("answered")]
        statement = self.guard.statement(outcome.rounds, min(answered, default=None))
        return {
            "method": self.method.name,
            "seed": self.options.seed,
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
            "majority": majority_rate(self.test),
            "numerics": self.method.numerics,
            "environment": environment(),
        } | {name: scored[name] for name in EXTRA_METRICS if name in scored}
