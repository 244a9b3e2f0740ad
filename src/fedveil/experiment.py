"""From a configuration to a run: data, partition, model, method, one run per seed."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil.api import make_plan, run
from fedveil.config import Config
from fedveil.data.client_data import ArrayClients, Clients
from fedveil.data.dataset import Dataset, TextDataset
from fedveil.data.registry import load_dataset
from fedveil.errors import InputError
from fedveil.guard import PrivacySettings
from fedveil.methods.method import AnyMethod
from fedveil.models.registry import make_model
from fedveil.partition.partition import Partition
from fedveil.partition.registry import make_partition
from fedveil.privacy.releases import Plan
from fedveil.report.leave import pictures_of
from fedveil.results import Result
from fedveil.run import Observer
from fedveil.streams import named_stream
from fedveil.task import Task


@dataclass(frozen=True)
class Prepared:
    """Everything a seed's run needs, loaded and checked."""

    task: Task
    dataset: Dataset
    partition: Partition
    clients: Clients
    local_test: Clients | None
    plan: Plan
    method: AnyMethod


def load_image_or_table(config: Config, data_dir: Path | None) -> Dataset:
    options = json.dumps(config.task.data_options, sort_keys=True)
    dataset = _load(config.task.dataset, data_dir, os.environ.get("FEDVEIL_DATA"), options)
    if not isinstance(dataset, Dataset):
        raise InputError(
            "task.dataset",
            config.task.dataset,
            "is text, which no shipped model reads yet",
            "Choose an image or table dataset: see `fedveil list datasets`.",
        )
    return dataset


@functools.lru_cache(maxsize=1)
def _load(name: str, data_dir: Path | None, _environment: str | None, options: str) -> Dataset | TextDataset:
    """The seeds of an experiment share one copy of their data."""
    return load_dataset(name, data_dir=data_dir, **json.loads(options))


def split_clients(config: Config, dataset: Dataset, seed: int) -> Partition:
    """The share of each client, from the seed's own stream."""
    section = config.partition
    clients = section.clients
    if clients is None and section.kind not in ("user",) and section.groups is None:
        clients = 10
    return make_partition(
        section.kind,
        dataset.train.y,
        clients,
        named_stream(seed, "partition"),
        alpha=1.0 if section.kind == "dirichlet" and section.alpha is None else section.alpha,
        classes_per_client=section.classes_per_client,
        shards_per_client=section.shards_per_client,
        groups=section.groups,
        users=dataset.train.users,
        min_size=section.min_size,
        allow_empty=section.allow_empty,
    )


def prepare(config: Config, seed: int, data_dir: Path | None = None) -> Prepared:
    """Load and check everything; nothing is written."""
    device = _device(config.run.device)
    dataset = load_image_or_table(config, data_dir)
    partition = split_clients(config, dataset, seed)
    parts, held = _hold_out(partition.parts, config.partition.holdout, seed)
    x, y = dataset.train.x, dataset.train.y
    clients = ArrayClients(x, y, parts)
    local_test = ArrayClients(x, y, held) if held else None

    # Not a closure over the data set: attacks are given the task, and nothing private may be reached from it.
    build = functools.partial(
        make_model, config.task.model, dataset.input_shape, dataset.num_classes, **config.task.model_options
    )
    plan = make_plan(clients, rounds=config.run.rounds, cohort=config.run.cohort, sampler=config.run.sampler)
    method = config.build_method()
    return Prepared(Task(build, device=device), dataset, partition, clients, local_test, plan, method)


def run_seed(
    config: Config,
    seed: int,
    *,
    experiment: str,
    results: Path,
    data_dir: Path | None = None,
    observe: Callable[[Plan], Sequence[Observer]] = lambda _plan: (),
) -> Result:
    """One seed of an experiment, in `results/<experiment>/<config hash>/seed-<seed>`.

    A method that has pictures to show leaves them there too, for the report.
    """
    prepared = prepare(config, seed, data_dir)
    folder = result_folder(config, seed, experiment, results)
    pictures = pictures_of(prepared.method, prepared.plan, prepared.dataset, folder)
    section = config.privacy
    facts: dict[str, Any] = {
        "experiment": experiment,
        "dataset": prepared.dataset.name,
        "model": config.task.model,
        "classes": list(prepared.dataset.classes),
        "partition": prepared.partition.counts(
            prepared.dataset.train.y, prepared.dataset.num_classes
        ).tolist(),
        "paper": None if config.paper is None else config.paper.model_dump(),
    }
    return run(
        prepared.task,
        prepared.clients,
        prepared.method,
        rounds=config.run.rounds,
        cohort=prepared.plan.cohort,
        sampler=config.run.sampler,
        seed=seed,
        test=prepared.dataset.test,
        local_test=prepared.local_test,
        classes=prepared.dataset.num_classes,
        privacy=PrivacySettings(
            section.delta,
            section.budget,
            section.budget_adversary,
            section.budget_unit,
            None if section.ledger is None else Path(section.ledger),
        ),
        results=folder,
        config=config.to_toml(),
        facts=facts,
        evaluate_every=config.run.evaluate_every,
        checkpoint_every=config.run.checkpoint_every,
        transcript=config.run.transcript,
        min_clients=config.run.min_clients,
        transcript_exchanges=config.run.transcript_exchanges,
        execution=config.run.execution,
        workers=config.run.workers,
        max_memory=config.run.max_memory,
        observers=[*pictures, *observe(prepared.plan)],
    )


def result_folder(config: Config, seed: int, experiment: str, results: Path) -> Path:
    return results / experiment / config.identity() / f"seed-{seed}"


def _hold_out(parts: Sequence[Tensor], fraction: float, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Each client's training share, and the share kept for its own test (empty list for fraction 0)."""
    if fraction == 0:
        return list(parts), []
    kept: list[Tensor] = []
    held: list[Tensor] = []
    for client, part in enumerate(parts):
        order = torch.from_numpy(named_stream(seed, "holdout", client).permutation(len(part)))
        count = int(len(part) * fraction)
        held.append(part[order[:count]])
        kept.append(part[order[count:]])
    return kept, held


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError("run.device", name, "is not a device", 'Use "cpu" or "cuda".') from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("run.device", name, "this machine has no CUDA device", 'Use "cpu".')
    return device
