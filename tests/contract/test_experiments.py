"""Every experiment that is shipped can be run: its configuration holds, and two rounds of it work.

Rows of published tables are run at their reduced scale, cut to a few examples: of the real data where they are there
(`$FEDVEIL_DATA`), else of random examples of the same shape. Rows that differ only in real numbers share one run.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil.data.dataset import Dataset, Examples
from fedveil.data.registry import load_dataset
from fedveil.errors import FedveilError
from fedveil.experiment import prepare
from fedveil.experiment.config import Config, load_config
from fedveil.experiment.estimates import Estimates, kind_of
from fedveil.experiment.records import Records
from fedveil.experiment.run import run_seed
from fedveil.experiment.tables import PAPERS, PublishedTable, Row, list_tables
from fedveil.models.registry import make_model
from fedveil.privacy.accounting import account
from fedveil.privacy.releases import Plan

ROOT = Path(__file__).parents[2] / "experiments"
TABLES = [table for paper in PAPERS for table in list_tables(ROOT, paper)]
NO_EXPERIMENTS = ("table-", "figure-")  # many rows in one file
FILES = sorted(path for path in ROOT.rglob("*.toml") if not path.name.startswith(NO_EXPERIMENTS))
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "digits": ((1, 8, 8), 10),
    "mnist": ((1, 28, 28), 10),
    "fashion-mnist": ((1, 28, 28), 10),
    "emnist-letters": ((1, 28, 28), 26),
}
EMBEDDED = ("digits",)
_EXAMPLES = 60
# Loops that two rounds need not walk to their end.
_SHORT = {
    "trajectories": 1,
    "max_steps": 1,
    "server_steps": 3,
    "image_updates": 1,
    "matching_steps": 2,
    "ipc": 1,
    "real_batches": 1,
    "epochs": 1,
    "perturbation_steps": 1,
}


def table_name(table: PublishedTable) -> str:
    return f"{table.paper} {table.name}"


def fits_its_model(config: Config) -> None:
    shape, classes = SHAPES[config.task.dataset]
    pad = config.task.data_options.get("pad_to")
    shape = shape if pad is None else (shape[0], pad, pad)
    with torch.device("meta"):
        model = make_model(config.task.model, shape, classes, **config.task.model_options)
    method = config.build_method()
    clients = config.partition.clients or 10
    plan = Plan(clients, config.run.cohort or clients, config.run.sampler, config.run.rounds, 100, 100)
    params = {name: leaf.detach() for name, leaf in model.named_parameters()}
    method.model(method.init_server(params, plan))
    assert method.releases(plan)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_configuration_holds(path: Path) -> None:
    config = load_config(path)
    if config.task.dataset in SHAPES:
        fits_its_model(config)


@pytest.mark.parametrize("table", TABLES, ids=table_name)
def test_every_row_of_a_table_holds_at_both_scales(table: PublishedTable) -> None:
    for row in table.rows:
        config = table.config(row)
        assert config.paper is not None
        assert config.paper.expected == row.published
        if config.task.dataset in SHAPES and config.task.model != "alexnet":
            fits_its_model(config)
        table.config(row, reduced=True)


@pytest.mark.parametrize("table", TABLES, ids=table_name)
def test_every_shared_field_is_one_of_some_row(table: PublishedTable) -> None:
    """A misspelt field of the base would be left out everywhere."""
    used = {key for row in table.rows for key in table.config(row).resolved()["method"]}
    shared = set(table.content.base.method)
    assert shared <= used


@pytest.mark.parametrize("table", TABLES, ids=table_name)
def test_records_of_changed_rows_are_not_used(table: PublishedTable) -> None:
    assert Records(table, ROOT / "records").stale() == []
    assert Estimates(table, ROOT / "records").stale() == []


def embedded() -> list[Path]:
    return [path for path in FILES if load_config(path).task.dataset in EMBEDDED]


@pytest.mark.parametrize("path", embedded(), ids=lambda path: str(path.relative_to(ROOT)))
def test_two_rounds_of_what_needs_no_download(path: Path, tmp_path: Path) -> None:
    config = load_config(path, ["run.rounds=2", "run.seeds=[0]", "run.workers=1"])
    result = run_seed(config, 0, experiment=path.stem, results=tmp_path)
    assert result.summary["rounds"] == 2
    assert result.accuracy is not None
    assert result.summary["data"]  # which files or sheets they were: a report shows it


@functools.cache
def few_examples(name: str, pad: int | None) -> Dataset:
    """The first examples of a data set, or random ones of its shape and classes."""
    options: dict[str, Any] = {} if pad is None else {"pad_to": pad}
    try:
        real = load_dataset(name, **options)
        assert isinstance(real, Dataset)
        train, test = real.train, real.test
        classes, mean, std = real.classes, real.mean, real.std
    except FedveilError:
        shape, count = SHAPES[name]
        shape = shape if pad is None else (shape[0], pad, pad)
        rng = torch.Generator().manual_seed(0)
        x, y = torch.rand(400, *shape, generator=rng), torch.arange(400) % count
        train = test = Examples(x, y)
        classes = tuple(str(c) for c in range(count))
        mean, std = (0.0,) * shape[0], (1.0,) * shape[0]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:_EXAMPLES]
    return Dataset(name, train.take(order), test.first(50), classes, mean, std, summary="a few examples")


def kinds(table: PublishedTable) -> list[Row]:
    """One row for each kind of run."""
    return list({kind_of(table.config(row)): row for row in reversed(table.rows)}.values())


ROWS = {
    kind_of(table.config(row, reduced=True)): (table, row)
    for table in TABLES
    if table.config(table.rows[0]).task.dataset in SHAPES
    for row in kinds(table)
}


@pytest.mark.parametrize(
    ("table", "row"), list(ROWS.values()), ids=[f"{table_name(t)} {r.name}" for t, r in ROWS.values()]
)
def test_two_rounds_of_every_kind_of_row(
    table: PublishedTable, row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = table.config(row, reduced=True)
    pad = config.task.data_options.get("pad_to")

    def load(name: str, **_: Any) -> Dataset:
        return few_examples(name, pad)

    monkeypatch.setattr(prepare, "load_dataset", load)
    prepare._load.cache_clear()
    clients = config.partition.clients
    content = config.resolved() | {"attack": []}
    content["run"] |= {"rounds": 2, "workers": 1, "transcript": False}
    content["run"] |= {"cohort": min(config.run.cohort, 4)} if config.run.cohort is not None else {}
    content["partition"] |= {"clients": min(clients, 6)} if clients is not None else {}
    content["method"] |= {key: value for key, value in _SHORT.items() if key in content["method"]}
    small = Config.model_validate(content)
    result = run_seed(small, 0, experiment="row", results=tmp_path)
    prepare._load.cache_clear()
    assert result.summary["rounds"] == 2
    assert result.accuracy is not None


def test_there_are_experiments_and_tables() -> None:
    assert embedded()
    assert {table.paper for table in TABLES} == set(PAPERS)


@pytest.mark.parametrize("dataset", ["mnist", "fashion-mnist", "cifar10"])
def test_private_rows_of_fedlap_dp_have_the_published_epsilons(dataset: str) -> None:
    table = next(t for t in TABLES if (t.paper, t.name) == ("fedlap-dp", f"table-2-{dataset}"))
    for row in table.rows:
        config = table.config(row)
        records = 10_000 if dataset == "cifar10" else 12_000
        plan = Plan(5, 5, "all", config.run.rounds, records, records)
        releases = config.build_method().releases(plan)
        psg = config.method["name"] == "psg"
        assert releases[0].accesses in ((10_000, 12_000) if psg else (200, 235))
        if (
            dataset != "cifar10" or "dp-fed" in config.method["name"]
        ):  # batches differ a little from the paper's
            continue
        for guarantee in account(releases, plan, 1e-5, "rdp"):
            assert guarantee.epsilon == pytest.approx(float(row.name.split()[-1]), abs=0.05)
