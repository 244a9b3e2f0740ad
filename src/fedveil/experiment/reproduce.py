"""Runs the rows of published tables over the cores, and keeps the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedveil.errors import InputError
from fedveil.experiment.compare import Cell, run_cells
from fedveil.experiment.config import Config
from fedveil.experiment.records import Records
from fedveil.experiment.tables import PublishedTable, Row, readings
from fedveil.experiment.verdicts import (
    ATTACK_TOLERANCES,
    Measured,
    Verdict,
    level_reproduced,
    order_of,
    verdicts,
)
from fedveil.privacy.releases import Plan
from fedveil.session.loop import Callback
from fedveil.session.results import ResultFolder

AttackScores = Mapping[str, Mapping[str, float]]
Attacker = Callable[[Path, Mapping[str, float], Path | None], AttackScores]
"""Attacks the run in a folder as published numbers ask for, with data from another folder; scores by attack."""


@dataclass(frozen=True)
class Job:
    """Which rows of a table are run, with which seeds."""

    table: PublishedTable
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    reduced: bool = False
    on_record: frozenset[tuple[str, int]] = frozenset()
    """Rows and seeds that are not run, because records of them are enough."""

    def config(self, row: Row) -> Config:
        return self.table.config(row, reduced=self.reduced)

    def cells(self) -> dict[tuple[str, int], Cell]:
        """One run per row and seed that is to be run."""
        return {
            (row.name, seed): Cell(
                self.table.experiment, self.config(row), seed, name=f"{row.name}, seed {seed}"
            )
            for row in self.rows
            for seed in self.seeds
            if (row.name, seed) not in self.on_record
        }


@dataclass(frozen=True)
class Outcome:
    """A table after a reproduction: its rows beside the paper's, and what failed."""

    measured: tuple[Measured, ...]
    failed: Mapping[str, str]
    attacked: Mapping[str, tuple[Measured, ...]] = field(default_factory=dict)
    """The rows' attacks, by score."""


def choose(table: PublishedTable, rows: Sequence[str], seeds: int | None, *, reduced: bool) -> Job:
    """The rows that these texts select, with the first so many seeds."""
    count = table.content.table.seeds if seeds is None else seeds
    if count < 1:
        raise InputError("--seeds", count, "is no number of seeds", "Use at least 1.")
    return Job(table, tuple(table.selected(rows)), tuple(range(count)), reduced)


def only_missing(job: Job, records: Path, *, attacks: bool = True) -> Job:
    """The job without the runs that are on record, with `attacks` only if theirs are, where some are published."""
    kept = Records(job.table, records)
    known = frozenset(
        (row.name, seed)
        for row in job.rows
        for seed in job.seeds
        if kept.has(row, seed, reduced=job.reduced, attacks=attacks)
    )
    return replace(job, on_record=known)


def run_job(
    job: Job,
    results: Path,
    records: Path,
    *,
    data_dir: Path | None = None,
    jobs: int | None = None,
    callbacks_for: Callable[[str, Plan], Sequence[Callback]] = lambda _title, _plan: (),
    on_progress: Callable[[int, int], None] = lambda _rounds, _runs: None,
    attack: Attacker | None = None,
) -> Outcome:
    """Run what is not finished, and record every finished run in the folder `records`.

    `attack` attacks the finished runs of rows with published attacks; without it they are only run.
    """
    cells = job.cells()
    failed = run_cells(
        list(cells.values()),
        results,
        data_dir=data_dir,
        jobs=jobs,
        callbacks_for=callbacks_for,
        on_progress=on_progress,
    )
    rows = {row.name: row for row in job.rows}
    done = [key for key, cell in cells.items() if cell.title not in failed]
    folders = {key: cells[key].folder(results) for key in done}
    _record(job, folders, records)  # before attacks, which may take longer than the runs
    if attack is not None and not job.reduced:
        _record(job, folders, records, _attacked(rows, folders, attack, data_dir))
    kept = Records(job.table, records)
    finished = {name: [seed for row, seed in {*done, *job.on_record} if row == name] for name in rows}
    measured = [kept.measured(row, reduced=job.reduced, seeds=finished[row.name]) for row in job.rows]
    scores = tuple(
        score
        for score in ATTACK_TOLERANCES
        if any(score in row.published_attack for row in job.rows) and not job.reduced
    )
    against = {
        score: tuple(kept.attacked(row, score, seeds=finished[row.name]) for row in job.rows)
        for score in scores
    }
    return Outcome(tuple(measured), failed, against)


def _record(
    job: Job,
    folders: Mapping[tuple[str, int], Path],
    records: Path,
    attacked: Mapping[tuple[str, int], AttackScores] | None = None,
) -> None:
    """Keep what finished runs measured, and what attacks on them found."""
    rows = {row.name: row for row in job.rows}
    kept = Records(job.table, records)  # read after the runs: another process may have written meanwhile
    for (name, seed), folder in folders.items():
        found = (attacked or {}).get((name, seed))
        kept.add(rows[name], seed, ResultFolder(folder).read(), reduced=job.reduced, attacks=found)
    if folders:
        kept.write()


def _attacked(
    rows: Mapping[str, Row],
    folders: Mapping[tuple[str, int], Path],
    attack: Attacker,
    data_dir: Path | None,
) -> dict[tuple[str, int], AttackScores]:
    return {
        (name, seed): attack(folder, rows[name].published_attack, data_dir)
        for (name, seed), folder in folders.items()
        if rows[name].published_attack
    }


def open_cells(job: Job, results: Path) -> list[Cell]:
    """The runs that are not finished."""
    return [cell for cell in job.cells().values() if not ResultFolder(cell.folder(results)).finished]


def report(job: Job, done: Outcome) -> dict[str, Any]:
    """The outcome as one JSON object: its rows, and order and level of all of them and of each reading."""
    measured = done.measured
    found = verdicts(measured, job.table.content.table.tolerance)
    rows = [
        {
            "row": row.row,
            "group": row.group,
            "metric": job.table.metric(named),
            "published": row.published,
            "accuracy": list(row.values),
            "mean": row.mean,
            "interval": row.half_width,
            "verdict": found.get(row.row, "not run" if row.mean is None else None),
            "seconds": round(row.seconds, 3),
        }
        for named, row in zip(job.rows, measured, strict=True)
    ]
    return {
        "paper": job.table.paper,
        "table": job.table.name,
        "scale": "reduced" if job.reduced else "full",
        "rows": rows,
        **_judged(measured, found),
        "readings": {
            reading: _judged(
                [row for named, row in zip(job.rows, measured, strict=True) if named in of], found
            )
            for reading, of in readings(job.rows).items()
        },
        "attacks": {score: _attack_report(score, rows) for score, rows in done.attacked.items()},
    }


def _judged(measured: Sequence[Measured], found: Mapping[str, Verdict]) -> dict[str, Any]:
    """Whether these rows together have the published order and level."""
    run = [found[row.row] for row in measured if found.get(row.row, "not run") != "not run"]
    return {
        "order": order_of(measured).to_json(),
        "level_reproduced": level_reproduced(run),
        "rows_run": len(run),
        "rows_at_level": run.count("level"),
    }


def _attack_report(score: str, measured: Sequence[Measured]) -> dict[str, Any]:
    found = verdicts(measured, ATTACK_TOLERANCES[score])
    rows = [
        {
            "row": row.row,
            "published": row.published,
            "values": list(row.values),
            "mean": row.mean,
            "verdict": found[row.row],
        }
        for row in measured
        if row.published is not None
    ]
    return {"rows": rows, "order": order_of(measured).to_json()}


def counted(count: int, what: str) -> str:
    """A number of things in words."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def number(value: float | None, metric: str) -> str:
    """Accuracies in per cent, other metrics as they are; nothing for None."""
    if value is None:
        return ""
    return f"{100 * value:.2f}" if metric in ("accuracy", "personal") else f"{value:.3f}"
