"""Audit a method as it runs: canaries go through its own client and server code.

The canary task is linear: an example x contributes the gradient -x whatever the parameters are, so a canary's
update points where its example points, and a client with zero examples sends nothing but noise. Everything
else, clipping, noise, messages, aggregation, is the method's own.

Clients are audited by a canary (with it and without it, many times over); records by canary records that
are in or out by fair coins in a single upload. Both look at one participation, so their bounds are compared with
what is proven for one participation. Where the server sees several uploads, their noise must also be independent,
between clients and between rounds: that is tested on clients that have nothing to send but noise, whatever its law and
whichever unit it protects.

Synthetic images cannot be read back coordinate by coordinate. Methods that make them are audited one step
earlier, at the noisy gradients that the images are computed from, by an auditor who sees these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.audits.canaries import audit_samples, independence_p_value
from fedveil.audits.findings import AuditFinding
from fedveil.audits.one_run import one_run, random_canaries
from fedveil.data.client_data import ArrayClients
from fedveil.engines.worker import ClientWorker
from fedveil.errors import InputError
from fedveil.messages import Message
from fedveil.methods.method import AnyMethod, At
from fedveil.privacy.accounting import Guarantee, account_participation
from fedveil.privacy.releases import Adversary, GaussianNoise, Plan, RandomGaussianNoise, Release, Unit
from fedveil.streams import ClientStreams, ServerStreams, named_stream
from fedveil.task import Task
from fedveil.tree import flatten, sub

_DIMENSION = 16
_RECORD_DIMENSION = 20_000
_PER_CALL = 2000
_NOISY_CLIENTS = 64  # whose noise is compared at record level
_LONG = 1e4  # a canary this long is always clipped


@dataclass(frozen=True)
class Audited:
    """What an audit found against one adversary, beside what is proven for one participation."""

    unit: Unit
    adversary: Adversary
    finding: AuditFinding
    proven: float | None

    @property
    def broken(self) -> bool:
        return self.finding.broken(self.proven)

    def to_json(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "adversary": self.adversary,
            "scope": "one participation",
            "proven": self.proven,
            "broken": self.broken,
        } | self.finding.to_json()


def audit_method(
    method: AnyMethod,
    plan: Plan,
    *,
    delta: float,
    seed: int = 0,
    samples: int = 4000,
    confidence: float = 0.95,
) -> list[Audited]:
    """Audit every (unit, adversary) that the method's releases protect, against server and observer."""
    releases = tuple(method.releases(plan))
    proven = {(row.unit, row.adversary): row for row in account_participation(releases, plan, delta)}
    found: list[Audited] = []
    for (unit, adversary), row in proven.items():
        if adversary == "client" or row.epsilon is None:
            continue  # a client sees what the observer sees, or what the server sees; without a proof nothing to refute
        if unit == "record":
            if adversary == "server":
                found.append(_audit_records(method, plan, row, seed, delta, confidence))
            continue
        multiplier = _declared(releases, unit, adversary)
        audit = _uploads if adversary == "server" else _aggregates
        inside, outside = (audit(method, plan, seed + arm, samples, canary=arm == 0) for arm in (0, 1))
        finding = audit_samples(
            _along(inside),
            _along(outside),
            delta=delta,
            confidence=confidence,
            declared_multiplier=multiplier,
        )
        if adversary == "server":
            later = _uploads(method, plan, seed + 1, len(outside), canary=False, first=2)
            finding = _with_independence(finding, outside, later, gaussian=multiplier is not None)
        found.append(Audited(unit, adversary, finding, row.epsilon))
    return found


def _with_independence(
    finding: AuditFinding, noise: np.ndarray, *others: np.ndarray, gaussian: bool = True
) -> AuditFinding:
    """The finding with a p-value that also says whether noise was used twice.

    Rows of `noise` `[n, d]` are what n clients sent that had nothing to send, each of `others` what the same clients
    sent another time. Of noise that is not normal only the signs are compared, whose law is known.
    """
    first, *later = (rows if gaussian else np.sign(rows) for rows in (noise, *others))
    alike = [independence_p_value(first[:-1], first[1:]), *(independence_p_value(first, o) for o in later)]
    tests = alike if finding.p_value is None else [finding.p_value, *alike]
    return replace(finding, p_value=min(1.0, len(tests) * min(tests)))


def _along(seen: np.ndarray) -> np.ndarray:
    """How far each row `[n, d]` lies in the canary's direction, among the coordinates that were sent at all."""
    sent = np.maximum((seen != 0).sum(1), 1)
    along: np.ndarray = seen.sum(1) / np.sqrt(sent)
    return along


def _declared(releases: Sequence[Release], unit: Unit, adversary: Adversary) -> float | None:
    """The noise multiplier of the only Gaussian release that this adversary sees, if it is the only one."""
    seen = [r for r in releases if r.unit == unit and adversary in r.visible_to and r.costs]
    if len(seen) != 1 or seen[0].accesses != 1:
        return None
    protection = seen[0].protection
    if isinstance(protection, GaussianNoise):
        return protection.multiplier
    if isinstance(protection, RandomGaussianNoise):  # of a cohort as planned, which is what is audited
        return max(zip(protection.weights, protection.multipliers, strict=True))[1]
    return None


class _IdleLayer(nn.Module):
    """The canary's layer, and a last one that nothing depends on."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.canary = nn.Linear(dimension, 1, bias=False)
        self.idle = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.canary.weight)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.canary(x.flatten(1)) + 0 * self.idle.weight.sum()
        return scores


def canary_task(dimension: int, method: AnyMethod | None = None, plan: Plan | None = None) -> Task:
    """Parameters w, an example x, the loss -<x, w>; a method that keeps its last layer gets one to keep."""

    def build() -> nn.Module:
        layer = nn.Linear(dimension, 1, bias=False)
        nn.init.zeros_(layer.weight)
        return nn.Sequential(nn.Flatten(), layer)

    def loss(scores: Tensor, _: Tensor) -> Tensor:
        return -scores.squeeze(-1)

    task = Task(build, loss=loss)
    if method is None or plan is None:
        return task
    try:
        method.init_server(task.init(0), plan)
    except InputError:
        return Task(lambda: _IdleLayer(dimension), loss=loss)
    return task


def canary_clients(
    count: int, canaries: Sequence[int], dimension: int, *, everywhere: bool = False
) -> ArrayClients:
    """Clients of one example: zero, or for canaries a long one on the first coordinate, or on all alike."""
    x = torch.zeros(count, 1, dimension)
    x[list(canaries), 0, : dimension if everywhere else 1] = _LONG
    return ArrayClients.from_arrays([(row, torch.zeros(1, dtype=torch.long)) for row in x])


def moved(method: AnyMethod, at: At, message: Message, down: Message) -> Tensor:
    """How far each upload moved the parameters, `[K, d]`."""
    reading = method.read_upload(at, down, message)
    if reading is None:
        raise InputError(
            "method",
            method.name,
            "uploads nothing that amounts to a model",
            "Give it the hook `read_upload`, or `noisy_gradients`.",
        )
    return flatten(sub(reading.models, reading.start))


def _uploads(
    method: AnyMethod, plan: Plan, seed: int, samples: int, *, canary: bool, first: int = 1
) -> np.ndarray:
    """Single uploads as the server sees them, `[samples, d]`; the canary moves all coordinates alike."""
    seen: list[np.ndarray] = []
    task = canary_task(_DIMENSION, method, plan)
    for start in range(0, samples, _PER_CALL):
        count = min(_PER_CALL, samples - start)
        clients = canary_clients(count, range(count) if canary else (), _DIMENSION, everywhere=True)
        wide = replace(plan, records_per_client=1, largest_client=1)
        server = method.init_server(task.init(0), wide)
        ids = range(count)
        at = At(wide, first + 2 * (start // _PER_CALL))
        down = method.broadcast(at, server, ids[: plan.cohort]).rows([0])
        up, _ = ClientWorker(task, clients, method, seed).update(ids, down, {}, at)
        seen.append(moved(method, at, up, down).double().numpy())
    return np.concatenate(seen)


def _aggregates(method: AnyMethod, plan: Plan, seed: int, samples: int, *, canary: bool) -> np.ndarray:
    """The model after one round, as an observer sees it, many times over: `[samples / 4, d]`."""
    task = canary_task(_DIMENSION, method, plan)
    count = min(plan.cohort, plan.clients)
    clients = canary_clients(count, (0,) if canary else (), _DIMENSION, everywhere=True)
    small = replace(plan, records_per_client=1, largest_client=1)
    server = method.init_server(task.init(0), small)
    worker = ClientWorker(task, clients, method, seed)
    ids = tuple(range(count))
    seen = []
    for number in range(1, max(40, samples // 4) + 1):
        at = At(small, number)
        down = method.broadcast(at, server, ids)
        up, _ = worker.update(ids, down, {}, at)
        after = method.server_update(task, at, server, ids, up, ServerStreams(seed, number))
        model = method.model(after)
        seen.append(next(iter(model.values())).flatten().double().numpy())
    return np.stack(seen)


def _audit_records(
    method: AnyMethod, plan: Plan, row: Guarantee, seed: int, delta: float, confidence: float
) -> Audited:
    """Canary records by fair coins in one client's upload; half as many guesses as a tenth of them."""
    canaries = max(200, min(2000, 2 * plan.records_per_client))
    coins = named_stream(seed, "audit/coins")
    directions = random_canaries(canaries, _RECORD_DIMENSION, 1.0, coins)
    included = np.asarray(coins.random(canaries) < 0.5, dtype=np.bool_)
    x = directions[torch.from_numpy(included)] * _LONG
    task = canary_task(_RECORD_DIMENSION, method, plan)
    clients = ArrayClients.from_arrays([(x, torch.zeros(len(x), dtype=torch.long))])
    one = replace(plan, records_per_client=len(x), largest_client=len(x))
    at = At(one, 1)
    behind = _gradients_behind(method, task, clients, at, seed)
    if behind is not None:
        seen = behind.sum(0)[0]
        noises = _noise_behind(method, plan, seed)
    else:
        server = method.init_server(task.init(0), one)
        down = method.broadcast(at, server, (0,))
        up, _ = ClientWorker(task, clients, method, seed).update((0,), down, {}, at)
        seen = moved(method, at, up, down)[0]
        noises = [
            _uploads(method, plan, seed + 1, _NOISY_CLIENTS, canary=False, first=round_) for round_ in (1, 2)
        ]
    scores = (directions.double() @ seen.double()).numpy()
    finding = one_run(scores, included, guesses=canaries // 10, delta=delta, confidence=confidence)
    finding = _with_independence(finding, *noises)
    releases = method.releases(one)
    proven = {(r.unit, r.adversary): r.epsilon for r in account_participation(releases, one, delta)}
    return Audited("record", row.adversary, finding, proven.get(("record", row.adversary)))


def _gradients_behind(
    method: AnyMethod, task: Task, clients: ArrayClients, at: At, seed: int, accesses: int | None = None
) -> Tensor | None:
    """The noisy gradients `[accesses, K, d]` behind uploads that cannot be read; None where they can."""
    ids = range(len(clients.sizes))
    streams = ClientStreams(seed, at.round, tuple(ids))
    return method.noisy_gradients(task, at, clients.load(ids), streams, accesses)


def _noise_behind(method: AnyMethod, plan: Plan, seed: int) -> list[np.ndarray]:
    """What clients without a gradient add to it: one access, the next, and one of another round."""
    task, clients = canary_task(_DIMENSION), canary_clients(_NOISY_CLIENTS, (), _DIMENSION)
    small = replace(plan, records_per_client=1, largest_client=1)
    drawn = []
    for number in (1, 2):
        gradients = _gradients_behind(method, task, clients, At(small, number), seed, 2)
        assert gradients is not None
        drawn.append(gradients.double().numpy())
    return [drawn[0][0], drawn[0][1], drawn[1][0]]
