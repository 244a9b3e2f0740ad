"""What was measured for a published table, small enough to be kept beside it: `records/PAPER/TABLE.json`.

A record knows the configuration (by its hash), the numerics and the versions that made it. One whose row has changed
since is no longer a measurement of that row, and is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedveil.atomic_files import write_atomically
from fedveil.errors import ResultError
from fedveil.experiment.tables import PublishedTable, Row
from fedveil.experiment.verdicts import Measured, Proven, judge_claim
from fedveil.methods.method import current_numerics
from fedveil.numerics import NUMERICS
from fedveil.session.results import Result

_VERSIONS = ("fedveil", "python", "torch", "numpy", "dp-accounting", "cores")
_DIGITS = 6
Entry = dict[str, Any]


class Records:
    """The records of one table, at full and at reduced scale."""

    def __init__(self, table: PublishedTable, folder: Path) -> None:
        self.table = table
        self.folder = folder
        self.path = folder / table.paper / f"{table.name}.json"
        self._content: dict[str, dict[str, Entry]] = {"full": {}, "reduced": {}, "accounted": {}}
        if self.path.exists():
            self._content |= _read(self.path)

    def add(
        self,
        row: Row,
        seed: int,
        result: Result,
        *,
        reduced: bool = False,
        attacks: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Keep what a finished run measured, and what attacks on it found; earlier findings stay."""
        config = self.table.config(row, reduced=reduced)
        head = {"config": config.identity(), "numerics": result.summary["numerics"]}
        entry = self._of(reduced).get(row.name, {})
        if {key: entry.get(key) for key in head} != head:
            entry = {**head, "seeds": {}}
        versions = result.summary["environment"]
        entry["versions"] = {key: versions[key] for key in _VERSIONS}
        known = attacks or entry["seeds"].get(str(seed), {}).get("attack")
        found = {"attack": _short(dict(known))} if known else {}
        entry["seeds"][str(seed)] = measurements(result) | found
        self._of(reduced)[row.name] = entry

    def add_accounted(self, row: Row, epsilon: Mapping[str, float | None]) -> None:
        """Keep what the ledger proves for a row, by unit and adversary, whether or not it was run."""
        # What a method computes in another order spends what it spent before, so its own numerics do not count here.
        head = {"config": self.table.config(row).identity(), "numerics": NUMERICS}
        self._content["accounted"][row.name] = head | {"epsilon": _short(dict(epsilon))}

    def entry(self, row: Row, *, reduced: bool = False) -> Entry | None:
        """What was measured for this row as it stands."""
        return self._current(row, "reduced" if reduced else "full")

    def _current(self, row: Row, kind: str) -> Entry | None:
        entry = self._content[kind].get(row.name)
        if entry is None:
            return None
        config = self.table.config(row, reduced=kind == "reduced")
        numerics = NUMERICS if kind == "accounted" else current_numerics(config.method["name"])
        return entry if (entry["config"], entry["numerics"]) == (config.identity(), numerics) else None

    def complete(self, row: Row, seed: int, *, reduced: bool = False) -> bool:
        """Whether this seed of the row is on record, with attacks if some are published."""
        found = self._seeds(row, reduced, [seed])
        return bool(found) and (reduced or not row.published_attack or "attack" in found[0])

    def stale(self) -> list[str]:
        """Rows on record that the table no longer has as they were."""
        rows = {row.name: row for row in self.table.rows}
        return [
            name
            for kind, entries in self._content.items()
            for name in entries
            if name not in rows or self._current(rows[name], kind) is None
        ]

    def measured(self, row: Row, *, reduced: bool = False, seeds: Sequence[int] | None = None) -> Measured:
        """The row beside its published value, over these seeds or all on record."""
        chosen = self._seeds(row, reduced, seeds)
        values = [value_of(self.table, row, one) for one in chosen]
        return Measured(
            row.name,
            row.group,
            row.published,
            tuple(value for value in values if value is not None),
            sum(one["seconds"] for one in chosen),
        )

    def attacked(
        self, row: Row, score: str, *, reduced: bool = False, seeds: Sequence[int] | None = None
    ) -> Measured:
        """A score of the row's attack beside the published one."""
        values = [attack_score(one, score) for one in self._seeds(row, reduced, seeds)]
        return Measured(
            row.name,
            row.group,
            row.published_attack.get(score),
            tuple(value for value in values if value is not None),
        )

    def proven(self, row: Row) -> Proven:
        """Whether the epsilon that is claimed for the row is proven here: by every run, or by accounting alone."""
        if row.claim is None:
            return "not run"
        key = f"{row.claim.unit} against {row.claim.adversary}"
        return judge_claim(row.claim.epsilon, [one.get(key) for one in self.epsilons(row)])

    def epsilons(self, row: Row) -> list[Mapping[str, float | None]]:
        """What the ledger proves for each run of the row, or for its plan where none is on record."""
        entry, accounted = self.entry(row), self._current(row, "accounted")
        if entry is not None:
            return [one["epsilon"] for one in entry["seeds"].values()]
        return [] if accounted is None else [accounted["epsilon"]]

    def _seeds(self, row: Row, reduced: bool, seeds: Sequence[int] | None) -> list[Entry]:
        entry = self.entry(row, reduced=reduced)
        found: Mapping[str, Entry] = {} if entry is None else entry["seeds"]
        return [one for seed, one in found.items() if seeds is None or int(seed) in seeds]

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        order = [row.name for row in self.table.rows]
        content = {
            scale: {name: rows[name] for name in order if name in rows}
            for scale, rows in self._content.items()
        }
        write_atomically(self.path, (json.dumps(content, indent=1) + "\n").encode())

    def _of(self, reduced: bool) -> dict[str, Entry]:
        return self._content["reduced" if reduced else "full"]


def measurements(result: Result) -> Entry:
    """The numbers of one run that tables and pages are made of."""
    summary = result.summary
    scored = [
        (line["accuracy"], line["round"]) for line in result.history if line.get("accuracy") is not None
    ]
    best, at = max(scored, key=lambda pair: (pair[0], -pair[1])) if scored else (summary["accuracy"], None)
    personal = summary.get("personal") or {}
    found = {
        "accuracy": summary["accuracy"],
        "best": best,
        "best_round": at,
        "before_last": scored[-2][0] if len(scored) > 1 else None,
        "personal": personal.get("test_accuracy"),
        "mcc": summary.get("mcc"),
        "perplexity": summary.get("perplexity"),
        "rounds": summary["rounds"],
        "seconds": round(summary["seconds"], 3),
        "bytes_up": summary["bytes_up"],
        "epsilon": {
            f"{row['unit']} against {row['adversary']}": row["epsilon"]
            for row in summary["privacy"]["proven"]
        },
    }
    return {key: _short(value) for key, value in found.items() if value is not None}


def value_of(table: PublishedTable, row: Row, entry: Mapping[str, Any]) -> float | None:
    """What is compared with the published value: of the last round, or of the best."""
    metric = table.metric(row)
    if metric == "accuracy" and table.content.table.score == "best":
        metric_key = "best"
    else:
        metric_key = metric
    value = entry.get(metric_key)
    return None if value is None else float(value)


def attack_score(entry: Mapping[str, Any], score: str) -> float | None:
    """A score by its published name: the accuracy of the attack of that name, or a score of the first that has it."""
    attacks: Mapping[str, Mapping[str, float]] = entry.get("attack", {})
    if score in attacks:
        return attacks[score]["accuracy"]
    return next((scores[score] for scores in attacks.values() if score in scores), None)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return value


def _read(path: Path) -> dict[str, dict[str, Entry]]:
    try:
        content = json.loads(path.read_text())
        if not all(isinstance(content[scale], dict) for scale in ("full", "reduced")):
            raise ValueError("no records in it")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultError(
            f"{path} is damaged: {error}. Restore it from a copy, or remove it.",
            field="records",
            value=str(path),
        ) from error
    return {kind: content.get(kind, {}) for kind in ("full", "reduced", "accounted")}
