"""Runs that differ in nothing but the seed, taken together: means, deviations and names that tell them apart."""

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
from fedveil.report.reading import Proof, Run

ADVERSARIES = ("observer", "server", "client")
WHO = {"observer": "published results", "server": "the server", "client": "another participant"}
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
    def interval(self) -> tuple[float, float] | None:
        """A 95 % interval of the accuracy: over seeds where there are several, else over the test examples."""
        spread, majority = self.accuracy, self.first.majority
        if spread is None:
            return None
        if spread.deviation is not None:
            half = float(student_t.ppf(0.975, spread.count - 1)) * spread.deviation / math.sqrt(spread.count)
            return max(0.0, spread.mean - half), min(1.0, spread.mean + half)
        return None if majority is None else wilson(spread.mean, majority.labels)

    def measured(self, metric: str) -> Spread | None:
        """Of the finished runs: accuracy, that of the clients' own models (personal), or what texts are measured by
        (mcc, perplexity); None for anything else."""
        if metric not in get_args(Metric):
            return None
        return Spread.of([getattr(run, metric) for run in self.runs if run.finished])

    def proofs(self) -> list[Proof]:
        """Per adversary and unit the weakest over the seeds: nothing proven for one is nothing proven."""
        weakest: dict[tuple[str, str], Proof] = {}
        for run in self.runs:
            for row in run.proven:
                key = (row.adversary, row.unit)
                known = weakest.get(key)
                if known is None or _weaker(row, known):
                    weakest[key] = row
        return list(weakest.values())

    def proof(self, adversary: str) -> Proof | None:
        """What is proven against this adversary: for whole clients if that is proven, else for records."""
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


def best_of(settings: Sequence[Setting]) -> Setting | None:
    """The setting whose accuracy is the best of several for sure: its interval overlaps with no other."""
    known = [(setting, setting.interval) for setting in settings if setting.accuracy is not None]
    if len(known) < 2 or any(interval is None for _, interval in known):
        return None
    ranked = sorted(known, key=lambda item: item[0].accuracy.mean if item[0].accuracy else 0.0)
    best, interval = ranked[-1]
    others = [other[1] for _, other in ranked[:-1] if other is not None]
    return best if interval is not None and all(interval[0] > high for high in others) else None


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
    """What makes these settings hard to compare: other data, other models, other partitions."""
    notes = []
    for what, values in {
        "datasets": [s.first.dataset for s in settings],
        "models": [s.first.model for s in settings],
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
    """The method's name, and what differs among the settings that share it."""
    names = []
    for place, runs in enumerate(members):
        run = runs[0]
        rivals = [other[0] for other in members if other[0].method == run.method]
        own = _flat(run.config)
        parts = [
            f"{key.rpartition('.')[2].replace('_', ' ')} {own[key]}"
            for key in sorted(own)
            if any(_flat(rival.config).get(key) != own[key] for rival in rivals)
        ]
        if len(rivals) > 1 and not parts:
            parts = [run.experiment or str(place + 1)]
        if len(parts) > 3:
            parts = [*parts[:3], "…"]
        names.append(", ".join([run.method, *parts]))
    return [
        name if names.count(name) == 1 else f"{name} ({names[: place + 1].count(name)})"
        for place, name in enumerate(names)
    ]


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
