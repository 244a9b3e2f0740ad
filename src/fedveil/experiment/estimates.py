"""How long runs of published tables take: measured in processor time, and kept beside the records.

A machine that does other work counts less than one that does nothing, so the time of a round is the processor time of
its process with one thread. `fedveil reproduce PAPER TABLE --estimate` keeps what it measured in
`records/estimates/PAPER/TABLE.json`, and the list of tables and the documentation's pages say from it what rows cost
that were not run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fedveil.atomic_files import write_atomically
from fedveil.engines.simulation import cores
from fedveil.errors import FedveilError, ResultError
from fedveil.experiment.compare import Cell
from fedveil.experiment.config import Config
from fedveil.experiment.records import Records
from fedveil.experiment.run import run_seed
from fedveil.experiment.tables import PublishedTable, Row
from fedveil.plugins import load_plugins
from fedveil.session.loop import Callback, RoundEnd

_ROUNDS = 3  # measured at most; the first one also warms up
LIMIT = 60.0  # seconds of processor time that the rounds of a measurement may take
LIMIT_BEFORE_RUNS = 15.0  # the same, where the runs themselves follow
_LOOK_EVERY = 0.2


@dataclass(frozen=True)
class Estimate:
    """How long a row's run takes on one core."""

    seconds: float
    lower_bound: bool = False
    """Not one round ended within the measurement's limit."""


class Estimates:
    """The measured times of one table's rows that are kept beside its records."""

    def __init__(self, table: PublishedTable, records: Path) -> None:
        self.table = table
        self.path = records / "estimates" / table.paper / f"{table.name}.json"
        self._content = _read(self.path) if self.path.exists() else {}

    def of(self, row: Row) -> Estimate | None:
        """What was measured for the row as it stands."""
        entry = self._content.get(row.name)
        if entry is None or entry["config"] != self.table.config(row).identity():
            return None
        return Estimate(entry["seconds"], entry["at_least"])

    def add(self, row: Row, found: Estimate) -> None:
        """Keep a measurement; a lower bound does not replace a measured time."""
        known = self.of(row)
        if (
            found.lower_bound
            and known is not None
            and (not known.lower_bound or known.seconds > found.seconds)
        ):
            return
        self._content[row.name] = {
            "config": self.table.config(row).identity(),
            "seconds": float(f"{found.seconds:.3g}"),
            "at_least": found.lower_bound,
        }

    def stale(self) -> list[str]:
        """Rows with an estimate that the table no longer has as they were."""
        rows = {row.name: row for row in self.table.rows}
        return [name for name in self._content if name not in rows or self.of(rows[name]) is None]

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = {row.name: self._content[row.name] for row in self.table.rows if row.name in self._content}
        write_atomically(self.path, (json.dumps({"rows": rows}, indent=1) + "\n").encode())


@dataclass(frozen=True)
class Cost:
    """What one seed of some rows takes on one core, as far as it is known."""

    seconds: float
    rows: int
    known: int
    """Of how many rows that were run or measured this is the average."""
    lower_bound: bool

    def in_words(self) -> str:
        if not self.rows:
            return ""
        if not self.known:
            return "not measured"
        rough = "more than " if self.lower_bound else "about "
        return rough + duration(self.seconds)


def together(costs: Sequence[Cost]) -> Cost:
    """The costs of several tables; one of which nothing is known makes the sum a lower bound."""
    bound = any(one.lower_bound or (one.rows and not one.known) for one in costs)
    return Cost(
        sum(one.seconds for one in costs),
        sum(one.rows for one in costs),
        sum(one.known for one in costs),
        bound,
    )


def cost(
    table: PublishedTable, rows: Sequence[Row], records: Path, *, like: Sequence[Row] | None = None
) -> Cost:
    """Of these rows: by their estimates, else by their runs on record.

    A round of a row of which neither is known is taken to cost what one of the known rows with its data and model does
    on average, or of those of `like`. Where there is none, the sum is a lower bound.
    """
    times = times_on_record(table, rows, records)
    others = () if times else like or ()
    usual = times or times_on_record(table, others, records)
    a_round: dict[str, list[float]] = {}
    for row in (*rows, *others):
        if row.name in usual:
            config = table.config(row)
            a_round.setdefault(_task(config), []).append(usual[row.name].seconds / config.run.rounds)
    seconds, unknown = 0.0, 0
    for row in rows:
        config = table.config(row)
        rate = a_round.get(_task(config))
        if row.name in times:
            seconds += times[row.name].seconds
        elif rate is not None:
            seconds += fmean(rate) * config.run.rounds
        else:
            unknown += 1
    bound = any(one.lower_bound for one in usual.values()) or 0 < unknown < len(rows)
    return Cost(seconds, len(rows), 0 if unknown == len(rows) else len(usual), bound)


def _task(config: Config) -> str:
    return config.task.model_dump_json()


def times_on_record(table: PublishedTable, rows: Sequence[Row], records: Path) -> dict[str, Estimate]:
    """What one seed of each of these rows takes, by name: by its estimate, else by its runs; none if unknown."""
    kept, estimates = Records(table, records), Estimates(table, records)
    found = {}
    for row in rows:
        measured, estimated = kept.measured(row), estimates.of(row)
        if estimated is not None:
            found[row.name] = estimated
        elif measured.values:
            found[row.name] = Estimate(measured.seconds / len(measured.values))
    return found


def estimate(
    cells: Sequence[Cell], data_dir: Path | None = None, *, limit: float = LIMIT
) -> dict[str, Estimate]:
    """How long each run takes, by title, from measured rounds; runs of one kind share a measurement."""
    known: dict[str, tuple[float, ...]] = {}
    found = {}
    for cell in cells:
        kind = kind_of(cell.config)
        if kind not in known:
            known[kind] = measure(cell.config, data_dir, limit=limit)
        found[cell.title] = _whole_run(known[kind], cell.config.run.rounds, limit)
    return found


def _whole_run(seconds: Sequence[float], rounds: int, limit: float) -> Estimate:
    """So many rounds like the first, which warms up, and the next ones."""
    if not seconds:
        return Estimate(limit * rounds, lower_bound=True)
    return Estimate(seconds[0] + (rounds - 1) * median(seconds[1:] or seconds))


def wall_time(estimates: Sequence[Estimate], jobs: int | None = None) -> float:
    """Seconds until runs of these lengths are done over so many processes."""
    count = max(1, min(jobs or cores(), len(estimates)))
    longest = max((one.seconds for one in estimates), default=0.0)
    return max(longest, sum(one.seconds for one in estimates) / count)


def measure(config: Config, data_dir: Path | None = None, *, limit: float = LIMIT) -> tuple[float, ...]:
    """Processor seconds of the first rounds, in a process that ends itself after `limit` seconds of them."""
    rounds = min(_ROUNDS, config.run.rounds)
    short = config.model_copy(update={"run": config.run.model_copy(update={"rounds": rounds, "workers": 1})})
    with tempfile.TemporaryDirectory() as place:
        process = multiprocessing.get_context("spawn").Process(
            target=_measure_elsewhere, args=(short, Path(place), data_dir, limit), daemon=True
        )
        process.start()
        process.join()
        problem, times = Path(place) / "problem", Path(place) / "times"
        if problem.exists():
            raise FedveilError(problem.read_text())
        return tuple(float(line) for line in times.read_text().split()) if times.exists() else ()


class _ProcessorTimes(Callback):
    """Writes the processor time of every round, evaluation included, and ends the process at its limit."""

    def __init__(self, path: Path, limit: float) -> None:
        self.path, self.limit = path, limit
        self.last: float | None = None

    def round_starts(self, at: object, cohort: Sequence[int]) -> None:
        if self.last is None:
            self.last = time.process_time()
            threading.Thread(target=self._watch, args=(self.last + self.limit,), daemon=True).start()

    def round_ends(self, end: RoundEnd) -> None:
        assert self.last is not None
        now = time.process_time()
        with self.path.open("a") as file:
            file.write(f"{now - self.last}\n")
        self.last = now

    def _watch(self, end: float) -> None:
        while time.process_time() < end:
            time.sleep(_LOOK_EVERY)
        os._exit(0)


def _measure_elsewhere(config: Config, place: Path, data_dir: Path | None, limit: float) -> None:
    """In a process of its own: one thread, as a run over the cores has."""
    import torch

    torch.set_num_threads(1)
    load_plugins(())
    times = _ProcessorTimes(place / "times", limit)
    try:
        run_seed(
            config,
            0,
            experiment="measured",
            results=place,
            data_dir=data_dir,
            callbacks_for=lambda _plan: [times],
        )
    except FedveilError as error:
        (place / "problem").write_text(str(error))


def kind_of(config: Config) -> str:
    """What the time of a round depends on: everything but real numbers, which change no shape and no loop."""
    content = config.resolved()
    content.pop("paper", None)
    content.pop("attack", None)
    content["run"].pop("rounds")
    return json.dumps(_without_reals(content), sort_keys=True)


def _without_reals(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_reals(item) for key, item in value.items() if not isinstance(item, float)}
    if isinstance(value, list):
        return [_without_reals(item) for item in value]
    return value


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} minutes"
    hours = seconds / 3600
    return f"{hours:.1f} hours" if hours < 10 else f"{hours:.0f} hours"


def _read(path: Path) -> dict[str, Mapping[str, Any]]:
    try:
        rows: dict[str, Mapping[str, Any]] = json.loads(path.read_text())["rows"]
        if not all({"config", "seconds", "at_least"} == set(entry) for entry in rows.values()):
            raise ValueError("an estimate without its fields")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultError(
            f"{path} is damaged: {error}. Restore it from a copy, or remove it.",
            field="estimates",
            value=str(path),
        ) from error
    return rows
