"""The reproduction pages of the documentation, made of the tables and their records alone.

`fedveil reproduce --pages docs` writes one page per paper, the scoreboard and the README's copy of it; a test holds the
pages to the records. A paper's `findings.md`, beside its tables, says in words what came out; its first paragraph is
the sentence of the scoreboard. In it `{{TABLE | ROW}}` stands for what was measured of a row, and
`{{TABLE | ROW | best}}` for its best round (or `last`, `before last`, `own models`), so that words and records agree; a
row that is not on record is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from textwrap import fill

from fedveil.errors import InputError
from fedveil.experiment.estimates import Cost, cost, together
from fedveil.experiment.records import Entry, Records
from fedveil.experiment.reproduce import counted, number
from fedveil.experiment.tables import PAPERS, PublishedTable, Row, list_tables, readings
from fedveil.experiment.verdicts import (
    ATTACK_TOLERANCES,
    RULE,
    Measured,
    Order,
    Proven,
    Verdict,
    level_reproduced,
    order_of,
    verdicts,
)

TITLES = {"fedceo": "FedCEO", "fedlap-dp": "FedLAP-DP", "dp-fedags": "DP-FedAGS", "fedem": "FedEM"}
_PLACE = re.compile(r"\{\{([^|{}]+)\|([^|{}]+)(?:\|([^|{}]+))?\}\}")
_COLUMNS = {"last": "accuracy", "best": "best", "before last": "before_last", "own models": "personal"}
_MARKS = ("<!-- scoreboard -->", "<!-- end of scoreboard -->")
_GENERATED = "<!-- Written by `fedveil reproduce --pages docs` from experiments/. Do not edit. -->"
_JUDGED = "How levels, orders, attacks and epsilons are judged: [the rule](index.md#how-it-is-judged)."
_COSTS = """\
The columns "not run would take" are for one seed on one core, without attacks, from the processor time of measured
rounds of each method (`experiments/records/estimates/`, made by `--estimate`). Where not one round ended within the
measurement, or a table was not measured, it takes more than that. Rounds that smooth, every I-th one of FedCEO, were
not among them."""


@dataclass(frozen=True)
class _Judged:
    """One reading of a table with what was measured of it at full scale."""

    table: PublishedTable
    reading: str
    published: tuple[Row, ...]
    records: Records
    rows: tuple[Measured, ...]

    @property
    def title(self) -> str:
        return self.table.content.table.title + (f", {self.reading}" if self.reading else "")

    @property
    def run(self) -> list[Measured]:
        return [row for row in self.rows if row.values]

    @property
    def judged(self) -> list[Measured]:
        return [row for row in self.run if row.published is not None]

    @property
    def levels(self) -> int:
        return sum(verdict == "level" for verdict in self._verdicts().values())

    def order(self) -> Order:
        return order_of(self.rows)

    def level(self) -> bool:
        return level_reproduced(list(self._verdicts().values()))

    def attacked(self) -> dict[str, list[Measured]]:
        """The rows' attacks by score, of those that were carried out."""
        found = {
            score: [self.records.attacked(row, score) for row in self.published]
            for score in ATTACK_TOLERANCES
        }
        return {
            score: rows
            for score, rows in found.items()
            if any(row.values and row.published is not None for row in rows)
        }

    def attack_verdicts(self) -> list[Verdict]:
        return [
            verdict
            for score, rows in self.attacked().items()
            for verdict in verdicts(rows, ATTACK_TOLERANCES[score]).values()
            if verdict != "not run"
        ]

    def claims(self) -> list[Proven]:
        """Of the rows that were run and whose epsilon is claimed."""
        found = [self.records.proven(row) for row in self.published]
        return [verdict for verdict in found if verdict != "not run"]

    def open_cost(self) -> Cost:
        """What one seed of the rows that were not run takes."""
        run = {row.row for row in self.run}
        rest = [row for row in self.published if row.name not in run]
        return cost(self.table, rest, self.records.folder, like=self.table.rows)

    def verdict(self, row: Row) -> str:
        return self._verdicts().get(row.name, "")

    def _verdicts(self) -> dict[str, Verdict]:
        return verdicts(self.rows, self.table.content.table.tolerance)


def write_pages(folder: Path, records: Path, docs: Path) -> list[Path]:
    """Write every page; the paths that were written."""
    written = []
    for path, text in pages(folder, records, docs).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        written.append(path)
    return written


def pages(folder: Path, records: Path, docs: Path) -> dict[Path, str]:
    """The text of every page by its path, as the records stand."""
    papers = {paper: _judged(folder, records, paper) for paper in PAPERS}
    found = {
        docs / "reproduction" / f"{paper}.md": _page(paper, tables, folder, records)
        for paper, tables in papers.items()
    }
    board = _scoreboard(papers, folder)
    found[docs / "reproduction" / "index.md"] = _index(board)
    readme = docs.parent / "README.md"
    if readme.exists() and _MARKS[0] in (text := readme.read_text()):
        board = board.replace("](", "](docs/reproduction/")
        before, rest = text.split(_MARKS[0])
        found[readme] = f"{before}{_MARKS[0]}\n{board}{_MARKS[1]}{rest.split(_MARKS[1])[1]}"
    return found


def _judged(folder: Path, records: Path, paper: str) -> list[_Judged]:
    found = []
    for table in list_tables(folder, paper):
        kept = Records(table, records)
        for reading, rows in readings(table.rows).items():
            measured = tuple(kept.measured(row) for row in rows)
            found.append(_Judged(table, reading, tuple(rows), kept, measured))
    return found


def _findings(folder: Path, paper: str, tables: Sequence[_Judged]) -> str:
    path = folder / paper / "findings.md"
    text = path.read_text().strip() if path.exists() else ""
    said = _PLACE.sub(
        lambda found: _told(path, tables, *(" ".join(part.split()) for part in found.groups(""))), text
    )
    return "\n\n".join(map(_paragraph_or_list, said.split("\n\n")))


def _paragraph_or_list(text: str) -> str:
    if not text.startswith("- "):
        return _wrapped(" ".join(text.split()))
    return "\n".join(_item(" ".join(item.split())) for item in text.removeprefix("- ").split("\n- "))


def _told(path: Path, tables: Sequence[_Judged], table: str, name: str, column: str) -> str:
    """The number that stands for a row in the findings: what is compared with the paper, or another column."""
    for one in tables:
        for row, measured in zip(one.published, one.rows, strict=True):
            if (one.table.name, row.name) == (table, name) and measured.values:
                if not column:
                    return number(measured.mean, one.table.metric(row))
                entry = one.records.entry(row) or {"seeds": {}}
                if found := _mean(list(entry["seeds"].values()), _COLUMNS.get(column, column), "accuracy"):
                    return found
    raise InputError(
        str(path),
        " | ".join(part for part in (table, name, column) if part),
        "is not on record",
        f"Name a table and a row that were run, and none or one of these columns: {', '.join(_COLUMNS)}.",
    )


def _scoreboard(papers: dict[str, list[_Judged]], folder: Path) -> str:
    """A row of counts for each paper, and below the table what came out in words."""
    lines = [
        "| paper | rows | run at full scale | not run would take | level reproduced | order reproduced | attacks "
        "reproduced | claimed epsilon proven |",
        "|---|---|---|---|---|---|---|---|",
    ]
    words = []
    for paper, tables in papers.items():
        judged = [row for one in tables for row in one.judged]
        ordered = [one for one in tables if one.order().pairs]
        right = sum(one.order().reproduced for one in ordered)
        link = f"[{TITLES[paper]}]({paper}.md)"
        lines.append(
            f"| {link} | {sum(len(one.rows) for one in tables)} | {sum(len(one.run) for one in tables)} | "
            f"{together([one.open_cost() for one in tables]).in_words()} | "
            f"{_of(sum(one.levels for one in tables), len(judged), 'rows')} | "
            f"{_of(right, len(ordered), 'tables')} | {_attack_score(tables)} | {_claim_score(tables)} |"
        )
        said = " ".join(_findings(folder, paper, tables).split("\n\n")[0].split())
        words.append(_item(f"**{TITLES[paper]}**: {said}"))
    return "\n".join([*lines, "", *words]) + "\n"


def _item(text: str) -> str:
    return fill(
        text, 100, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def _attack_score(tables: Sequence[_Judged]) -> str:
    if not any(row.published_attack for one in tables for row in one.published):
        return "none published"
    judged = [verdict for one in tables for verdict in one.attack_verdicts()]
    orders = [order for one in tables for rows in one.attacked().values() if (order := order_of(rows)).pairs]
    level = sum(verdict == "level" for verdict in judged)
    right = sum(order.reproduced for order in orders)
    orders_told = f", {right} of {len(orders)} orders" if orders else ""
    return _of(level, len(judged), "scores") + orders_told


def _claim_score(tables: Sequence[_Judged]) -> str:
    if all(row.claim is None for one in tables for row in one.published):
        return "no number claimed"
    found = [verdict for one in tables for verdict in one.claims()]
    return _of(sum(verdict == "proven" for verdict in found), len(found), "rows")


def _of(count: int, of: int, what: str) -> str:
    return f"{count} of {of} {what}" if of else "not run"


def _index(board: str) -> str:
    return f"""{_GENERATED}

# Reproduction

{board}
## How it is judged

{_wrapped(RULE)}

## What the rest would take

{_wrapped(_COSTS)}

## How to repeat it

Every number is a record under `experiments/records/`, made by one command per table:

```sh
fedveil reproduce fedceo                                                # its tables
fedveil reproduce fedceo table-1-emnist --rows "sigma 2.0" --seeds 1    # run, judge, record
fedveil reproduce --pages docs                                          # write these pages
```
"""


def _page(paper: str, tables: Sequence[_Judged], folder: Path, records: Path) -> str:
    words = _findings(folder, paper, tables)
    parts = [_GENERATED, f"# {TITLES[paper]}", _verdict(tables), words, "## Tables", _overview(tables)]
    parts += [_section(one) for one in tables if one.run]
    parts += [_measured(path) for path in sorted(records.glob(f"{paper}-*.json"))]
    parts.append(_JUDGED)
    return "\n\n".join(_wrapped(part) for part in parts if part) + "\n"


def _verdict(tables: Sequence[_Judged]) -> str:
    """The first sentence of a page: how much was run, and what of it agrees with the paper."""
    rows, run = sum(len(one.rows) for one in tables), sum(len(one.run) for one in tables)
    rest = together([one.open_cost() for one in tables])
    left = (
        f"One seed of those that were not run would take {rest.in_words()} of one core." if rest.known else ""
    )
    if not run:
        return f"**Verdict: open.** None of the {rows} rows has been run at full scale. {left}"
    judged = sum(len(one.judged) for one in tables)
    ordered = [one for one in tables if one.order().pairs]
    levels, right = sum(one.levels for one in tables), sum(one.order().reproduced for one in ordered)
    order = f"the order is reproduced in {right} of {counted(len(ordered), 'table')}"
    return (
        f"**Verdict.** Run at full scale: {run} of {rows} rows{_readings(tables)}. The published level is reached by "
        f"{levels} of {judged}; {order if ordered else 'no two of them have a published order'}. {left}"
    )


def _readings(tables: Sequence[_Judged]) -> str:
    """Said where a published value stands in several rows."""
    names = sorted({one.reading for one in tables if one.reading})
    return (
        f" (a published value has a row for each reading; marked ones: {', '.join(names)})" if names else ""
    )


def _wrapped(text: str) -> str:
    """Paragraphs of prose at 100 columns; tables, headings and lists as they are."""
    return "\n\n".join(
        part
        if part.startswith(("|", "#", "- ", "<"))
        else fill(" ".join(part.split()), 100, break_on_hyphens=False, break_long_words=False)
        for part in text.split("\n\n")
    )


def _measured(path: Path) -> str:
    """What was measured beside the tables: a record that brings its own columns."""
    content = json.loads(path.read_text())
    heads = list(content["rows"][0])
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---|" * (len(heads) - 1)]
    lines += [f"| {' | '.join(str(row[head]) for head in heads)} |" for row in content["rows"]]
    said = f"{content['note']} Made by `{content['command']}`."
    return "\n\n".join((f"### {content['title']}", _wrapped(said), "\n".join(lines)))


def _overview(tables: Sequence[_Judged]) -> str:
    lines = [
        "| table | rows | run | level | order (Kendall's tau) | not run would take |",
        "|---|---|---|---|---|---|",
    ]
    for one in tables:
        order = one.order()
        name = f"{one.title} (`{one.table.name}`)"
        lines.append(
            f"| {name} | {len(one.rows)} | {len(one.run)} | "
            + (f"{one.levels} of {len(one.judged)}" if one.judged else "")
            + f" | {_tau(order)} | {one.open_cost().in_words()} |"
        )
    return "\n".join(lines)


def _tau(order: Order) -> str:
    if order.tau is None:
        return ""
    interval = ", no interval" if order.low is None else f" ({order.low:.2f} to {order.high:.2f})"
    said = "reproduced" if order.reproduced else "not reproduced"
    return f"{said}, {order.tau:.2f} over {counted(order.pairs, 'pair')}{interval}"


def _section(one: _Judged) -> str:
    head = one.table.content.table
    lines = [f"### {one.title}", ""]
    if head.note:
        lines += [_wrapped(head.note), ""]
    lines += [
        "| row | paper | here | verdict | seeds | last round | best | before last | own models "
        "| proven epsilon | claimed |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, measured in zip(one.published, one.rows, strict=True):
        entry = one.records.entry(row)
        if measured.values and entry is not None:
            lines.append(_line(one, row, measured, entry))
    lines += _attack_lines(one)
    missing = len(one.rows) - len(one.run)
    if missing:
        rows = f"{missing} rows were" if missing > 1 else "1 row was"
        lines += ["", f"{rows} not run (one seed on one core: {one.open_cost().in_words()})."]
    return "\n".join(lines)


def _attack_lines(one: _Judged) -> list[str]:
    """Published scores of attacks beside those here, and how far their orders agree."""
    attacked = one.attacked()
    if not attacked:
        return []
    heads = " | ".join(f"{score}, paper | here | verdict" for score in attacked)
    lines = ["", f"| attacked row | {heads} |", "|---|" + "---|---|---|" * len(attacked)]
    found = {score: verdicts(rows, ATTACK_TOLERANCES[score]) for score, rows in attacked.items()}
    for at, row in enumerate(one.published):
        if any(rows[at].values for rows in attacked.values()):
            cells = [
                f"{number(rows[at].published, score)} | {number(rows[at].mean, score)} | "
                f"{found[score].get(row.name, '')}"
                for score, rows in attacked.items()
            ]
            lines.append(f"| {row.name} | {' | '.join(cells)} |")
    orders = [f"{score} {_tau(order)}" for score, rows in attacked.items() if (order := order_of(rows)).pairs]
    return [*lines, "", _wrapped(f"Orders of the attacked rows: {'; '.join(orders)}.")] if orders else lines


def _line(one: _Judged, row: Row, measured: Measured, entry: Entry) -> str:
    metric = one.table.metric(row)
    here = number(measured.mean, metric)
    if measured.half_width is not None:
        here += f" ± {number(measured.half_width, metric)}"
    seeds = list(entry["seeds"].values())
    columns = [_mean(seeds, key, "accuracy") for key in _COLUMNS.values()]
    epsilon = seeds[0].get("epsilon", {})
    proven = "; ".join(f"{who}: {value:.3g}" for who, value in epsilon.items() if value is not None) or "none"
    return (
        f"| {row.name} | {number(row.published, metric)} | {here} | {one.verdict(row)} | {len(seeds)} | "
        f"{' | '.join(columns)} | {proven} | {_claim(one, row)} |"
    )


def _claim(one: _Judged, row: Row) -> str:
    if row.claim is None:
        return ""
    return f"{row.claim.unit}: {row.claim.epsilon:g}, {one.records.proven(row)}"


def _mean(seeds: Sequence[Entry], key: str, metric: str) -> str:
    values = [one[key] for one in seeds if one.get(key) is not None]
    return number(fmean(values), metric) if values else ""
