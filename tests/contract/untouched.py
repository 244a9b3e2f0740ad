"""Audits of DP-FedAGS, which leaves part of an upload as it is: the auditor looks for values without noise.

The canary audits of `fedveil audit` look for a shift under noise. A mechanism that lets a coordinate through now
and then has a plainer flaw: the exact value comes back. Both audits here fix their rule beforehand, so their
bounds hold with the stated confidence for any mechanism; against one that noises everything they find nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from fedveil.audits.canaries import clopper_pearson_upper
from fedveil.audits.findings import AuditFinding
from fedveil.audits.of_method import canary_clients, canary_task, moved
from fedveil.audits.one_run import one_run
from fedveil.data.client_data import ArrayClients
from fedveil.engines.worker import ClientWorker
from fedveil.errors import InputError
from fedveil.methods.method import AnyMethod, At
from fedveil.privacy.releases import Plan
from fedveil.streams import named_stream

_DIMENSION = 16
_PER_CALL = 2000
_NEAR = 1e-5  # relative to the clip: clipping shortens by up to a millionth


def audit_event(
    with_canary: int, without_canary: int, samples: int, *, delta: float, confidence: float, kind: str
) -> AuditFinding:
    """The bound from how often an event, fixed beforehand, was seen in `samples` releases of each arm.

    (epsilon, delta)-DP demands P[with] <= e^eps P[without] + delta; each rate's interval takes half the error.
    """
    if not (0 <= max(with_canary, without_canary) <= samples and 0 < confidence < 1 and 0 <= delta < 1):
        raise InputError("samples", samples, "do not match the events", "Count events among the samples.")
    each = 1 - (1 - confidence) / 2
    least = 1 - clopper_pearson_upper(samples - with_canary, samples, each) - delta
    most = clopper_pearson_upper(without_canary, samples, each)
    bound = max(0.0, math.log(least / most)) if least > 0 else 0.0
    return AuditFinding(kind, bound, confidence, 2 * samples, delta)


def audit_untouched_client(
    method: AnyMethod,
    plan: Plan,
    *,
    delta: float,
    seed: int = 0,
    samples: int = 20_000,
    confidence: float = 0.99,
) -> AuditFinding:
    """Canary clients: does the canary's clipped coordinate come back without noise?

    The event is a coordinate within 1e-5 of the method's `clip`, where the canary's own clipped value lies.
    """
    clip, lr = float(getattr(method, "clip", 1.0)), float(getattr(method, "lr", 1.0))
    counts = []
    task = canary_task(_DIMENSION)
    for arm in (0, 1):
        events = 0
        for start in range(0, samples, _PER_CALL):
            count = min(_PER_CALL, samples - start)
            clients = canary_clients(count, range(count) if arm == 0 else (), _DIMENSION)
            wide = replace(plan, records_per_client=1, largest_client=1)
            at = At(wide, 1 + start // _PER_CALL)
            server = method.init_server(task.init(0), wide)
            down = method.broadcast(at, server, range(plan.cohort)).rows([0])
            up, _ = ClientWorker(task, clients, method, seed + arm).update(range(count), down, {}, at)
            seen = moved(method, at, up, down)[:, 0].double().abs() / lr
            events += int(((seen - clip).abs() <= _NEAR * clip).sum())
        counts.append(events)
    return audit_event(
        counts[0],
        counts[1],
        samples,
        delta=delta,
        confidence=confidence,
        kind="canary clients, untouched values",
    )


def audit_untouched_records(
    method: AnyMethod,
    plan: Plan,
    *,
    delta: float,
    seed: int = 0,
    canaries: int = 1000,
    guesses: int = 400,
    confidence: float = 0.99,
) -> AuditFinding:
    """One upload of one client: canary records, in or out by fair coins, each on a coordinate of its own.

    With about half of the records in, clipping leaves each of them C / sqrt(canaries / 2). A coordinate within a
    fifth of that means "in", one that is exactly zero "out"; all others are noise and say nothing.
    """
    included = np.asarray(named_stream(seed, "audit/coins").random(canaries) < 0.5, dtype=np.bool_)
    places = np.flatnonzero(included)
    x = torch.zeros(len(places), canaries)
    x[torch.arange(len(places)), torch.from_numpy(places)] = 1e4
    task = canary_task(canaries)
    clients = ArrayClients.from_arrays([(x, torch.zeros(len(x), dtype=torch.long))])
    one = replace(plan, records_per_client=len(x), largest_client=len(x))
    at = At(one, 1)
    down = method.broadcast(at, method.init_server(task.init(0), one), (0,))
    up, _ = ClientWorker(task, clients, method, seed).update((0,), down, {}, at)
    lr = float(getattr(method, "lr", 1.0))
    seen = moved(method, at, up, down)[0].double().abs().numpy() / lr
    expected = float(getattr(method, "clip", 1.0)) / math.sqrt(canaries / 2)
    scores = np.where(seen == 0, -1.0, np.where(np.abs(seen - expected) <= expected / 5, 1.0, 0.0))
    return one_run(scores, included, guesses=guesses, delta=delta, confidence=confidence)
