"""Writes docs/best.md and its figure from the records of experiments/best, and the records from results.

    fedveil run experiments/best/record-mnist.toml --results results
    python docs/figures/make_best_page.py collect results     # results -> experiments/best/records/*.json
    python docs/figures/make_best_page.py page                # records -> docs/best.md, docs/figures/best.svg

`best_rows.toml` says which rows there are and what each is compared with.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedveil.atomic_files import write_atomically
from fedveil.experiment.config import Config, load_experiment
from fedveil.figures.figure import in_style, new_figure, save_figure

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments" / "best"
RECORDS = EXPERIMENTS / "records"
ROWS = Path(__file__).with_name("best_rows.toml")
PAGE, FIGURE = ROOT / "docs" / "best.md", ROOT / "docs" / "figures" / "best.svg"


@dataclass(frozen=True)
class Row:
    """A row of the page: a configuration with changes, and the numbers it is compared with, in percent."""

    id: str
    group: str
    data: str
    file: str
    what: str
    minutes: float
    changes: tuple[str, ...] = ()
    published: float | None = None
    target: float | None = None
    stretch: float | None = None

    @property
    def unit(self) -> str:
        """Who is protected against whom, in short: the name of the group's key."""
        return self.group.replace("-", " ")

    def config(self) -> Config:
        return load_experiment(EXPERIMENTS / self.file, self.changes)

    def command(self) -> str:
        sets = "".join(f" --set {change}" for change in self.changes)
        return f"fedveil run experiments/best/{self.file}{sets}"


@dataclass(frozen=True)
class Group:
    key: str
    title: str
    note: str
    rows: tuple[Row, ...] = field(default=())


def read_rows(path: Path = ROWS) -> list[Group]:
    content = tomllib.loads(path.read_text())
    rows = [Row(**(row | {"changes": tuple(row.get("changes", ()))})) for row in content["row"]]
    return [
        Group(g["key"], g["title"], g["note"], tuple(row for row in rows if row.group == g["key"]))
        for g in content["group"]
    ]


def record_of(row: Row, results: Path) -> dict[str, Any] | None:
    """What was measured for this row; None where there is no finished run of it."""
    config = row.config()
    folder = results / Path(row.file).stem / config.identity()
    summaries = [json.loads(path.read_text()) for path in sorted(folder.glob("seed-*/summary.json"))]
    if not summaries:
        return None
    first, target = summaries[0], summaries[0]["target"]
    return {
        "row": row.id,
        "command": row.command(),
        "config": config.identity(),
        "numerics": first["numerics"],
        "unit": target["unit"],
        "adversary": target["adversary"],
        "epsilon": round(target["epsilon"], 4),
        "delta": config.privacy.delta,
        "noise_multiplier": target["noise_multiplier"],
        "runs": [
            {"seed": s["seed"], "accuracy": round(s["accuracy"], 5), "seconds": round(s["seconds"])}
            for s in sorted(summaries, key=lambda s: int(s["seed"]))
        ],
    }


def merged(kept: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the seeds of one that is kept, if both are of one setting and of one numerics version.

    Results of the kept seeds may be on another machine.
    """
    if any(kept.get(key) != record[key] for key in ("row", "config", "numerics")):
        return dict(record)
    runs = {run["seed"]: run for run in [*kept["runs"], *record["runs"]]}
    return {**record, "runs": [runs[seed] for seed in sorted(runs)]}


def collect(results: Path) -> list[str]:
    """Write a record for every row with results; the rows' names."""
    found = []
    for group in read_rows():
        for row in group.rows:
            if (record := record_of(row, results)) is not None:
                path = RECORDS / f"{row.id}.json"
                kept = json.loads(path.read_text()) if path.is_file() else {}
                text = json.dumps(merged(kept, record), indent=1) + "\n"
                write_atomically(path, text.encode())
                found.append(row.id)
    return found


def read_records() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))}


def accuracy_of(record: Mapping[str, Any]) -> float:
    """The mean over seeds, in percent."""
    return 100 * statistics.fmean(run["accuracy"] for run in record["runs"])


def reached(row: Row, record: Mapping[str, Any]) -> str:
    """How the mean stands against target and stretch; a missed target is said to be missed."""
    accuracy = round(accuracy_of(record), 2)
    if row.stretch is not None and accuracy >= row.stretch:
        return "stretch"
    if row.target is not None and accuracy >= row.target:
        return "target"
    if row.target is not None:
        return f"**missed** by {row.target - accuracy:.2f}"
    return "" if row.stretch is None else f"stretch missed by {row.stretch - accuracy:.2f}"


def page(groups: Sequence[Group], records: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of docs/best.md."""
    lines = [
        "# Best known settings",
        "",
        *_wrapped(verdict(groups, records)),
        "",
        "A linear model on features that need no data, trained with large batches or with updates of one",
        "length, is accurate and private at once. Each row is one command. Accuracy is in percent on the",
        "test set, mean and standard deviation over seeds. Epsilon is proven, at delta 1e-5 unless the table",
        "says otherwise. *Published* is the cited paper's number, *target* and *stretch* are what this",
        "project asked of itself.",
        "",
        "Settings of clients' rows on letters and CIFAR-10, and learning rates of CIFAR-10, of MNIST's user",
        "level and of own noise, were chosen on 5000 held-out training images; MNIST's at record level are a",
        "prototype's. The learning rates of Fashion-MNIST (40 among three) and of own noise (3) were also",
        "looked at on test images. No choice is charged.",
        "",
        "This page is written by `python docs/figures/make_best_page.py page` from",
        "[`experiments/best/records`](../experiments/best/records). A test compares the two.",
    ]
    for group in groups:
        if group.rows:
            lines += ["", f"## {group.title}", "", *_wrapped(group.note), "", *_table(group, records)]
        if group.key == "epsilon":
            lines += ["", "![Accuracy against epsilon](figures/best.svg)"]
    return "\n".join([*lines, *_open(groups, records)]) + "\n"


def verdict(groups: Sequence[Group], records: Mapping[str, Mapping[str, Any]]) -> str:
    """How many targets are met, and which are not."""
    rows = [row for group in groups for row in group.rows if row.target is not None]
    found = {row: reached(row, records[row.id]) for row in rows if row.id in records}
    missed = [f"{row.data}, {row.unit}, {row.what}" for row, how in found.items() if "missed" in how]
    absent = [f"{row.data}, {row.unit}, {row.what}" for row in rows if row not in found]
    stretch = sum(how == "stretch" for how in found.values())
    text = f"{len(found) - len(missed)} of {len(rows)} targets are met, {stretch} of them with the stretch."
    text += f" Missed: {'; '.join(missed)}." if missed else ""
    return text + (f" Not run: {'; '.join(absent)}." if absent else "")


def _wrapped(text: str, width: int = 100) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _table(group: Group, records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    compared = any(row.stretch is not None for row in group.rows)
    heads = ["data", "setting", "epsilon", "accuracy", "seeds"]
    heads += ["published", "target", "stretch", "reached"] if compared else []
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in group.rows:
        record = records.get(row.id)
        cells = [row.data, row.what, "-", "not run", "0"]
        if record is not None:
            seeds = [100 * run["accuracy"] for run in record["runs"]]
            spread = f" ± {statistics.stdev(seeds):.2f}" if len(seeds) > 1 else ""
            shown = f"{statistics.fmean(seeds):.2f}{spread}"
            cells[2:] = [f"{record['epsilon']:.2f}", shown, str(len(seeds))]
        if compared:
            numbers = (row.published, row.target, row.stretch)
            cells += ["-" if value is None else f"{value:.1f}" for value in numbers]
            cells.append("" if record is None else reached(row, record))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _open(groups: Sequence[Group], records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Rows without a record, with their command and how long one seed takes on one core."""
    rows = [row for group in groups for row in group.rows if row.id not in records]
    if not rows:
        return []
    lines = [
        "",
        "## Not run yet",
        "",
        "One seed (`--seed 0`), minutes on one core:",
        "",
        "| data | setting | command | minutes |",
        "|---|---|---|---|",
    ]
    return lines + [f"| {row.data} | {row.what} | `{row.command()}` | {row.minutes:g} |" for row in rows]


@in_style
def figure(groups: Sequence[Group], records: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Accuracy against epsilon for records against the server, with the published points."""
    picture = new_figure()
    axes = picture.add_subplot()
    rows = [row for group in groups if group.key in ("epsilon", "record") for row in group.rows]
    for data, style, mark in (("MNIST", "-", "o"), ("Fashion-MNIST", ":", "^"), ("CIFAR-10", "--", "s")):
        ours = sorted(
            (records[row.id]["epsilon"], accuracy_of(records[row.id]))
            for row in rows
            if row.data == data and row.id in records
        )
        if ours:
            axes.plot(*zip(*ours, strict=True), style, marker=mark, label=f"{data}, fedveil")
        published = [
            (float(row.what.split()[-1]), row.published)
            for row in rows
            if row.data == data and row.published is not None
        ]
        axes.plot(*zip(*published, strict=True), linestyle="", marker=mark, fillstyle="none", color="grey",
                  label=f"{data}, FedLAP-DP")  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks([], minor=True)
    axes.set_xticks([0.5, 1, 2, 5, 10], labels=["0.5", "1", "2", "5", "10"])
    axes.set_xlabel("epsilon (record, against the server)")
    axes.set_ylabel("test accuracy in percent")
    axes.legend(fontsize="small")
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("collect").add_argument("results", type=Path)
    commands.add_parser("page")
    arguments = parser.parse_args()
    if arguments.command == "collect":
        print("\n".join(collect(arguments.results)))
        return
    groups, records = read_rows(), read_records()
    write_atomically(PAGE, page(groups, records).encode())
    save_figure(figure(groups, records), FIGURE)


if __name__ == "__main__":
    main()
