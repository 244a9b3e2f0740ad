"""Several methods and settings on the same task: the list of runs, and their execution over the cores.

A cell is one configuration with one seed. Finished cells are not run again and unfinished ones resume, so the same
command can be repeated.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from fedveil.engines.simulation import cores
from fedveil.errors import FedveilError, InputError
from fedveil.experiment.config import Config, load_config, load_experiment
from fedveil.experiment.prepare import result_folder
from fedveil.experiment.run import run_seed
from fedveil.experiment.target import method_of
from fedveil.methods import METHODS
from fedveil.methods.method import current_numerics, field_names
from fedveil.numerics import numerics_of
from fedveil.plugins import load_plugins
from fedveil.privacy.accounting import Guarantee, Rounds, rounds_of
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.releases import Plan
from fedveil.privacy.selection import composed
from fedveil.privacy.statement import show
from fedveil.session.loop import Callback, CallbacksFor
from fedveil.session.privacy_guard import declared
from fedveil.session.results import ResultFolder

_AGAINST = {"server": "the server", "observer": "an observer", "client": "another client"}
_LOOK_EVERY = 0.5  # seconds between two progress checks of the processes


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    experiment: str
    config: Config
    seed: int
    name: str | None = None

    def folder(self, results: Path) -> Path:
        return result_folder(self.config, self.seed, self.experiment, results)

    @property
    def title(self) -> str:
        secure = " secure" if self.config.aggregation.kind == "secure" else ""
        return self.name or f"{self.config.method['name']}{secure} seed {self.seed}"


def plan_cells(
    paths: Sequence[Path],
    *,
    methods: Sequence[str] = (),
    changes: Sequence[str] = (),
    grid: Sequence[str] = (),
    seeds: Sequence[int] = (),
    also: Sequence[Path] = (),
) -> list[Cell]:
    """All runs of a comparison, without duplicates, checked before the first starts.

    Without `methods` each file's own method is run. A change or a grid axis of a method's field applies to the methods
    that have it; a field that none has is refused. The files of `also` are run with their own methods, as part of the
    first file's experiment.
    """
    axes = [_axis(text) for text in grid]
    cells: dict[tuple[str, str, int], Cell] = {}
    for path in paths:
        names = list(methods) or [str(load_config(path).method["name"])]
        _require_known_fields(names, [*changes, *(f"{key}={','.join(values)}" for key, values in axes)])
        for name in names:
            for values in product(*(options for _, options in axes)):
                chosen = [f"{key}={value}" for (key, _), value in zip(axes, values, strict=True)]
                fitting = [change for change in (*changes, *chosen) if _applies(change, name)]
                config = load_experiment(path, [f"method.name={name}", *fitting])
                for seed in seeds or config.run.seeds:
                    cell = Cell(path.stem, config, seed)
                    cells.setdefault((cell.experiment, config.identity(), seed), cell)
    for path in also:
        own = str(load_config(path).method["name"])
        config = load_experiment(path, [change for change in changes if _applies(change, own)])
        for seed in seeds or config.run.seeds:
            cell = Cell(paths[0].stem, config, seed)
            cells.setdefault((cell.experiment, config.identity(), seed), cell)
    return list(cells.values())


def run_cells(
    cells: Sequence[Cell],
    results: Path,
    *,
    data_dir: Path | None = None,
    jobs: int | None = None,
    callbacks_for: Callable[[str, Plan], Sequence[Callback]] = lambda _title, _plan: (),
    on_progress: Callable[[int, int], None] = lambda _rounds, _runs: None,
) -> dict[str, str]:
    """Run the unfinished cells; returns the reasons of failed ones by title. A failure does not stop the others.

    With more than one job each run has a separate process and one worker. `callbacks_for` makes the callbacks of runs
    in this process; `on_progress` is called with the numbers of rounds and runs finished in other processes.
    """
    open_cells = [cell for cell in cells if not _settled(cell, results)]
    count = min(jobs or cores(), len(open_cells))
    failed: dict[str, str] = {}
    if count <= 1:
        for cell in open_cells:
            try:
                _run(cell, results, data_dir, partial(callbacks_for, cell.title))
            except FedveilError as error:
                failed[cell.title] = str(error)
        return failed
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin)
    try:
        waiting = {pool.submit(_run_elsewhere, cell, results, data_dir): cell for cell in open_cells}
        for future in _as_they_end(waiting, lambda: on_progress(*_progress(cells, results))):
            if (problem := future.result()) is not None:
                failed[waiting[future].title] = problem
    except BrokenProcessPool as error:
        raise FedveilError(
            "the process of a run ended unexpectedly, perhaps for lack of memory, and the others with it. "
            "Give the same command again with fewer --jobs: it resumes from here.",
            field="--jobs",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
    return failed


def _settled(cell: Cell, results: Path) -> bool:
    """Whether a cell is finished and needs no check: the user's own data files may have changed since, and a run of
    other numerics must be refused."""
    folder = ResultFolder(cell.folder(results))
    same = numerics_of(folder.path) == current_numerics(cell.config.method["name"])
    return folder.finished and same and "path" not in cell.config.task.data_options


_SAME_NOISE = (
    "runs of one seed draw the same noise, which cancels in their difference, whoever knows the seed or not"
)


@dataclass(frozen=True)
class Composition:
    """The guarantee of several private runs on the same data together, which bounds a choice between them.

    Attributes:
        dataset: The data.
        runs: The number of runs.
        composed: The guarantee of runs with noise of their own.
        same_noise: Whether two runs have seeded noise of the same seed; then nothing is proven.
    """

    dataset: str
    runs: int
    composed: tuple[Guarantee, ...]
    same_noise: bool = False

    @property
    def proven(self) -> tuple[Guarantee, ...]:
        if not self.same_noise:
            return self.composed
        return tuple(replace(r, epsilon=None, theorem="none", reason=_SAME_NOISE) for r in self.composed)

    def in_words(self) -> str:
        rows = [
            f"epsilon {show(row.epsilon)} for a {row.unit} against {_AGAINST[row.adversary]}"
            for row in self.composed
            if row.epsilon is not None
        ]
        delta = f" (delta {self.composed[0].delta:g})" if rows else ""
        found = f"{'; '.join(rows) or 'nothing'}{delta}"
        if self.same_noise:
            found = f'nothing: {_SAME_NOISE}. With run.noise = "entropy" they would prove {found}'
        return (
            "Choosing the best of these runs costs privacy: the choice depends on all of them. Together the "
            f"{self.runs} private runs on {self.dataset} prove {found}. "
            "fedveil compare --private-selection chooses at a smaller epsilon."
        )

    def to_json(self) -> dict[str, Any]:
        proven, own = ([row.to_json() for row in rows] for rows in (self.proven, self.composed))
        told = {"dataset": self.dataset, "runs": self.runs, "proven": proven, "note": self.in_words()}
        return told | ({"with_noise_of_their_own": own} if self.same_noise else {})


def compositions(folders: Sequence[Path]) -> list[Composition]:
    """The joint guarantee for each data set with several private runs among these finished ones.

    Guarantees: runs that draw the same noise prove nothing together
    (`test_runs_of_one_seed_prove_nothing_together_since_their_noise_cancels`). The noise that a target chose and rounds
    that were repeated count as on the ledgers (`test_what_all_runs_prove_together_counts_repeated_rounds`).
    """
    found: dict[str, list[Rounds]] = {}
    seeds: dict[str, list[int]] = {}
    deltas: dict[str, float] = {}
    for folder in folders:
        config = load_config(folder / "config.toml")
        summary = ResultFolder(folder).read().summary
        proven = summary["privacy"]["proven"]
        if "selection" in summary["privacy"] or all(row["epsilon"] is None for row in proven):
            continue
        key = str(summary.get("dataset", "the data"))
        deltas[key] = max(deltas.get(key, 0.0), config.privacy.delta)
        found.setdefault(key, []).append(_charged(folder, config, summary))
        if summary["privacy"]["removable"]:
            seeds.setdefault(key, []).append(summary["seed"])
    return [
        Composition(key, len(runs), composed(runs, deltas[key]), _repeats(seeds.get(key, [])))
        for key, runs in found.items()
        if len(runs) > 1
    ]


def _repeats(seeds: Sequence[int]) -> bool:
    return len(set(seeds)) < len(seeds)


def _charged(folder: Path, config: Config, summary: Mapping[str, Any]) -> Rounds:
    """What a finished run was charged for; where its ledger is not there, what its plan releases."""
    ledger = Path(config.privacy.ledger) if config.privacy.ledger else folder / "ledger.jsonl"
    charged = Ledger(ledger).rounds(ResultFolder(folder).run()) if ledger.exists() else Rounds()
    early = config.run.ends > 1  # whichever round was the last, the guarantee of all planned ones holds
    if charged and not early:
        return charged
    sizes = summary["plan"]
    plan = Plan(
        sizes["clients"],
        sizes["cohort"],
        sizes["sampler"],
        sizes["rounds"],
        sizes["smallest_client"],
        sizes["largest_client"],
    )
    method, _ = method_of(config, plan)  # a target's noise is chosen for all planned rounds
    releases = declared(method, plan, deployed=config.run.engine == "flower")
    first, last = (summary["rounds"] + 1 if charged else 0), (plan.rounds if early else summary["rounds"])
    return charged + rounds_of(releases, plan, last, first)


def total_rounds(cells: Sequence[Cell]) -> int:
    return sum(cell.config.run.rounds for cell in cells)


def _as_they_end(
    futures: dict[Future[str | None], Cell], look: Callable[[], None]
) -> Iterator[Future[str | None]]:
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=_LOOK_EVERY, return_when=FIRST_COMPLETED)
        look()
        yield from done


def _progress(cells: Sequence[Cell], results: Path) -> tuple[int, int]:
    rounds = runs = 0
    for cell in cells:
        folder = ResultFolder(cell.folder(results))
        if folder.finished:
            rounds += cell.config.run.rounds
            runs += 1
        elif (path := folder.path / "rounds.jsonl").exists():
            rounds += path.read_bytes().count(b"\n")
    return rounds, runs


def _run(cell: Cell, results: Path, data_dir: Path | None, callbacks_for: CallbacksFor) -> None:
    run_seed(
        cell.config,
        cell.seed,
        experiment=cell.experiment,
        results=results,
        data_dir=data_dir,
        callbacks_for=callbacks_for,
    )


def _run_elsewhere(cell: Cell, results: Path, data_dir: Path | None) -> str | None:
    """Run a cell; returns the reason of a failure as text, since not every error can be pickled."""
    run = cell.config.run.model_copy(update={"workers": 1})
    alone = Cell(cell.experiment, cell.config.model_copy(update={"run": run}), cell.seed)
    try:
        _run(alone, results, data_dir, lambda _plan: ())
    except FedveilError as error:
        return str(error)
    return None


def _begin() -> None:
    """Initialise a process that runs cells: one thread, the user's methods and models; it ends with its parent."""
    import torch

    torch.set_num_threads(1)
    load_plugins(())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _method_field(change: str) -> str | None:
    """The method's field in a change, if it has one."""
    parts = [part.strip() for part in change.partition("=")[0].split(".")]
    return parts[1] if len(parts) > 1 and parts[0] == "method" else None


def _applies(change: str, method: str) -> bool:
    field = _method_field(change)
    return field is None or method not in METHODS or field in field_names(METHODS[method])


def _require_known_fields(methods: Sequence[str], changes: Sequence[str]) -> None:
    known = sorted({field for name in methods if name in METHODS for field in field_names(METHODS[name])})
    for change in changes:
        field = _method_field(change)
        if field == "name":
            raise InputError("method.name", change, "would be overridden", "Give methods with --methods.")
        if field is not None and known and field not in known:
            raise InputError(
                f"method.{field}",
                change.partition("=")[2] or change,
                f"none of {', '.join(methods)} has this field",
                f"Known: {', '.join(known)}.",
            )


def _axis(text: str) -> tuple[str, list[str]]:
    """The key and the values of `key=value,value`; commas inside brackets and quotes do not separate."""
    key, equals, listed = text.partition("=")
    values = [value.strip() for value in _split(listed)]
    if not equals or not key.strip() or not all(values):
        raise InputError("--grid", text, "is not an axis", "Write --grid section.key=value,value.")
    return key.strip(), values


def _split(text: str) -> list[str]:
    parts = [""]
    depth, quote = 0, ""
    for letter in text:
        if letter in "\"'" and quote in ("", letter):
            quote = "" if quote else letter
        elif not quote:
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(letter, 0)
        if letter == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
