"""Audit a method with canaries that pass through its own client and server code.

The canary task is linear: an example x contributes the gradient -x for any parameters, so a canary's update has the
direction of its example, and a client with zero examples sends only noise. Everything else, clipping, noise, messages,
aggregation, is the method's own.

Clients are audited by many releases with and without a canary; records by canary records that are included or not by
fair coins in a single upload. Both audits cover one participation, so their bounds are compared with the guarantee for
one participation. Where several uploads are visible to the server, their noise must also be independent, between
clients and between rounds: that is tested on clients that send only noise, for any noise distribution and either unit.
The bits of uploads are also tested (`bits`), in a separate row.

Synthetic images cannot be mapped to coordinates of an update. Methods that make them are audited one step earlier, at
the noisy gradients that the images are computed from, by an auditor who observes these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.audits.bits import audit_bits, float_noises
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

_DIMENSION = 64
_RECORD_DIMENSION = 20_000
_PER_CALL = 2000
_NOISY_CLIENTS = 64  # number of clients whose noise is compared at record level
_LONG = 1e4  # the norm of a canary that is always clipped


@dataclass(frozen=True)
class Audited:
    """The finding of an audit against one adversary, with the guarantee for one participation."""

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
            continue  # a client observes what observer or server observe; without a proof nothing can be refuted
        if unit == "record":
            if adversary == "server":
                found.append(_audit_records(method, plan, row, seed, delta, confidence))
                arms = [_record_arm(method, plan, seed + arm, samples, canary=arm == 0) for arm in (0, 1)]
                found += _bits(method, plan, row, arms, delta, confidence)
            continue
        multiplier = _declared(releases, unit, adversary)
        alone = adversary == "server" and not method.discloses_sum
        audit = _uploads if alone else _aggregates
        inside, outside = (audit(method, plan, seed + arm, samples, canary=arm == 0) for arm in (0, 1))
        finding = audit_samples(
            _along(inside.moved),
            _along(outside.moved),
            delta=delta,
            confidence=confidence,
            declared_multiplier=multiplier,
        )
        if alone:
            later = _uploads(method, plan, seed + 1, len(outside.moved), canary=False, first=2).moved
            finding = _with_independence(finding, outside.moved, later, gaussian=multiplier is not None)
        found.append(Audited(unit, adversary, finding, row.epsilon))
        found += _bits(method, plan, row, [inside.sent, outside.sent], delta, confidence)
    return found


def _bits(
    method: AnyMethod,
    plan: Plan,
    row: Guarantee,
    arms: Sequence[np.ndarray],
    delta: float,
    confidence: float,
) -> list[Audited]:
    """The test of reachable values, on uploads with and without a canary; None for integer uploads."""
    noises = float_noises(method, plan)
    if not noises or arms[0].shape[1] == 0:
        return []
    one = replace(plan, records_per_client=1, largest_client=1)  # canary clients have one record
    rows = account_participation(tuple(method.releases(one)), one, delta)
    proven = {(r.unit, r.adversary): r.epsilon for r in rows}
    finding = audit_bits(arms[0], arms[1], noises, delta=delta, confidence=confidence)
    return [Audited(row.unit, row.adversary, finding, proven.get((row.unit, row.adversary)))]


def _with_independence(
    finding: AuditFinding, noise: np.ndarray, *others: np.ndarray, gaussian: bool = True
) -> AuditFinding:
    """The finding with a p-value that also covers reuse of noise.

    Rows of `noise` `[n, d]` are uploads of n clients without data, each of `others` uploads of the same clients at
    another time. For noise that is not normal only signs are compared, whose distribution is known.
    """
    first, *later = (rows if gaussian else np.sign(rows) for rows in (noise, *others))
    alike = [independence_p_value(first[:-1], first[1:]), *(independence_p_value(first, o) for o in later)]
    tests = alike if finding.p_value is None else [finding.p_value, *alike]
    return replace(finding, p_value=min(1.0, len(tests) * min(tests)))


def _along(observed: np.ndarray) -> np.ndarray:
    """The component of each row `[n, d]` in the canary's direction, over the coordinates that were sent."""
    sent = np.maximum((observed != 0).sum(1), 1)
    along: np.ndarray = observed.sum(1) / np.sqrt(sent)
    return along


def _declared(releases: Sequence[Release], unit: Unit, adversary: Adversary) -> float | None:
    """The noise multiplier of the Gaussian release visible to this adversary, if there is exactly one release."""
    seen = [r for r in releases if r.unit == unit and adversary in r.visible_to and r.costs]
    if len(seen) != 1 or seen[0].accesses != 1:
        return None
    protection = seen[0].protection
    if isinstance(protection, GaussianNoise):
        return protection.multiplier
    if isinstance(protection, RandomGaussianNoise):  # of the planned cohort size, which is audited
        return max(zip(protection.weights, protection.multipliers, strict=True))[1]
    return None


class _IdleLayer(nn.Module):
    """The canary's layer, and a last layer without influence on the output."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.canary = nn.Linear(dimension, 1, bias=False)
        self.idle = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.canary.weight)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.canary(x.flatten(1)) + 0 * self.idle.weight.sum()
        return scores


def canary_task(dimension: int, method: AnyMethod | None = None, plan: Plan | None = None) -> Task:
    """Parameters w, an example x, the loss -<x, w>; with an idle last layer for methods with a personal head."""

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
    """Clients with one example: zero, or for canaries a long one in the first coordinate, or equally in all."""
    x = torch.zeros(count, 1, dimension)
    x[list(canaries), 0, : dimension if everywhere else 1] = _LONG
    return ArrayClients.from_arrays([(row, torch.zeros(1, dtype=torch.long)) for row in x])


def moved(method: AnyMethod, at: At, message: Message, down: Message) -> Tensor:
    """The change of the parameters by each upload, `[K, d]`."""
    reading = method.read_upload(at, down, message)
    if reading is None:
        raise InputError(
            "method",
            method.name,
            "has no upload that can be read as a model",
            "Implement its hook `read_upload` or `noisy_gradients`.",
        )
    return flatten(sub(reading.models, reading.start))


class _Seen(NamedTuple):
    """Many releases: the change of the parameters by each, `[n, d]`, and the numbers that were sent, `[n, m]`."""

    moved: np.ndarray
    sent: np.ndarray


def _numbers(up: Message) -> np.ndarray:
    """All floating-point numbers of the uploads of K clients, `[K, m]`."""
    leaves = [
        leaf.flatten(1) for leaf in up.tensors().values() if leaf.is_floating_point() and leaf.dim() > 1
    ]
    return torch.cat(leaves, 1).float().numpy() if leaves else np.zeros((0, 0), dtype=np.float32)


def _uploads(
    method: AnyMethod, plan: Plan, seed: int, samples: int, *, canary: bool, first: int = 1
) -> _Seen:
    """Single uploads as observed by the server; the canary changes all coordinates equally."""
    seen: list[np.ndarray] = []
    sent: list[np.ndarray] = []
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
        sent.append(_numbers(up))
    return _Seen(np.concatenate(seen), np.concatenate(sent))


def _record_arm(method: AnyMethod, plan: Plan, seed: int, samples: int, *, canary: bool) -> np.ndarray:
    """The numbers sent by clients of one record, the first gradients behind them, or models after their sum."""
    if method.discloses_sum:
        return _aggregates(method, plan, seed, samples, canary=canary).sent
    task = canary_task(_DIMENSION, method, plan)
    clients = canary_clients(samples, range(samples) if canary else (), _DIMENSION, everywhere=True)
    one = replace(plan, records_per_client=1, largest_client=1)
    behind = _gradients_behind(method, task, clients, At(one, 1), seed, 1)
    if behind is not None:
        return behind[0].float().numpy()
    return _uploads(method, plan, seed, samples, canary=canary).sent


def _aggregates(method: AnyMethod, plan: Plan, seed: int, samples: int, *, canary: bool) -> _Seen:
    """Many models after one round, as observed by an observer: `samples / 4` rows."""
    task = canary_task(_DIMENSION, method, plan)
    count = min(plan.cohort, plan.clients)
    clients = canary_clients(count, (0,) if canary else (), _DIMENSION, everywhere=True)
    small = replace(plan, records_per_client=1, largest_client=1)
    models = _first_rounds(method, small, task, clients, seed, range(1, max(40, samples // 4) + 1))
    return _Seen(models.double().numpy(), models.float().numpy())


def _first_rounds(
    method: AnyMethod, plan: Plan, task: Task, clients: ArrayClients, seed: int, rounds: Iterable[int]
) -> Tensor:
    """The models `[n, d]` after one round from zero, with the noise of each of these rounds."""
    server = method.init_server(task.init(0), plan)
    worker = ClientWorker(task, clients, method, seed)
    ids = tuple(range(len(clients.sizes)))
    seen = []
    for number in rounds:
        at = At(plan, number)
        down = method.broadcast(at, server, ids)
        up, _ = worker.update(ids, down, {}, at)
        answered, up = method.least_noise(plan, ids, up)
        after = method.server_update(task, at, server, answered, up, ServerStreams(seed, number))
        model = method.model(after)
        seen.append(next(iter(model.values())).flatten())
    return torch.stack(seen)


def _audit_records(
    method: AnyMethod, plan: Plan, row: Guarantee, seed: int, delta: float, confidence: float
) -> Audited:
    """Audit canary records included by fair coins in one client's upload, or in the sum."""
    canaries = max(200, min(2000, 2 * plan.records_per_client))
    coins = named_stream(seed, "audit/coins")
    directions = random_canaries(canaries, _RECORD_DIMENSION, 1.0, coins)
    included = np.asarray(coins.random(canaries) < 0.5, dtype=np.bool_)
    x = directions[torch.from_numpy(included)] * _LONG
    task = canary_task(_RECORD_DIMENSION, method, plan)
    clients = ArrayClients.from_arrays([(x, torch.zeros(len(x), dtype=torch.long))])
    one = replace(plan, records_per_client=len(x), largest_client=len(x))
    at = At(one, 1)
    behind = None if method.discloses_sum else _gradients_behind(method, task, clients, at, seed)
    if method.discloses_sum:
        seen = _first_rounds(method, one, task, _and_empty(clients, plan.cohort - 1), seed, [1])[0]
        idle = canary_clients(plan.cohort, (), _DIMENSION)
        empty = replace(plan, records_per_client=1, largest_client=1)
        small = canary_task(_DIMENSION, method, plan)
        rounds = range(1, _NOISY_CLIENTS + 1)
        noises = [_first_rounds(method, empty, small, idle, seed + 1, rounds).double().numpy()]
    elif behind is not None:
        seen = behind.sum(0)[0]
        noises = _noise_behind(method, plan, seed)
    else:
        server = method.init_server(task.init(0), one)
        down = method.broadcast(at, server, (0,))
        up, _ = ClientWorker(task, clients, method, seed).update((0,), down, {}, at)
        seen = moved(method, at, up, down)[0]
        noises = [
            _uploads(method, plan, seed + 1, _NOISY_CLIENTS, canary=False, first=round_).moved
            for round_ in (1, 2)
        ]
    scores = (directions.double() @ seen.double()).numpy()
    finding = one_run(scores, included, guesses=canaries // 10, delta=delta, confidence=confidence)
    finding = _with_independence(finding, *noises)
    releases = method.releases(one)
    proven = {(r.unit, r.adversary): r.epsilon for r in account_participation(releases, one, delta)}
    return Audited("record", row.adversary, finding, proven.get(("record", row.adversary)))


def _and_empty(clients: ArrayClients, count: int) -> ArrayClients:
    """These clients, and so many others with the same number of zero records."""
    data = clients.load([0])
    silent = (torch.zeros_like(data.x[0]), torch.zeros_like(data.y[0]))
    return ArrayClients.from_arrays([(data.x[0], data.y[0]), *[silent] * count])


def _gradients_behind(
    method: AnyMethod, task: Task, clients: ArrayClients, at: At, seed: int, accesses: int | None = None
) -> Tensor | None:
    """The noisy gradients `[accesses, K, d]` behind uploads that cannot be read as models; None where they can."""
    ids = range(len(clients.sizes))
    streams = ClientStreams(seed, at.round, tuple(ids))
    return method.noisy_gradients(task, at, clients.load(ids), streams, accesses)


def _noise_behind(method: AnyMethod, plan: Plan, seed: int) -> list[np.ndarray]:
    """The noise of clients with zero gradients: of one access, of the next, and of one in another round."""
    task, clients = canary_task(_DIMENSION), canary_clients(_NOISY_CLIENTS, (), _DIMENSION)
    small = replace(plan, records_per_client=1, largest_client=1)
    drawn = []
    for number in (1, 2):
        gradients = _gradients_behind(method, task, clients, At(small, number), seed, 2)
        assert gradients is not None
        drawn.append(gradients.double().numpy())
    return [drawn[0][0], drawn[0][1], drawn[1][0]]
