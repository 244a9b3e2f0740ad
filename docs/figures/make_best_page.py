"""Writes docs/best.md, its figure and README's lead from the records of experiments/best, and these from results.

    fedveil run experiments/best/record-mnist.toml --results results
    python docs/figures/make_best_page.py collect results     # results -> experiments/best/records/*.json
    python docs/figures/make_best_page.py page                # records -> docs/best.md, best.svg, README.md

`best_rows.toml` says which rows there are and what each is compared with.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
import statistics
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
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
README, MARKS = ROOT / "README.md", ("<!-- best -->", "<!-- end of best -->")


def _script(name: str) -> ModuleType:
    """A script of experiments/best as a module."""
    spec = importlib.util.spec_from_file_location(f"best_{name}", EXPERIMENTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


baselines = _script("baselines")
DATA = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
METHODS = ("dp-fedavg", "udp-fedavg", "fedceo")
MAIN = ("record", "record-secure", "user", "server", "own-noise")
INTRODUCTION = """\
A linear model on features that need no data is accurate and private at once. To protect records it is trained with
large batches, to protect clients with updates that are scaled to one length. Test accuracy in percent:"""
READING = """\
Accuracy is the mean and the standard deviation over seeds; seeds "1 of 3" means that two are not run yet. Epsilon is
proven, at delta 1e-5 unless the section says otherwise. *Published* is the cited paper's number; *target* and *stretch*
are goals that this project set itself, stretch the harder one. The commands below a table are its rows, in this order;
`--seed 0` runs one seed only."""
CHOICE = """\
On 5000 held-out training images: all settings of clients on letters and CIFAR-10, features, step size and momentum of
records (in a simulation whose batches follow each other in shuffled images), step sizes of clients on MNIST, and all
settings of own noise at epsilon 3. The other settings of MNIST and Fashion-MNIST are a prototype's, which was tuned on
such images too. The learning rate of Fashion-MNIST, and the server's of own noise at 10 and 30, were also looked at on
test images. No choice is charged to epsilon."""
COMPARISON = """\
Every method has the federation, unit, adversary, delta and epsilon of the recommended one, and its published model,
MLP-2 on pixels, without its dropout. Eight trials on 5000 held-out training images tune step size, clip, rounds and
fields of the method's own, at the first epsilon of a federation; its other epsilons take the same settings. Fewer
rounds mean less noise in each, so rounds are tuned too.

The recommended settings were not limited to eight trials. The lead is mostly that of a linear model
on features over a network on pixels: with updates of one length MLP-2 gains little
([secure aggregation](secure-aggregation.md)).

At record level udp-fedavg is DP-SGD inside each client, as in
its authors' code: its user-level form is refused there (`privacy.target_epsilon`: nothing can be proven for a record
against the server). Against observers fedceo may send on smoothed models of single clients, as published, at 4.2 times
the noise, or continue from their mean; under secure aggregation the former is refused (`method.restart`)."""
INVERSION = """\
`{command}`: the first round, attacked in the case that is worst for a client: {targets} of {clients} clients have a
single record, whose update is scaled to the norm of everybody's. A plain upload gives its features away exactly.

The attacker knows the label, reads the features off
the row of that class, may subtract what clients with public images would send, and searches an image with such
features in {steps} steps from the mean of public images of that class, which is also the baseline."""
MORE = "More such settings, each one command: [best known settings](docs/best.md)."
MEMBERSHIP = """\
`{command}`: who was in the training data, asked of the final model of that run."""
Records = Mapping[str, Mapping[str, Any]]


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
        sets = "".join(f" --set {shlex.quote(change)}" for change in self.changes)
        return f"fedveil run experiments/best/{self.file}{sets}"


@dataclass(frozen=True)
class Group:
    key: str
    title: str
    note: str
    rows: tuple[Row, ...] = field(default=())
    seeds: int = 3
    """So many seeds its rows are to have."""


def read_rows(path: Path = ROWS) -> list[Group]:
    content = tomllib.loads(path.read_text())
    rows = [Row(**(row | {"changes": tuple(row.get("changes", ()))})) for row in content["row"]]
    return [Group(**g, rows=tuple(row for row in rows if row.group == g["key"])) for g in content["group"]]


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


def read_baseline_records() -> dict[str, dict[str, Any]]:
    """The records of baselines.py by their key."""
    found = (json.loads(path.read_text()) for path in sorted(baselines.RECORDS.glob("*.json")))
    return {record["baseline"]: record for record in found}


def read_attack_records() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((RECORDS / "attacks").glob("*.json"))}


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


def page(
    groups: Sequence[Group], records: Records, tuned: Records | None = None, attacks: Records | None = None
) -> str:
    """The text of docs/best.md; `tuned` are the records of baselines.py, `attacks` those of attacks.py."""
    compared = comparison(records, tuned or {})
    lines = [
        "<!-- Written by `python docs/figures/make_best_page.py page` from experiments/best/records. Do not edit. -->",
        "",
        "# Best known settings",
        "",
        *_wrapped(INTRODUCTION),
        "",
        *_overview(groups, records),
        "",
        *_wrapped(f"{verdict(groups, records)} {lead(compared)}".strip()),
        "",
        *_wrapped(READING),
    ]
    for group in groups:
        if group.rows:
            lines += ["", f"## {group.title}", "", *_wrapped(group.note), "", *_table(group, records)]
            lines += ["", "```sh", *(line for row in group.rows for line in _typed(row.command())), "```"]
        if group.key == "own-noise" and tuned is not None:
            lines += ["", "## How the settings were chosen", "", *_wrapped(CHOICE)]
            lines += ["", *_published_methods(compared, tuned)]
        if group.key == "epsilon":
            lines += ["", "![Accuracy against epsilon](figures/best.svg)"]
    lines += _attacks(attacks) if attacks else []
    return "\n".join([*lines, *_open(groups, records, tuned)]) + "\n"


def _overview(groups: Sequence[Group], records: Records) -> list[str]:
    """A line for each of the main sections: its first epsilon, on MNIST and on CIFAR-10."""
    lines = _head("federation and adversary", "method", "epsilon", "MNIST", "CIFAR-10")
    for group in (group for group in groups if group.key in MAIN and group.rows):
        first, anchor = group.rows[0], re.sub(r"[^a-z0-9]+", "-", group.title.lower())
        of = {row.data: _shown(records.get(row.id)) for row in group.rows if row.what == first.what}
        cells = [f"[{group.title}](#{anchor})", first.config().method["name"], first.what.split()[-1]]
        lines.append(f"| {' | '.join([*cells, of['MNIST'], of.get('CIFAR-10', '-')])} |")
    return lines


def readme(text: str, compared: Sequence[Compared]) -> str:
    """README with the lead over tuned methods between its marks."""
    before, _, rest = text.partition(MARKS[0])
    _, mark, after = rest.partition(MARKS[1])
    assert mark
    inside = "\n".join([MARKS[0], *_wrapped(f"{lead(compared)} {MORE}".strip()), MARKS[1]])
    return before + inside + after


@dataclass(frozen=True)
class Compared:
    """The recommended method beside the tuned ones, in one federation at one epsilon; None: not run."""

    federation: str
    data: str
    epsilon: float
    recommended: Mapping[str, Any] | None
    others: Mapping[str, Mapping[str, Any] | None]

    def ahead(self) -> float | None:
        """By how many points the recommended method leads the best of the others, if all of them were run."""
        others = [other for other in self.others.values() if other is not None]
        if self.recommended is None or len(others) < len(METHODS):
            return None
        return accuracy_of(self.recommended) - max(map(accuracy_of, others))


def comparison(records: Records, tuned: Records) -> list[Compared]:
    """A line for every federation, data set and epsilon of best_baselines.toml."""
    found: dict[tuple[str, str, float], Compared] = {}
    for baseline in baselines.read_baselines():
        tests = {test["asked"]: test for test in tuned.get(baseline.key, {}).get("tests", ())}
        for epsilon, row in zip(baseline.epsilons, baseline.recommended, strict=True):
            key = (baseline.title, baseline.data, epsilon)
            line = found.setdefault(key, Compared(*key, records.get(row), {}))
            found[key] = replace(line, others={**line.others, baseline.method: tests.get(epsilon)})
    order = list(dict.fromkeys(one.federation for one in found.values()))
    return sorted(
        found.values(), key=lambda one: (list(DATA).index(one.data), order.index(one.federation), one.epsilon)
    )


def lead(compared: Sequence[Compared]) -> str:
    """By how much the recommended method leads, where everything was run."""
    ahead = sorted(by for one in compared if (by := one.ahead()) is not None)
    if not ahead:
        return ""
    points = f"{ahead[0]:.1f} points (one comparison)"
    if len(ahead) > 1:
        points = f"{ahead[0]:.1f} to {ahead[-1]:.1f} points"
        points += f" ({len(ahead)} comparisons, median {statistics.median(ahead):.1f})"
    return (
        f"At the same federation and epsilon the recommended method leads the best of {', '.join(METHODS[:-1])} and "
        f"{METHODS[-1]}, each tuned in eight trials, by {points}."
    )


def _published_methods(compared: Sequence[Compared], tuned: Records) -> list[str]:
    """The section of tuned baselines: what was compared, and the settings that were found."""
    lines = ["## Beside published methods, tuned", "", *_wrapped(COMPARISON), ""]
    lines += _head("federation", "data", "epsilon", "recommended", *METHODS, "ahead by")
    for one in compared:
        by = one.ahead()
        cells = [one.federation, DATA[one.data], f"{one.epsilon:.2f}", _shown(one.recommended)]
        cells += [_shown(one.others.get(method)) for method in METHODS]
        lines.append(f"| {' | '.join(cells)} | {'' if by is None else f'{by:.1f}'} |")
    lines += ["", "Settings found, and the accuracy on held-out images of the worst and the best trial:", ""]
    lines += _head("`python experiments/best/baselines.py run ...`", "settings", "worst", "best")
    for key, record in sorted(tuned.items()):
        scores = [100 * trial["held_out"] for trial in record["trials"]]
        values = ", ".join(f"{name} {value}" for name, value in record["chosen"].items())
        lines.append(f"| `{key}` | {values} | {min(scores):.1f} | {max(scores):.1f} |")
    return lines


def _shown(record: Mapping[str, Any] | None) -> str:
    """The mean over seeds and its deviation."""
    if record is None:
        return "not run"
    seeds = [100 * run["accuracy"] for run in record["runs"]]
    # Spaces that do not break: a number stays in one line on a phone.
    return f"{statistics.fmean(seeds):.2f}" + (
        f"\u00a0±\u00a0{statistics.stdev(seeds):.2f}" if len(seeds) > 1 else ""
    )


def _attacks(attacks: Records) -> list[str]:
    """The section of attacks on the recommended image setting."""
    lines = ["", "## Attacks on the recommended setting", ""]
    if (found := attacks.get("inversion")) is not None:
        lines += [*_wrapped(INVERSION.format(**found)), ""]
        lines += _head("what the attacker has", "cosine of features", "PSNR of images, dB")
        lines += [
            f"| {name} | {score['cosine']:.3f} | {score['psnr']:.1f} |"
            for name, score in found["views"].items()
        ]
    if (found := attacks.get("membership")) is not None:
        lines += ["", *_wrapped(MEMBERSHIP.format(**found)), ""]
        lines += _head("attack", "members", "others", "AUC (0.5 is chance)", "95 % interval")
        for one in found["attacks"]:
            auc = one["auc"]
            cells = f"{one['members']} | {one['others']} | {auc['value']:.3f} | {auc['low']:.3f} to {auc['high']:.3f}"
            lines.append(f"| {one['attack']} | {cells} |")
    return lines


def verdict(groups: Sequence[Group], records: Records) -> str:
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
    """The lines of a text, whose paragraphs are separated by empty lines."""
    wrap = partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join("\n".join(wrap(paragraph)) for paragraph in text.split("\n\n")).split("\n")


def _head(*heads: str) -> list[str]:
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]


def _typed(command: str, width: int = 92) -> list[str]:
    """A command as lines of a shell."""
    first, *sets = command.split(" --set ")
    lines = [first]
    for part in sets:
        if len(lines[-1]) + len(part) + 9 > width:
            lines[-1] += " \\"
            lines.append(f"  --set {part}")
        else:
            lines[-1] += f" --set {part}"
    return lines


def _table(group: Group, records: Records) -> list[str]:
    compared = [
        name for name in ("published", "target", "stretch") if any(getattr(row, name) for row in group.rows)
    ]
    only_epsilon = all(row.what.startswith("epsilon ") for row in group.rows)
    setting = [] if only_epsilon else ["setting"]
    heads = ["data", *setting, "epsilon", "accuracy", "seeds", *compared, *["reached"] * bool(compared)]
    lines = _head(*heads)
    for row in group.rows:
        record = records.get(row.id)
        missing = len(_missing(group, row, records))
        cells = [row.data, *[row.what] * len(setting)]
        cells.append(f"{record['epsilon']:.2f}" if record else row.what.split()[-1] if only_epsilon else "-")
        cells += [
            _shown(record),
            f"{group.seeds - missing} of {group.seeds}" if missing else f"{group.seeds}",
        ]
        if compared:
            numbers = [getattr(row, name) for name in compared]
            cells += ["-" if value is None else f"{value:.1f}" for value in numbers]
            cells.append("" if record is None else reached(row, record))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _missing(group: Group, row: Row, records: Records) -> list[int]:
    """The seeds of a row that have no record."""
    done = {run["seed"] for run in records.get(row.id, {"runs": ()})["runs"]}
    return [seed for seed in range(group.seeds) if seed not in done]


def _open(groups: Sequence[Group], records: Records, tuned: Records | None) -> list[str]:
    """How many seeds and which tuned methods have no record, and how long they take on one core."""
    missing = [(row, len(_missing(group, row, records))) for group in groups for row in group.rows]
    runs, minutes = sum(seeds for _, seeds in missing), sum(seeds * row.minutes for row, seeds in missing)
    lines = [f"- Seeds of the rows above: {runs}, {minutes:g} minutes."] if runs else []
    absent = [one for one in baselines.read_baselines() if tuned is not None and one.key not in tuned]
    if absent:
        keys = ", ".join(f"`{one.key}`" for one in absent)
        text = (
            f"Tuned methods: {keys}. Each is `python experiments/best/baselines.py run NAME`; together they take "
            f"{sum(one.minutes for one in absent):g} minutes."
        )
        first, *rest = _wrapped(text, 98)
        lines += [f"- {first}", *(f"  {line}" for line in rest)]
    return ["", "## Not run yet", "", "On one core:", "", *lines] if lines else []


@in_style
def figure(groups: Sequence[Group], records: Records) -> Figure:
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
    groups, records, tuned = read_rows(), read_records(), read_baseline_records()
    write_atomically(PAGE, page(groups, records, tuned, read_attack_records()).encode())
    write_atomically(README, readme(README.read_text(), comparison(records, tuned)).encode())
    save_figure(figure(groups, records), FIGURE)


if __name__ == "__main__":
    main()
