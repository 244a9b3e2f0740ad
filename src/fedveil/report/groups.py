"""Groups of runs that differ only in the seed: means, deviations and distinct names."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args
from zlib import crc32

from scipy.stats import t as student_t

from fedveil.experiment.config import WITHOUT_EFFECT, distinguishing
from fedveil.experiment.sections import Metric
from fedveil.methods import METHODS
from fedveil.report.files import number
from fedveil.report.measures import ACCURACY, MEASURES, Measure
from fedveil.report.run import Proof, Run

ADVERSARIES = ("observer", "server", "client")
WHO = {"observer": "published results", "server": "the server", "client": "another participant"}
_ASKED_FIRST = ("task.model", "task.dataset", "method.noise_multiplier", "method.", "task.", "partition.")
WHOM = {"client": "one client's whole data", "record": "a single record"}


@dataclass(frozen=True)
class Spread:
    """A mean over seeds, and the sample deviation where there is more than one."""

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        known = [value for value in values if value is not None]
        if not known:
            return None
        deviation = statistics.stdev(known) if len(known) > 1 else None
        return cls(statistics.fmean(known), deviation, len(known))


@dataclass(frozen=True)
class Setting:
    """One configuration and its runs, one per seed; `look` numbers its colour, dash and marker."""

    name: str
    look: int
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return next((run for run in self.runs if run.finished), self.runs[0])

    @property
    def method(self) -> str:
        return self.first.method

    @property
    def accuracy(self) -> Spread | None:
        """Of the finished runs: an unfinished run's last round is not its result."""
        return Spread.of([run.accuracy for run in self.runs if run.finished])

    @property
    def measure(self) -> Measure:
        """What its runs are measured by: accuracy, unless another measure was taken in its place."""
        known = (m for m in MEASURES if any(getattr(r, m.key) is not None for r in self.runs if r.finished))
        return next(known, ACCURACY)

    @property
    def score(self) -> Spread | None:
        """Of the finished runs, by its measure."""
        return Spread.of([getattr(run, self.measure.key) for run in self.runs if run.finished])

    @property
    def interval(self) -> tuple[float, float] | None:
        """A 95 % interval of the score: over seeds where there are several, else over the test examples."""
        spread, measure, majority = self.score, self.measure, self.first.majority
        if spread is None:
            return None
        if spread.deviation is not None:
            half = float(student_t.ppf(0.975, spread.count - 1)) * spread.deviation / math.sqrt(spread.count)
            return max(measure.span[0], spread.mean - half), min(measure.span[1], spread.mean + half)
        if measure.percent:
            return None if majority is None else wilson(spread.mean, majority.labels)
        return limits_of(self.first.metrics.get(measure.key))

    @property
    def guess(self) -> tuple[float, str] | None:
        """What a model that knows nothing about the examples scores, and how; None where nothing tells."""
        majority = self.first.majority
        if not self.measure.percent:
            return None if self.measure.guess is None else (self.measure.guess, self.measure.guessing)
        return None if majority is None else (majority.rate, "always answering the most frequent class")

    def measured(self, metric: str) -> Spread | None:
        """Of the finished runs: accuracy, that of the clients' own models (personal), or what texts are measured by
        (mcc, perplexity); None for anything else."""
        if metric not in get_args(Metric):
            return None
        return Spread.of([getattr(run, metric) for run in self.runs if run.finished])

    def proofs(self) -> list[Proof]:
        """The weakest guarantee over the seeds per adversary and unit; none if any seed proves nothing."""
        weakest: dict[tuple[str, str], Proof] = {}
        for run in self.runs:
            for row in run.proven:
                key = (row.adversary, row.unit)
                known = weakest.get(key)
                if known is None or _weaker(row, known):
                    weakest[key] = row
        return list(weakest.values())

    def proof(self, adversary: str) -> Proof | None:
        """The guarantee against this adversary: for whole clients if proven, else for records."""
        rows = [row for row in self.proofs() if row.adversary == adversary and row.epsilon is not None]
        return min(rows, key=lambda row: row.unit != "client", default=None)

    def audited(self) -> list[Mapping[str, Any]]:
        return [audit for run in self.runs for audit in run.audits]

    def curve(self, x: str, y: str) -> tuple[list[float], list[float], list[float], list[float]]:
        """Mean, lowest and highest `y` over the seeds against the mean `x`, at rounds that all seeds have."""
        tables = [
            {point.round: point for point in run.history if getattr(point, y) is not None}
            for run in self.runs
            if run.history
        ]
        tables = [table for table in tables if table]
        if not tables:
            return [], [], [], []
        common = sorted(set.intersection(*(set(table) for table in tables)))
        xs = [statistics.fmean(getattr(table[at], x) for table in tables) for at in common]
        values = [[getattr(table[at], y) for table in tables] for at in common]
        return xs, [statistics.fmean(v) for v in values], [min(v) for v in values], [max(v) for v in values]


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share that was measured on so many examples (Wilson 1927)."""
    z, share = 1.959964, min(1.0, max(0.0, share))
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def limits_of(metric: object) -> tuple[float, float] | None:
    """The 95 % interval that a summary has of a metric."""
    if not isinstance(metric, Mapping):
        return None
    low, high = number(metric.get("low")), number(metric.get("high"))
    return None if low is None or high is None else (low, high)


def shared_measure(settings: Sequence[Setting]) -> Measure:
    """The measure by which settings are compared: that of the first with a score."""
    return next((s.measure for s in settings if s.score is not None), ACCURACY)


def scored(settings: Sequence[Setting]) -> list[Setting]:
    """The settings that have a score by the measure that is compared."""
    measure = shared_measure(settings)
    return [s for s in settings if s.score is not None and s.measure == measure]


def rank(setting: Setting) -> float:
    """The score as a number of which more is better; nothing is worse than none."""
    if setting.score is None:
        return -math.inf
    return setting.score.mean if setting.measure.higher else -setting.score.mean


def best_of(settings: Sequence[Setting]) -> Setting | None:
    """The setting whose score is the best of several for sure: its interval overlaps with no other."""
    known = sorted(scored(settings), key=rank)
    intervals = [setting.interval for setting in known]
    if len(known) < 2 or any(interval is None for interval in intervals):
        return None
    sign = 1 if known[-1].measure.higher else -1
    turned = [sorted((sign * low, sign * high)) for low, high in (i for i in intervals if i is not None)]
    return known[-1] if all(turned[-1][0] > high for _, high in turned[:-1]) else None


def _weaker(row: Proof, than: Proof) -> bool:
    if than.epsilon is None:
        return False
    return row.epsilon is None or row.epsilon > than.epsilon


def group(runs: Sequence[Run]) -> list[Setting]:
    """The settings in order of appearance, each with a name of its own."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        together.setdefault(_identity(run), []).append(run)
    members = list(together.values())
    looks = _looks([runs[0].method for runs in members])
    return [
        Setting(name, look, tuple(runs))
        for look, name, runs in zip(looks, _names(members), members, strict=True)
    ]


def _looks(methods: Sequence[str]) -> list[int]:
    """A look per setting: a method has the same in every report; its further settings take those that are free."""
    order = list(METHODS)
    own = {
        name: order.index(name) if name in order else len(order) + crc32(name.encode()) % 20
        for name in methods
    }
    taken: set[int] = set()
    looks = []
    for name in methods:
        look = own[name]
        while look in taken or (look in own.values() and look != own[name]):
            look += 1
        taken.add(look)
        looks.append(look)
    return looks


def mixed(settings: Sequence[Setting]) -> list[str]:
    """Differences that make these settings hard to compare: data, models, partitions."""
    notes = []
    for what, values in {
        "datasets": [s.first.dataset for s in settings],
        "models": [s.first.model for s in settings],
        "measures": [s.measure.name for s in settings if s.score is not None],
        "numbers of clients": [s.first.plan.get("clients", "") for s in settings],
    }.items():
        different = sorted({value for value in values if value})
        if len(different) > 1:
            notes.append(f"These runs have different {what} ({', '.join(different)}): compare with care.")
    return notes


def _identity(run: Run) -> str:
    if not run.config:
        return json.dumps([run.experiment, run.method, run.dataset, run.model, dict(run.plan)])
    return json.dumps([run.experiment, distinguishing(run.config)], sort_keys=True, default=str)


def _names(members: Sequence[Sequence[Run]]) -> list[str]:
    """The method's name, with as few settings as distinguish it from others of the same method."""
    names = []
    for place, runs in enumerate(members):
        run = runs[0]
        rivals = [_flat(other[0].config) for other in members if other[0].method == run.method]
        own = _flat(run.config)
        parts = [_part(key, own[key]) for key in _telling(rivals) if key in own]
        if len(rivals) > 1 and not parts:
            parts = [run.experiment or str(place + 1)]
        names.append(run.method + (f" ({', '.join(parts)})" if parts else ""))
    return [
        name if names.count(name) == 1 else f"{name} ({names[: place + 1].count(name)})"
        for place, name in enumerate(names)
    ]


def _part(key: str, value: str) -> str:
    """A setting of a name: "clip 0.5"; models and data sets are known by their own names."""
    last = key.rpartition(".")[2]
    return value if last in ("model", "dataset", "features") else f"{last.replace('_', ' ')} {value}"


def _telling(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """The fewest keys that distinguish these configurations; of equally few, the most important to readers."""
    keys = sorted({key for config in configs for key in config}, key=lambda key: (_rank(key), key))
    chosen: list[str] = []

    def apart(*more: str) -> int:
        return len({tuple(config.get(key) for key in (*chosen, *more)) for config in configs})

    while keys and apart(best := max(keys, key=apart)) > apart():
        chosen.append(best)
    return chosen


def _rank(key: str) -> int:
    return next(
        (place for place, start in enumerate(_ASKED_FIRST) if key.startswith(start)), len(_ASKED_FIRST)
    )


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in config.items():
        if f"{prefix}{key}" in WITHOUT_EFFECT:
            continue
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = f"{value:g}" if isinstance(value, float) else str(value)
    return flat
