"""Private selection between the configurations of a comparison: only the best trial is written.

Sequence: everything is checked; the whole selection is charged to the ledger; the number of trials is drawn; trials
run in memory, one after another, each on a candidate drawn with replacement and with noise from the system's entropy;
the best is written to a results folder. An interrupted selection stays charged, and starting it again draws and
charges again. A finished one is loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedveil.atomic_files import write_atomically
from fedveil.errors import LARGEST_SEED, DivergedError, InputError, known_name
from fedveil.evaluation.accuracy import evaluate
from fedveil.experiment.compare import Cell
from fedveil.experiment.config import Config
from fedveil.experiment.prepare import Prepared, check_method, facts_of, prepare
from fedveil.privacy.accounting import Cohort, Guarantee, Round, account_rounds, rounds_of
from fedveil.privacy.calibrate import calibrate
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.mechanisms import Gaussian
from fedveil.privacy.releases import Adversary, Plan, Release, Unit
from fedveil.privacy.selection import (
    NegativeBinomialTrials,
    PoissonTrials,
    Trials,
    draw,
    selection_curve,
    selection_release,
)
from fedveil.privacy.statement import PrivacyStatement, show
from fedveil.session.checks import check_test
from fedveil.session.options import AvailableData, PrivacySettings, RunOptions, SimulationOptions
from fedveil.session.privacy_guard import unit_of
from fedveil.session.results import Result, ResultFolder
from fedveil.session.run import simulate
from fedveil.streams import EntropyStream

_ONLY_OBSERVERS = (
    "it participates in every trial, and selection limits neither their number nor what is visible to it"
)


@dataclass(frozen=True)
class SelectionSettings:
    """How the number of trials is drawn and how a trial is scored.

    Attributes:
        score: "public": accuracy on the test examples, which the user declares public; "noisy": the number of correct
            answers on them plus Gaussian noise, which protects single test records.
        score_epsilon: The epsilon of one noisy score, at the configuration's delta.
    """

    score: str | None = None
    score_epsilon: float | None = None
    trials: Trials = field(default_factory=NegativeBinomialTrials)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SelectionSettings:
        """Settings from the keys score, score_epsilon, trials ("negative-binomial" or "poisson"), eta, gamma, mean."""
        values = dict(given)
        kind = values.pop("trials", "negative-binomial")
        kinds = {"negative-binomial": NegativeBinomialTrials, "poisson": PoissonTrials}
        make = kinds[known_name("trials", "distribution of trials", kind, kinds)]
        own = [f.name for f in dataclasses.fields(make)]
        for key in values:
            known_name(
                "--selection-set",
                "setting of this selection",
                key,
                ["trials", "score", "score_epsilon", *own],
            )
        for key in ("score_epsilon", *own):
            if key in values and (isinstance(values[key], bool) or not isinstance(values[key], int | float)):
                raise InputError(key, values[key], "is not a number", "Give a number.")
        numbers = {key: float(values.pop(key)) for key in own if key in values}
        return cls(values.get("score"), values.get("score_epsilon"), make(**numbers))

    def __post_init__(self) -> None:
        if self.score not in ("public", "noisy"):
            raise InputError(
                "score",
                self.score,
                "the scoring of trials affects the epsilon of the selection",
                'Use "public" if the test examples are public, or "noisy" with a score_epsilon.',
            )
        if (self.score == "noisy") != (self.score_epsilon is not None):
            raise InputError(
                "score_epsilon", self.score_epsilon, "applies to a noisy score only", "Give both or neither."
            )
        if self.score_epsilon is not None and not 1e-3 <= self.score_epsilon <= 10:
            raise InputError("score_epsilon", self.score_epsilon, "is out of range", "Use 0.001 to 10.")

    def score_mechanism(self, delta: float) -> Gaussian | None:
        """The noise on the number of correct answers, a sum to which each test record contributes at most 1."""
        if self.score_epsilon is None:
            return None
        plan = Plan(1, 1, "all", 1)
        sigma = calibrate(
            lambda m: [_score_release(Gaussian(1.0, m))],
            plan,
            delta,
            self.score_epsilon,
            "observer",
            "record",
        )
        return Gaussian(1.0, sigma)

    def to_json(self) -> dict[str, Any]:
        return {"trials": self.trials.to_json(), "score": self.score, "score_epsilon": self.score_epsilon}


def _score_release(mechanism: Gaussian) -> Release:
    return Release(
        "the noisy score", "record", ("observer",), mechanism.protection(), participation="charged"
    )


@dataclass(frozen=True)
class Selection:
    """A private selection that is checked and accounted for; nothing is written yet."""

    experiment: str
    seed: int
    candidates: tuple[tuple[Config, Prepared], ...]
    settings: SelectionSettings
    unit: Unit
    score_noise: Gaussian | None
    release: Release

    @property
    def identity(self) -> str:
        parts = [*sorted(config.identity() for config, _ in self.candidates), self.settings.to_json()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def round(self) -> Round:
        return Round((self.release,), Cohort.of(self.candidates[0][1].plan))


def plan_selection(cells: Sequence[Cell], settings: SelectionSettings, data_dir: Path | None) -> Selection:
    """Check the candidates and account for the selection."""
    first = cells[0]
    configs = list({cell.config.identity(): cell.config for cell in cells}.values())
    for config in configs:
        _require_fit(config, first.config)
    candidates = tuple((config, prepare(config, first.seed, data_dir)) for config in configs)
    for _, prepared in candidates:
        check_method(prepared, first.seed)
        if prepared.digest != candidates[0][1].digest:
            raise InputError("task", "differs", "candidates must have the same data", "Vary the method only.")
    units = {unit_of(prepared.method, prepared.plan) for _, prepared in candidates}
    if len(units) > 1:
        raise InputError("method", sorted(units), "candidates protect different units", "Use one unit.")
    (unit,) = units
    if settings.score == "noisy" and unit == "client":
        raise InputError(
            "score",
            "noisy",
            "a client may own many test examples, which this noise does not protect together",
            'Use "public".',
        )
    if check_test(candidates[0][1].task, candidates[0][1].dataset.test) is None:
        raise InputError("task.dataset", first.config.task.dataset, "has no test examples", "Add some.")
    noise = settings.score_mechanism(first.config.privacy.delta)
    rounds = [rounds_of(prepared.method.releases(prepared.plan), prepared.plan) for _, prepared in candidates]
    if noise is not None:
        score = Round((_score_release(noise),), Cohort.of(candidates[0][1].plan))
        rounds = [trial + Counter([score]) for trial in rounds]
    release = selection_release(selection_curve(rounds, unit, settings.trials), unit)
    return Selection(first.experiment, first.seed, candidates, settings, unit, noise, release)


def _require_fit(config: Config, first: Config) -> None:
    """Refuse settings that would write or disclose more than the selected run."""
    for name, value, problem, remedy in (
        ("run.engine", config.run.engine != "simulation", "nodes observe all trials", 'Use "simulation".'),
        ("run.transcript", config.run.transcript, "would store every trial's messages", "Leave it out."),
        (
            "task.data_options.statistics",
            config.task.data_options.get("statistics") == "private",
            "are computed once for a run, not for a selection of runs",
            "Give constants in the schema.",
        ),
        ("attack", config.attack, "would disclose more than the selected run", "Leave it out."),
        ("run.early_stopping", config.run.early_stopping, "applies to no trial", "Leave it out."),
        ("privacy", config.privacy != first.privacy, "differs between the candidates", "Use the same."),
    ):
        if value:
            raise InputError(name, value, problem, remedy)
    if config.privacy.budget is not None and config.privacy.budget_adversary != "observer":
        raise InputError(
            "privacy.budget_adversary", config.privacy.budget_adversary, _ONLY_OBSERVERS, 'Use "observer".'
        )


def run_selection(selection: Selection, results: Path) -> Path | None:
    """Charge the selection, run the trials, write the best; None: no trial was made or none has a finite model."""
    place = results / selection.experiment / f"selection-{selection.identity}" / f"seed-{selection.seed}"
    folder = ResultFolder(place)
    digest = selection.candidates[0][1].digest
    with folder.held():
        folder.require_data(digest)
        if folder.finished:
            return folder.path
        if digest is not None:
            write_atomically(folder.path / ".data", digest.encode())
        name = folder.run()
        write_atomically(folder.path / ".run", name.encode())
        proven = _charge(selection, folder, name)
        winner = _best_trial(selection)
        if winner is None:
            return None
        _write(folder, selection, winner, proven)
    return folder.path


def _ledger_of(selection: Selection, folder: ResultFolder) -> Path:
    shared = selection.candidates[0][0].privacy.ledger
    return Path(shared) if shared else folder.path / "ledger.jsonl"


def _charge(selection: Selection, folder: ResultFolder, name: str) -> tuple[Guarantee, ...]:
    """Charge the whole selection to the ledger; returns the guarantee of all attempts at this selection."""
    section = selection.candidates[0][0].privacy
    ledger = Ledger(_ledger_of(selection, folder))
    pairs: list[tuple[Unit, Adversary]] = [(selection.unit, "observer")]
    with ledger.held():
        ledger.refresh()
        if section.budget is not None:
            total = ledger.rounds() + Counter([selection.round])
            (row,) = account_rounds(total, section.delta, pairs=pairs)
            if row.epsilon is None or row.epsilon > section.budget:
                needed = "no finite epsilon" if row.epsilon is None else f"epsilon {show(row.epsilon)}"
                raise InputError(
                    "privacy.budget",
                    section.budget,
                    f"the selection needs {needed}",
                    "Raise it, or use more noise.",
                )
        plan = selection.candidates[0][1].plan
        ledger.charge(name, 1, [selection.release], plan, replay_safe=False)
    rows = account_rounds(ledger.rounds(name), section.delta)
    theorem = f"best of the trials by Papernot and Steinke 2022, {selection.settings.trials.theorem}"
    return tuple(
        replace(row, theorem=f"{row.theorem}; {theorem}")
        if row.adversary == "observer"
        else replace(row, reason=_ONLY_OBSERVERS)
        for row in rows
    )


def _best_trial(selection: Selection) -> tuple[Config, Prepared, Result, float] | None:
    """The best of a number of trials that is drawn here; ties are broken at random, and losers are forgotten."""
    best: tuple[tuple[float, float], tuple[Config, Prepared, Result, float]] | None = None
    random = secrets.SystemRandom()
    for _ in range(draw(selection.settings.trials)):
        config, prepared = random.choice(selection.candidates)
        try:
            result = _trial(selection, config, prepared)
        except DivergedError:
            continue  # a diverged trial has the worst score
        score = _score(selection.score_noise, prepared, result)
        rank = (score, random.random())
        if best is None or rank > best[0]:
            best = rank, (config, prepared, result, score)
    return None if best is None else best[1]


def _trial(selection: Selection, config: Config, prepared: Prepared) -> Result:
    options = RunOptions(
        seed=secrets.randbelow(LARGEST_SEED),  # of its first model; noise comes from the system's entropy
        noise_source="entropy",
        privacy=PrivacySettings(config.privacy.delta),
        evaluate_every=config.run.evaluate_every,
        min_clients=config.run.min_clients,
    )
    test = prepared.dataset.test if selection.settings.score == "public" else None
    data = AvailableData(test, prepared.dataset.num_classes, prepared.clients, None, score_clients=False)
    how = SimulationOptions(config.run.execution, config.run.workers, config.run.max_memory)
    return simulate(prepared.task, prepared.clients, prepared.method, prepared.plan, options, how, data)


def _score(noise: Gaussian | None, prepared: Prepared, result: Result) -> float:
    if noise is None:
        return float(result.summary["accuracy"])
    test = check_test(prepared.task, prepared.dataset.test)
    assert test is not None
    x, y = test
    accuracy = evaluate(prepared.task, result.model, x, y).accuracy
    assert accuracy is not None
    correct = round(accuracy * len(y))
    total = {"correct": torch.tensor([[correct]], dtype=torch.float64)}
    return float(noise.perturb(total, [EntropyStream()])["correct"]) / len(y)


def _write(
    folder: ResultFolder,
    selection: Selection,
    winner: tuple[Config, Prepared, Result, float],
    proven: tuple[Guarantee, ...],
) -> None:
    config, prepared, result, score = winner
    data = prepared.dataset
    statement = PrivacyStatement(
        "none",
        proven,
        None,
        (selection.release,),
        prepared.plan,
        notes=data.notes,
        rows_per_person=data.rows_per_person,
    )
    settings = selection.settings.to_json() | {"candidates": len(selection.candidates)}
    summary = result.summary | facts_of(config, selection.experiment, prepared)
    summary |= {
        "seed": selection.seed,  # the partition's seed; that of the trial is not stored
        "accuracy": score,
        "privacy": statement.to_json() | {"selection": settings},
        "privacy_in_words": f"{statement.in_words()}\n{_in_words(selection)}",
    }
    lines = [{key: value for key, value in line.items() if key != "epsilon"} for line in result.history]
    rounds = "".join(json.dumps(line) + "\n" for line in lines)
    write_atomically(folder.path / "config.toml", config.to_toml().encode())
    write_atomically(folder.path / "rounds.jsonl", rounds.encode())
    folder.finish(result.model, summary, _ledger_of(selection, folder))


def _in_words(selection: Selection) -> str:
    settings = selection.settings
    scored = "on test examples that were declared public"
    if settings.score_epsilon is not None:
        scored = f"on test examples, with noise of epsilon {settings.score_epsilon:g} that is part of the guarantee"
    return (
        f"Selection: this run is the best of a random number of trials, {settings.trials.in_words()}, on "
        f"{len(selection.candidates)} candidates drawn with replacement, by accuracy {scored}. The epsilon above "
        "includes the cost of the selection (Papernot and Steinke 2022). It holds as long as neither the other trials "
        "nor their number become known."
    )
