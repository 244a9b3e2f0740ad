"""`fedveil run` on a published row: the paper's number beside its own, and the row's attacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedveil.cli.run  # noqa: F401  its command registers itself on the app
from fedveil.cli import app
from fedveil.cli.published import load_run
from fedveil.errors import InputError
from fedveil.experiment.tables import load_table

TABLE = """
[table]
source = "Somebody, 2020"
title = "Table 1"
[base.task]
dataset = "digits"
model = "logistic"
[base.partition]
clients = 5
[base.run]
rounds = 2
cohort = 5
[[row]]
name = "FedAvg, plain"
published = 0.9
published_attack = { basic-mia = 0.5 }
method = { name = "fedavg" }
[[row]]
name = "FedProx, plain"
published = 0.8
method = { name = "fedprox" }
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "somebody" / "table-1.toml"
    path.parent.mkdir()
    path.write_text(TABLE)
    return path


def run(table: Path, *words: str) -> Any:
    where = ["--results", str(table.parents[1] / "results")]
    return CliRunner().invoke(app, ["run", str(table), *words, *where], catch_exceptions=False)


def test_a_row_shows_the_papers_number_beside_its_own(table: Path) -> None:
    done = run(table, "--row", "fedprox")
    assert done.exit_code == 0, done.output
    assert "accuracy: 80.00 % in the paper, " in done.stdout
    assert "Somebody, 2020, Table 1, FedProx, plain" in done.stdout
    assert "--attacks" not in done.output, "none are published"


def test_the_attacks_of_a_row_are_listed_and_run_on_request(table: Path) -> None:
    assert "the same command with --attacks" in run(table, "--row", "fedavg").output
    answer = json.loads(run(table, "--row", "fedavg", "--attacks", "--json").stdout)
    assert answer["paper"]["published"] == 0.9
    assert answer["paper"]["values"] == [pytest.approx(answer["accuracy"], abs=1e-6)]
    assert 0 <= answer["attacks"]["basic-mia"]["accuracy"] <= 1
    shown = run(table, "--row", "fedavg", "--attacks").stdout
    assert "basic-mia" in shown
    assert "0.5" in shown


def test_a_row_is_the_run_that_reproduce_makes(table: Path) -> None:
    published = load_table(table)
    found = load_run(table, [], "FedAvg, plain")
    assert found.config.identity() == published.config(published.rows[0]).identity()
    assert found.name == published.experiment


def test_a_changed_row_is_no_longer_the_papers(table: Path) -> None:
    assert load_run(table, ["run.rounds=1"], "fedprox").config.paper is None
    assert load_run(table, ["run.workers=1"], "fedprox").config.paper is not None


@pytest.mark.parametrize(
    ("words", "field"),
    [([], "--row"), (["--row", "plain"], "--row"), (["--row", "fedprox", "--attacks"], "--attacks")],
)
def test_an_unclear_row_or_attack_is_refused_before_anything_runs(
    table: Path, words: list[str], field: str
) -> None:
    with pytest.raises(InputError) as refused:
        run(table, *words)
    assert refused.value.field == field
    assert not (table.parents[1] / "results").exists()


def test_a_row_of_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('[method]\nname = "fedavg"\n')
    with pytest.raises(InputError) as refused:
        run(tmp_path / "own.toml", "--row", "x")
    assert refused.value.field == "--row"
