"""The reproduction pages of the documentation, made of the tables and their records alone.

`fedveil reproduce --pages docs` writes one page per paper, the scoreboard and the README's copy of it; a test holds the
pages to the records. A paper's `findings.md`, beside its tables, says in words what came out; its first paragraph is
the sentence of the scoreboard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fedveil.experiment.records import Entry, Records
from fedveil.experiment.reproduce import number
from fedveil.experiment.tables import PAPERS, PublishedTable, Row, list_tables
from fedveil.experiment.verdicts import Measured, Order, Verdict, level_reproduced, order_of, verdicts

TITLES = {"fedceo": "FedCEO", "fedlap-dp": "FedLAP-DP", "dp-fedags": "DP-FedAGS", "fedem": "FedEM"}
_MARKS = ("<!-- scoreboard -->", "<!-- end of scoreboard -->")
_GENERATED = "<!-- Written by `fedveil reproduce --pages docs` from experiments/. Do not edit. -->"
_RULE = """A row has the published **level** if its mean is within the larger of the table's tolerance and the
mean's 95 % interval over seeds. A row that misses it has the **order** if it stands in the published order to every
other row of its group. The order of a table is reproduced if Kendall's tau over all pairs in one group is at least 0.6
and, with several seeds, its 95 % interval lies above 0. A table has the level if four fifths of its rows that were run
have it."""


@dataclass(frozen=True)
class _Judged:
    """A table with what was measured of it at full scale."""

    table: PublishedTable
    records: Records
    rows: tuple[Measured, ...]

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
        docs / "reproduction" / f"{paper}.md": _page(paper, tables, folder)
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
        found.append(_Judged(table, kept, tuple(kept.measured(row) for row in table.rows)))
    return found


def _findings(folder: Path, paper: str) -> str:
    path = folder / paper / "findings.md"
    return path.read_text().strip() if path.exists() else ""


def _scoreboard(papers: dict[str, list[_Judged]], folder: Path) -> str:
    lines = [
        "| paper | rows | run at full scale | level reproduced | order reproduced | in one sentence |",
        "|---|---|---|---|---|---|",
    ]
    for paper, tables in papers.items():
        judged = [row for one in tables for row in one.judged]
        ordered = [one for one in tables if one.order().pairs]
        right = sum(one.order().reproduced for one in ordered)
        sentence = " ".join(_findings(folder, paper).split("\n\n")[0].split())
        lines.append(
            f"| [{TITLES[paper]}]({paper}.md) | {sum(len(one.rows) for one in tables)} | "
            f"{sum(len(one.run) for one in tables)} | {sum(one.levels for one in tables)} of {len(judged)} rows | "
            f"{right} of {len(ordered)} tables | {sentence} |"
        )
    return "\n".join(lines) + "\n"


def _index(board: str) -> str:
    return f"""{_GENERATED}

# What came out beside what was published

{board}
{_RULE}

Every number is a record under `experiments/records/`, made by one command per table:

```sh
fedveil reproduce fedceo                                                    # its tables, rows and times
fedveil reproduce fedceo table-1-emnist --rows "sigma 2.0" --seeds 1        # run, judge, record
fedveil reproduce --pages docs                                              # write these pages
```
"""


def _page(paper: str, tables: Sequence[_Judged], folder: Path) -> str:
    parts = [_GENERATED, f"# {TITLES[paper]}", _findings(folder, paper), "## Tables", _overview(tables)]
    parts += [_section(one) for one in tables if one.run]
    parts += ["## How it is judged", _RULE]
    return "\n\n".join(part for part in parts if part) + "\n"


def _overview(tables: Sequence[_Judged]) -> str:
    lines = [
        "| table | rows | run | level | order (Kendall's tau) | time of one seed, one core |",
        "|---|---|---|---|---|---|",
    ]
    for one in tables:
        head, order = one.table.content.table, one.order()
        name = f"{head.title} (`{one.table.name}`)"
        lines.append(
            f"| {name} | {len(one.rows)} | {len(one.run)} | "
            + (f"{one.levels} of {len(one.judged)}" if one.judged else "")
            + f" | {_tau(order)} | {_cost(one)} |"
        )
    return "\n".join(lines)


def _tau(order: Order) -> str:
    if order.tau is None:
        return ""
    interval = "" if order.low is None else f" ({order.low:.2f} to {order.high:.2f})"
    return f"{'reproduced' if order.reproduced else 'not reproduced'}, {order.tau:.2f}{interval}"


def _cost(one: _Judged) -> str:
    """What all rows cost, as far as those that were run tell."""
    times = [row.seconds / len(row.values) for row in one.run]
    if not times:
        return f"not run: `fedveil reproduce {one.table.paper} {one.table.name} --estimate`"
    total = fmean(times) * len(one.rows)
    rough = "about " if len(times) < len(one.rows) else ""
    return f"{rough}{total / 60:.0f} minutes" if total >= 90 else f"{rough}{total:.0f} s"


def _section(one: _Judged) -> str:
    head = one.table.content.table
    lines = [f"### {head.title}", ""]
    if head.note:
        lines += [head.note, ""]
    lines += [
        "| row | paper | here | verdict | seeds | last round | best | before last | own models | proven epsilon |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, measured in zip(one.table.rows, one.rows, strict=True):
        entry = one.records.entry(row)
        if measured.values and entry is not None:
            lines.append(_line(one, row, measured, entry))
    missing = len(one.rows) - len(one.run)
    if missing:
        lines += ["", f"{missing} rows were not run."]
    return "\n".join(lines)


def _line(one: _Judged, row: Row, measured: Measured, entry: Entry) -> str:
    metric = one.table.metric(row)
    here = number(measured.mean, metric)
    if measured.half_width is not None:
        here += f" ± {number(measured.half_width, metric)}"
    seeds = list(entry["seeds"].values())
    columns = [_mean(seeds, key, "accuracy") for key in ("accuracy", "best", "before_last", "personal")]
    epsilon = seeds[0].get("epsilon", {})
    proven = "; ".join(f"{who}: {value:.3g}" for who, value in epsilon.items() if value is not None) or "none"
    return (
        f"| {row.name} | {number(row.published, metric)} | {here} | {one.verdict(row)} | {len(seeds)} | "
        f"{' | '.join(columns)} | {proven} |"
    )


def _mean(seeds: Sequence[Entry], key: str, metric: str) -> str:
    values = [one[key] for one in seeds if one.get(key) is not None]
    return number(fmean(values), metric) if values else ""
