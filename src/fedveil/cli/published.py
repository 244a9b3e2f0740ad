"""A row of a published table in `fedveil run`: its configuration, comparison with the paper, and its attacks."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table as Grid

from fedveil.cli.app import notes, out
from fedveil.errors import InputError
from fedveil.experiment.config import Config, load_experiment, make_config, require_used
from fedveil.experiment.records import measurements, value_of
from fedveil.experiment.reproduce import number
from fedveil.experiment.tables import PublishedTable, Row, is_table, load_table
from fedveil.session.results import Result


@dataclass(frozen=True)
class Experiment:
    """The experiment of `fedveil run`: a configuration file, or a row of a published table."""

    config: Config
    name: str
    table: PublishedTable | None = None
    row: Row | None = None

    def measured(self, result: Result) -> float | None:
        """The run's value that is compared with the paper's."""
        assert self.config.paper is not None
        found = measurements(result)
        if self.table is not None and self.row is not None:
            return value_of(self.table, self.row, found)
        value: float | None = found.get(self.config.paper.metric)
        return value


def load_run(path: Path, changes: Sequence[str], row: str | None) -> Experiment:
    """The experiment in this file, or the row of this name if the file is a published table.

    Raises:
        InputError: A table without `row`, an unknown row, or `row` for a file that is not a table.
    """
    if not is_table(path):
        if row is not None:
            raise InputError("--row", row, f"{path} is not a published table", "Leave --row out.")
        return Experiment(load_experiment(path, changes), path.stem)
    table = load_table(path)
    found = table.selected([] if row is None else [row])
    if len(found) != 1:
        names = "; ".join(one.name for one in found)
        remedy = f"Name one: {names}. Or run them all with `fedveil reproduce {table.paper} {table.name}`."
        raise InputError("--row", row, f"{path.name} has {len(found)} such rows", remedy)
    published = table.config(found[0])
    changed = make_config(tomllib.loads(published.to_toml()), changes)
    require_used(changed.method, changes, only_changed=True)
    if changed.identity() != published.identity():  # the paper's value is for the row as published
        return Experiment(changed.model_copy(update={"paper": None}), table.experiment)
    return Experiment(changed, table.experiment, table, found[0])


def check_published_attacks(config: Config) -> None:
    """Refuse `--attacks` for rows without published attacks."""
    if config.paper is None or not config.paper.attack:
        raise InputError(
            "--attacks", True, "no attack on it is published", "Use `fedveil attack` on the result."
        )


def beside_the_paper(experiment: Experiment, results: Sequence[Result]) -> dict[str, Any] | None:
    """The paper's value and those of the runs; None if nothing is published."""
    paper = experiment.config.paper
    if paper is None:
        return None
    values = [experiment.measured(result) for result in results]
    said = {"source": paper.source, "table": paper.table, "row": paper.row, "metric": paper.metric}
    return said | {"published": paper.expected, "values": values, "published_attack": paper.attack}


def show_paper(beside: dict[str, Any], *, attacked: bool) -> None:
    """Print the paper's value, the run's, and how to run the attacks."""
    metric = beside["metric"]
    own = ", ".join(number(value, metric) for value in beside["values"] if value is not None) or "none"
    where = ", ".join(part for part in (beside["source"], beside["table"], beside["row"]) if part)
    if beside["published"] is not None:
        per_cent = " %" if metric in ("accuracy", "personal") else ""
        published = number(beside["published"], metric)
        out.print(f"{metric}: {published}{per_cent} in the paper, {own}{per_cent} here", soft_wrap=True)
    out.print(f"paper: {where}", soft_wrap=True)
    if beside["published_attack"] and not attacked:
        names = ", ".join(beside["published_attack"])
        notes.print(
            f"Attacks on it are published too ({names}): run the same command with --attacks.",
            soft_wrap=True,
        )


def attack_published(config: Config, results: Sequence[Result], data: Path | None) -> list[dict[str, Any]]:
    """The scores of the published attacks on each run."""
    from fedveil.attack_runs.published import attack_as_published

    assert config.paper is not None
    found = []
    for result in results:
        assert result.folder is not None
        with notes.status(f"attacking {result.folder}"):
            found.append(attack_as_published(result.folder, config.paper.attack, data))
    return [{name: dict(scores) for name, scores in one.items()} for one in found]


def show_attacks(published: dict[str, float], found: Sequence[dict[str, Any]]) -> None:
    """Print every score of every attack, with the paper's where published."""
    grid = Grid(title="attacks", title_justify="left")
    for column in ("attack", "score", "paper", "here"):
        grid.add_column(column, justify="left" if column in ("attack", "score") else "right")
    for name in found[0] if found else {}:
        for score in found[0][name]:
            here = ", ".join(f"{one[name][score]:.4g}" for one in found)
            expected = published.get(name if score == "accuracy" else score)
            grid.add_row(name, score, "-" if expected is None else f"{expected:.4g}", here)
    out.print(grid)
