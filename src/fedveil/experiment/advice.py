"""Advice for a plan, without data: the noise, its size relative to the signal, and suitable methods.

Symbols: K the cohort, N `clients`, d the number of parameters, C the clip, sigma the noise multiplier, q the rate of
records in a batch, n the records of a client. The signal of a round is at most K C for clients and K q n C for records;
the noise of the sum has norm sigma C sqrt(d), or sigma C sqrt(K d) where each client adds its own.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from fedveil.data.registry import list_datasets
from fedveil.errors import InputError
from fedveil.experiment.config import Config, build_method
from fedveil.experiment.prepare import model_bytes, model_shape
from fedveil.experiment.target import calibrated, with_noise
from fedveil.methods.method import field_names
from fedveil.models.registry import model_entry
from fedveil.privacy.releases import ADVERSARIES, Adversary, Plan, Unit
from fedveil.session.privacy_guard import unit_of

EPSILONS = (1.0, 3.0, 8.0)
_SILOS = 50  # up to so many clients are assumed to be silos, whose records are to be protected
_FEWEST = 3  # clients of a secure sum that hides anything
_FLOAT = torch.finfo(torch.float32).bits // 8


@dataclass(frozen=True)
class Suggestion:
    """A suggested method with its aggregation, initial values and reason."""

    method: str
    aggregation: str
    why: str
    start: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"method": self.method, "aggregation": self.aggregation, "why": self.why, "start": self.start}


def advice(config: Config, plan: Plan, records: int | None) -> dict[str, Any]:
    """The content of `fedveil advise`, for a configuration whose clients declare `records` records each."""
    size = parameter_count(config)
    rows = []
    if "noise_multiplier" in field_names(build_method(config.method)):
        unit = config.privacy.target_unit or unit_of(with_noise(config, 1.0), plan)
        rows = [
            _row(config, plan, who, unit, target, size, records) for who in ADVERSARIES for target in EPSILONS
        ]
    return {
        "clients": plan.clients,
        "cohort": plan.cohort,
        "sampler": plan.sampler,
        "rounds": plan.rounds,
        "records_per_client": records,
        "parameters": size,
        "delta": config.privacy.delta,
        "noise": rows,
        "suggested": [
            found.to_json() for found in suggestions(plan, size, records, images=_reads_images(config))
        ],
    }


def parameter_count(config: Config) -> int | None:
    """The number of parameters of the model, from the published shape of its data; None if unknown."""
    known = _published_shape(config)
    if known is None or model_entry(config.task.model).reads != "numbers":
        return None
    shape, classes = known
    return model_bytes(config, model_shape(config, shape), classes) // _FLOAT


def _published_shape(config: Config) -> tuple[list[int], int] | None:
    """The shape of an example and the number of classes, as declared or as the data set is described."""
    task = config.task
    if task.input_shape is not None and task.classes is not None:
        return list(task.input_shape), task.classes
    facts = next((known.summary for known in list_datasets() if known.name == task.dataset), "")
    found = re.search(r"(\d+)x(\d+)x(\d+), (\d+) classes", facts)
    if found is None:
        return None
    *shape, classes = (int(number) for number in found.groups())
    return shape, classes


def _reads_images(config: Config) -> bool:
    known = _published_shape(config)
    return config.task.features is not None or (known is not None and len(known[0]) == 3)


def _row(
    config: Config,
    plan: Plan,
    adversary: Adversary,
    unit: Unit,
    target: float,
    size: int | None,
    records: int | None,
) -> dict[str, Any]:
    row: dict[str, Any] = {"adversary": adversary, "unit": unit, "epsilon": target}
    try:
        sigma = calibrated(config, plan, target, adversary, unit).noise_multiplier
    except InputError as error:
        return row | {"noise_multiplier": None, "signal_to_noise": None, "why": error.problem}
    return row | {
        "noise_multiplier": sigma,
        "signal_to_noise": _signal_to_noise(config, plan, unit, sigma, size, records),
        "why": None,
    }


def _signal_to_noise(
    config: Config, plan: Plan, unit: Unit, sigma: float, size: int | None, records: int | None
) -> float | None:
    """The largest norm of the sum divided by the norm of its noise."""
    method = build_method(config.method)
    own = unit == "record" or getattr(method, "noise_scope", "shared") == "local"
    own = own and config.aggregation.kind == "plain"  # the clients of a secure sum share its noise
    signal: float = plan.cohort
    if unit == "record":
        if records is None:
            return None
        signal *= getattr(method, "record_rate", 1.0) * records
    if size is None:
        return None
    return signal / (sigma * math.sqrt(size * (plan.cohort if own else 1)))


def suggestions(
    plan: Plan, size: int | None, records: int | None, *, images: bool = True
) -> list[Suggestion]:
    """Methods for a federation of this size, against the server and against observers."""
    on = " on features without data" if images else ""
    small = f"a linear model{on}: fewer parameters, less noise"
    if plan.clients <= _SILOS:
        return _for_silos(plan, records, small)
    cohort = max(10, plan.clients // 10)
    start = {"clip": 1.0, "normalise": True, "lr": 20.0, "local_steps": 20, "batch_size": 100_000}
    needed = (
        ""
        if size is None
        else f" A sum of {cohort} updates stands against noise of norm sigma C sqrt({size})."
    )
    return [
        Suggestion(
            "udp-fedavg",
            "shared noise, a trusted server or secure aggregation",
            f"Against observers a secret Poisson cohort of {cohort} of {plan.clients} amplifies "
            f"privacy; {small}.{needed}",
            start | {"server_lr": 0.5, "rounds": 300, "cohort": cohort, "sampler": "poisson"},
        ),
        Suggestion(
            "udp-fedavg",
            'secure aggregation of all clients (aggregation.kind = "secure")',
            "Against the server, to which participation is visible, sampling does not amplify privacy: the sum of all "
            "clients in few rounds has the best signal to noise. Without secure aggregation every client must add all "
            'of the noise (noise_scope = "local").',
            start | {"server_lr": 3.0, "rounds": 20, "cohort": plan.clients, "sampler": "all"},
        ),
    ]


def _for_silos(plan: Plan, records: int | None, small: str) -> list[Suggestion]:
    """DP-FedSGD with the noise of each silo or with one noise of all."""
    rate = 0.1 if records is None or records >= 1 / 0.1 else 1.0  # a batch has at least one record on average
    batch = "" if records is None else f", about {rate * records:.0f} records of each silo"
    start: dict[str, Any] = {"clip": 0.3, "lr": 30.0, "momentum": 0.9, "record_rate": rate, "rounds": 100}
    start |= {"cohort": plan.clients, "sampler": "all"}
    own = Suggestion(
        "dp-fedsgd",
        "each silo's own noise",
        f"{plan.clients} clients are silos: each protects its records itself, against the server too. One large batch "
        f"per round{batch}, and all silos in every round; {small}.",
        start,
    )
    if plan.clients < _FEWEST:
        return [own]
    shared = Suggestion(
        "dp-fedsgd",
        'secure aggregation of all silos (aggregation.kind = "secure")',
        f"Where the silos can be online together they share one noise: its variance in the sum is 1/{plan.clients} of "
        "that of separate noises. The guarantee then needs a bound on the silos that collude with the server.",
        start,
    )
    return [own, shared]
