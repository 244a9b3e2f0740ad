"""Defensive reading of results folders: a damaged file loses only its own content.

Every value is checked on the way in. What is missing or cannot be read is written down in `Run.problems`, in words
for the reader of the report; the rest is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedveil.errors import InputError, ResultError
from fedveil.methods.method import current_numerics
from fedveil.numerics import NUMERICS, numerics_of
from fedveil.privacy.meaning import fewest_records
from fedveil.report.attack_files import read_attacks, read_pictures
from fedveil.report.files import (
    Fields,
    Problems,
    natural,
    number,
    parse_json,
    parse_toml,
    read_json,
    read_text,
)
from fedveil.report.run import Majority, Paper, Person, Point, Proof, Run
from fedveil.session.model_file import model_problems
from fedveil.session.results import Result
from fedveil.session.statement_file import STATEMENT

_OF_A_ROUND = ("accuracy", "loss", "epsilon", "r2", "concordance", "perplexity")
MARKS = ("summary.json", "rounds.jsonl", "config.toml")


def read_runs(results: Sequence[Path | str | Result]) -> list[Run]:
    """Every run in these folders (at any depth) and results, in the order given.

    A path that does not exist is refused, and so is a collection without a single run or with runs of different
    numerics.
    """
    runs: list[Run] = []
    seen: set[Path] = set()
    for item in results:
        if isinstance(item, Result) and item.folder is None:
            runs.append(_from_memory(item))
            continue
        place = item.folder if isinstance(item, Result) else Path(item)
        assert place is not None
        folders = [folder for folder in run_folders(place) if folder.resolve() not in seen]
        seen.update(folder.resolve() for folder in folders)
        found = [read_folder(folder) for folder in folders]
        # Folders below one another are named by hashes: order them by what they are.
        runs += sorted(
            found, key=lambda run: natural(f"{run.experiment} {run.method} {run.config_text}{run.name}")
        )
    if not runs:
        given = ", ".join(str(item) for item in results) or "nothing"
        raise ResultError(
            f"no run in {given}. Give result folders, such as results/demo.", field="results", value=given
        )
    _require_one_numerics(runs)
    return runs


def _require_one_numerics(runs: Sequence[Run]) -> None:
    """Refuse to combine runs of different numerics in one report."""
    names: dict[int, list[str]] = {}
    for run in runs:
        if run.numerics is not None:
            names.setdefault(run.numerics, []).append(run.name)
    current = all(run.numerics in (None, current_numerics(run.method)) for run in runs)
    if len(names) > 1 and not current:
        listed = "; ".join(f"{version}: {', '.join(names[version])}" for version in sorted(names))
        raise InputError(
            "numerics",
            sorted(names),
            f"these runs were made by different numerics and are not comparable ({listed})",
            "Give the folders of one version, or run the older ones again in another folder.",
        )


def run_folders(place: Path) -> list[Path]:
    """The folders of runs at or below this one."""
    if not place.exists():
        raise InputError("RESULT", str(place), "no such folder", "Give a folder that `fedveil run` wrote.")
    if place.is_file():
        if place.name not in MARKS:
            raise InputError("RESULT", str(place), "is a file", "Give a folder that `fedveil run` wrote.")
        place = place.parent
    if any((place / mark).exists() for mark in MARKS):
        return [place]
    found = {path.parent for mark in MARKS for path in place.rglob(mark)}
    return sorted(found, key=natural)


def read_folder(folder: Path) -> Run:
    """One run, from a folder in any state."""
    problems = Problems()
    config_text = read_text(folder / "config.toml", problems) or ""
    config = parse_toml(config_text, problems)
    history = _history(folder / "rounds.jsonl", problems)
    summary: Mapping[str, Any] | None = None
    if (folder / "summary.json").exists():
        loaded = read_json(folder / "summary.json", problems)
        if isinstance(loaded, Mapping):
            summary = loaded
        elif loaded is not None:
            problems.append("summary.json is not an object")
        problems.extend(model_problems(folder, summary or {}))
    else:
        problems.notes.append(_unfinished(history, config))
    attacks = read_attacks(folder / "attacks", problems)
    audits = [
        row
        for path in sorted((folder / "audits").glob("**/*.json"), key=natural)
        for row in _audit_rows(read_json(path, problems))
    ]
    return _build(
        "/".join(folder.resolve().parts[-3:]),
        summary,
        history,
        config,
        config_text,
        audits,
        problems,
        folder=folder,
        numerics=numerics_of(folder),
        statement=_object(folder / STATEMENT, problems),
        attacks=attacks,
        synthetic=read_pictures(folder / "synthetic", problems),
        figures=read_pictures(folder / "figures", problems),
    )


def _object(path: Path, problems: Problems) -> Mapping[str, Any]:
    """The object in a JSON file that need not be there."""
    loaded = read_json(path, problems) if path.exists() else {}
    if isinstance(loaded, Mapping):
        return loaded
    if loaded is not None:
        problems.append(f"{path.name} is not an object")
    return {}


def _from_memory(result: Result) -> Run:
    problems = Problems()
    version = result.summary.get("numerics", NUMERICS)
    name = f"{result.summary.get('method', 'run')}, seed {result.summary.get('seed', '?')}"
    return _build(name, result.summary, _points(result.history), {}, "", [], problems, numerics=version)


def _build(
    name: str,
    found: Mapping[str, Any] | None,
    history: tuple[Point, ...],
    config: Mapping[str, Any],
    config_text: str,
    audits: Sequence[Mapping[str, Any]],
    problems: Problems,
    **others: Any,
) -> Run:
    summary = Fields(found or {}, problems if found is not None else [])
    privacy = Fields(summary.mapping("privacy"), summary.problems, "privacy.")
    audit = privacy.mapping("audit", required=False)
    plan = summary.mapping("plan", required=False)
    task, run = _section(config, "task"), _section(config, "run")
    seed = summary.number("seed", required=False)
    match = re.search(r"seed-(\d+)$", name)
    # <experiment>/<config>/seed-N, or a folder of the caller's own choice (fedveil.run)
    place = "" if "/" not in name else name.split("/")[0 if match else -1]
    return Run(
        name=name,
        finished=found is not None,
        experiment=summary.text("experiment", required=False) or place,
        method=summary.text("method") or str(_section(config, "method").get("name", "unknown method")),
        seed=int(seed) if seed is not None else int(match[1]) if match else None,
        dataset=summary.text("dataset", required=False) or str(task.get("dataset", "")),
        data=summary.text("data", required=False),
        model=summary.text("model", required=False) or str(task.get("model", "")),
        rounds=int(summary.number("rounds") or (history[-1].round if history else 0)),
        planned=_whole(plan.get("rounds")) or _whole(run.get("rounds")),
        stopped=summary.text("stopped", required=False),
        claim=_claim(privacy.values.get("paper_claim")),
        proven=_proofs(privacy, plan),
        audits=(*(_audit_rows(audit) if audit else []), *audits),
        words=summary.text("privacy_in_words"),
        removable=privacy.values.get("removable") is True,
        noise=str(privacy.values.get("noise") or ""),
        deployed=summary.values.get("deployed") is True,
        prepared=tuple(str(item) for item in privacy.items("data", required=False)),
        persons=_persons(privacy.items("persons", required=False)),
        plan={str(key): str(value) for key, value in plan.items()},
        environment={
            str(key): str(value) for key, value in summary.mapping("environment", required=False).items()
        },
        paper=_paper(summary.mapping("paper", required=False) or _section(config, "paper")),
        history=history,
        config=config,
        config_text=config_text,
        **_measured(summary),
        **others,
        problems=tuple(dict.fromkeys(problem for problem in problems if problem)),
        notes=tuple(problems.notes),
    )


def _measured(summary: Fields) -> dict[str, Any]:
    """The numbers of a finished run; none of them is required."""
    names = ["accuracy", "loss", "r2", "concordance", "mcc", "perplexity"]
    names += ["seconds", "bytes_up", "bytes_down"]
    metrics = Fields(summary.mapping("metrics", required=False), summary.problems, "metrics.")
    return {name: summary.number(name, required=False) for name in names} | {
        "metrics": metrics.mapping("all", required=False),
        "client_metrics": metrics.mapping("clients", required=False),
        "personal": number(summary.mapping("personal", required=False).get("test_accuracy")),
        "classes": tuple(str(item) for item in summary.items("classes", required=False)),
        "per_class": tuple(number(item) for item in summary.items("per_class", required=False)),
        "per_client": tuple(number(item) for item in summary.items("per_client", required=False)),
        "per_client_on": summary.text("per_client_on", required=False),
        "partition": _counts(summary),
        "parameters": _whole(summary.values.get("parameters")),
        "majority": _majority(summary.mapping("majority", required=False)),
        "clients": tuple(str(item) for item in summary.items("client_names", required=False)),
    }


def _proofs(privacy: Fields, plan: Mapping[str, Any]) -> tuple[Proof, ...]:
    clients = _whole(plan.get("clients")) or 1
    smallest, largest = (_whole(plan.get(key)) or 1 for key in ("smallest_client", "largest_client"))
    records = fewest_records(clients, smallest, largest)
    rows = []
    for row in privacy.items("proven"):
        if not isinstance(row, Mapping) or not row.get("adversary"):
            privacy.problems.append("summary.json: a row of privacy.proven cannot be read")
            continue
        rows.append(
            Proof(
                unit=str(row.get("unit", "unknown")),
                adversary=str(row["adversary"]),
                epsilon=number(row.get("epsilon")),
                delta=number(row.get("delta")),
                adjacency=str(row.get("adjacency", "")),
                sampler=str(row.get("sampler", "")),
                theorem=str(row.get("theorem", "")),
                reason=str(row.get("reason", "")),
                units=records if row.get("unit") == "record" else clients,
            )
        )
    return tuple(rows)


def _persons(rows: Sequence[Any]) -> tuple[Person, ...]:
    found = []
    for row in rows:
        person = row if isinstance(row, Mapping) else {}
        epsilon, delta = number(person.get("epsilon")), number(person.get("delta"))
        if epsilon is not None and delta is not None:
            found.append(Person(str(person.get("adversary", "")), epsilon, delta))
    return tuple(found)


def _majority(found: Mapping[str, Any]) -> Majority | None:
    rate, labels = number(found.get("rate")), _whole(found.get("labels"))
    return None if rate is None or not labels else Majority(rate, labels)


def _counts(summary: Fields) -> tuple[tuple[int, ...], ...]:
    rows = summary.items("partition", required=False)
    counts = [[_whole(item) for item in row] if isinstance(row, list) else [None] for row in rows]
    if any(len(row) != len(counts[0]) or None in row for row in counts):
        summary.problems.append("summary.json: partition is not a table of counts")
        return ()
    return tuple(tuple(item or 0 for item in row) for row in counts)


def _paper(section: Mapping[str, Any]) -> Paper | None:
    if not section:
        return None
    number_of = str(section.get("table") or "")
    table = f"Table {number_of}" if re.fullmatch(r"\d+|[IVXL]+", number_of) else number_of
    where = ", ".join(part for part in (table, str(section.get("row") or "")) if part)
    return Paper(
        str(section.get("source", "")),
        where,
        number(section.get("expected")),
        str(section.get("metric", "accuracy")),
        number(section.get("tolerance")),
        str(section.get("scale", "full")),
    )


def _claim(value: Any) -> str | float:
    found = number(value)
    return found if found is not None else str(value or "none")


def _whole(value: Any) -> int | None:
    found = number(value)
    return int(found) if found is not None and found >= 0 else None


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _unfinished(history: Sequence[Point], config: Mapping[str, Any]) -> str:
    done = history[-1].round if history else 0
    planned = _whole(_section(config, "run").get("rounds"))
    of = f" of {planned}" if planned else ""
    return (
        f"not finished: {done}{of} rounds are on record, summary.json is missing; "
        "the same command resumes from there"
    )


def _history(path: Path, problems: list[str]) -> tuple[Point, ...]:
    lines: list[Any] = []
    for place, line in enumerate((read_text(path, problems) or "").splitlines(), start=1):
        try:
            lines.append(parse_json(line))
        except (ValueError, RecursionError):
            problems.append(f"rounds.jsonl: line {place} is cut off or damaged")
    points = _points(lines)
    if len(points) < len(lines):
        problems.append(f"rounds.jsonl: {len(lines) - len(points)} lines have no round")
    return points


def _points(lines: Iterable[Any]) -> tuple[Point, ...]:
    points: list[Point] = []
    sent = 0.0
    for line in lines:
        if not isinstance(line, Mapping) or (at := _whole(line.get("round"))) is None:
            continue
        sent += (number(line.get("bytes_up")) or 0) + (number(line.get("bytes_down")) or 0)
        scores = {key: number(line.get(key)) for key in _OF_A_ROUND}
        invited, answered = _whole(line.get("cohort")), _whole(line.get("answered"))
        points.append(Point(at, bytes=sent, **scores, invited=invited, answered=answered))
    return tuple(points)


def _audit_rows(found: Any) -> list[Mapping[str, Any]]:
    """The single audits in a file: itself, the one of a privacy statement, or all that one lists."""
    if not isinstance(found, Mapping):
        return []
    if "audit" in found:
        return _audit_rows(found["audit"])
    listed = found.get("all")
    return [row for row in listed if isinstance(row, Mapping)] if isinstance(listed, list) else [found]
