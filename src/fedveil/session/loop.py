"""The training loop: sample a cohort, exchange messages, update the server, call the callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fedveil.engines.engine import Answers, Engine, require_finite, surely_finite
from fedveil.errors import DivergedError, FedveilError, NobodyAnsweredError
from fedveil.lazy_torch import torch
from fedveil.messages import Message, Record
from fedveil.methods.method import AnyMethod, At
from fedveil.privacy.releases import Plan
from fedveil.privacy.sampling import draw_cohort, draw_secret_cohort
from fedveil.streams import NoiseSource, ServerStreams
from fedveil.task import Task
from fedveil.tree import Params


@dataclass(frozen=True)
class RoundEnd:
    """The argument of callbacks after a round; they add their measurements to `metrics`."""

    at: At
    cohort: tuple[int, ...]
    server: Record
    model: Params
    last: bool
    metrics: dict[str, Any] = field(default_factory=dict)


class Callback:
    """Called during a run. Methods do nothing by default."""

    def round_starts(self, at: At, cohort: Sequence[int]) -> str | None:
        """Before any release of the round. A returned text stops the run, with the text as the reason."""
        return None

    def exchange_ends(self, at: At, cohort: Sequence[int], down: Message, up: Message | None) -> None:
        """After an exchange, with its messages; `up` is overwritten by the next exchange."""

    @property
    def reads_uploads(self) -> bool:
        """Whether `exchange_ends` needs every client's upload; if no callback does, `up` may contain sums."""
        return type(self).exchange_ends is not Callback.exchange_ends

    def round_ends(self, end: RoundEnd) -> None:
        """After the server's update."""


CallbacksFor = Callable[[Plan], Sequence[Callback]]
"""Makes the callbacks of a run once its plan is known."""


@dataclass(frozen=True)
class Outcome:
    """The results of the loop: the server after its last round."""

    server: Record
    rounds: int
    stopped: str | None


def run_rounds(
    task: Task,
    method: AnyMethod,
    engine: Engine,
    plan: Plan,
    server: Record,
    *,
    seed: int,
    start: int = 0,
    callbacks: Sequence[Callback] = (),
    noise_source: NoiseSource = "seeded",
    min_clients: int = 0,
) -> Outcome:
    """Rounds `start + 1` to `plan.rounds`, from the server's state after round `start`.

    An exchange that fewer than `min_clients` answered counts as answered by nobody. Cohorts are drawn from the same
    source as the noise, since amplification by sampling requires cohorts as secret as the noise.

    Raises:
        NobodyAnsweredError: Every client of a cohort refused or dropped out.
    """
    exchanges = _Exchanges(task, method, engine, callbacks, seed, noise_source, min_clients)
    for number in range(start + 1, plan.rounds + 1):
        began = time.perf_counter()
        at = At(plan, number)
        seeded = noise_source == "seeded"
        cohort = draw_cohort(plan, seed, number) if seeded else draw_secret_cohort(plan)
        for callback in callbacks:
            if (reason := callback.round_starts(at, cohort)) is not None:
                return Outcome(server, number - 1, reason)
        sent = received = answered = 0
        for exchange in range(method.exchanges(plan)):
            at = At(plan, number, exchange)
            done = exchanges.run(at, server, cohort)
            server, answered = done.server, done.answered
            sent += done.bytes_down
            received += done.bytes_up
        end = RoundEnd(at, cohort, server, method.model(server), last=number == plan.rounds)
        _require_finite_model(end.model, at)
        end.metrics.update(cohort=len(cohort), answered=answered, bytes_up=received, bytes_down=sent)
        end.metrics["seconds"] = time.perf_counter() - began
        for callback in callbacks:
            callback.round_ends(end)
    return Outcome(server, max(start, plan.rounds), None)


@dataclass(frozen=True)
class _Exchanged:
    server: Record
    answered: int
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class _Exchanges:
    """Broadcast, clients' updates, the server's update."""

    task: Task
    method: AnyMethod
    engine: Engine
    callbacks: Sequence[Callback]
    seed: int
    noise_source: NoiseSource
    min_clients: int

    def run(self, at: At, server: Record, cohort: tuple[int, ...]) -> _Exchanged:
        down = self.method.broadcast(at, server, cohort)
        answers = self.engine.exchange(cohort, down, at)
        _require_somebody(answers.missing, cohort, at)
        if len(answers.clients) < self.min_clients:
            answers = Answers((), None, answers.missing)
        received = 0
        if answers.up is not None:
            if not answers.summed:
                require_finite(answers.up, answers.clients, at)
            received = answers.row_bytes * len(answers.clients)
            if self.method.discloses_sum:
                answers = Answers(answers.clients, self.method.disclosed(answers.up))
        for callback in self.callbacks:
            callback.exchange_ends(at, answers.clients, down, answers.up)
        update = partial(self._update, at, server)
        try:
            server = update(answers)
        except FedveilError:
            raise
        except Exception as error:
            answers = _without_failing(self.engine, at, answers, update, error, self.min_clients)
            _require_somebody(answers.missing, cohort, at)
            server = update(answers)
        sent = down.row_bytes() * len(cohort)
        return _Exchanged(self.engine.own(server), len(answers.clients), received, sent)

    def _update(self, at: At, server: Record, answers: Answers) -> Record:
        streams = ServerStreams(self.seed, at.round, at.exchange, self.noise_source)
        new: Record = self.method.server_update(self.task, at, server, answers.clients, answers.up, streams)
        if _form(self.method.model(new)) != _form(self.method.model(server)):
            raise ValueError("the update changed the names or shapes of the model's parameters")
        return new


def _without_failing(
    engine: Engine,
    at: At,
    answers: Answers,
    update: Callable[[Answers], Record],
    error: Exception,
    min_clients: int,
) -> Answers:
    """The answers without those that make the server's update fail when they are used alone; deployed clients only.

    If no single answer causes the failure, it is a bug of the method and is raised again.
    """
    kept: list[int] = []
    problems: dict[int, str] = {}
    for row, client in enumerate(answers.clients):
        try:
            update(Answers((client,), None if answers.up is None else answers.up.rows([row])))
            kept.append(row)
        except Exception as alone:
            problems[client] = f"the server cannot use its upload ({type(alone).__name__})"
    if not problems or (not kept and len(problems) > 1):
        raise error
    if not all(engine.leave_out(client, at, problem) for client, problem in problems.items()):
        raise error
    missing = {**answers.missing, **problems}
    if answers.up is None or len(kept) < max(1, min_clients):
        return Answers((), None, missing)
    return Answers(tuple(answers.clients[row] for row in kept), answers.up.rows(kept), missing)


def _require_somebody(missing: Mapping[int, str], cohort: Sequence[int], at: At) -> None:
    """End a run whose whole cohort refused or dropped out.

    An empty Poisson cohort does not end the run: its noise is released as usual, and stopping would disclose that it
    was empty.
    """
    if cohort and missing.keys() >= set(cohort):
        raise NobodyAnsweredError(at.round, {client: missing[client] for client in cohort})


def _form(model: Params) -> dict[str, torch.Size]:
    return {name: leaf.shape for name, leaf in model.items()}


def _require_finite_model(model: Params, at: At) -> None:
    for name, leaf in model.items():
        if not surely_finite(leaf) and not bool(torch.isfinite(leaf).all()):
            raise DivergedError(
                f"round {at.round}: the server's update left the model not finite in {name!r}, though every "
                "upload was finite. Lower the learning rate or the noise; the last checkpoint is kept.",
                field="model",
                value=name,
            )
