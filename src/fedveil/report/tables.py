"""Comparisons of settings as tables: on the terminal, in Markdown and in LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from fedveil.report.groups import Setting, Spread, best_of, shared_measure
from fedveil.session.tables import AGAINST, epsilon_cells


def megabytes(count: float) -> str:
    """For a column in MB."""
    value = count / 1e6
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


@dataclass(frozen=True)
class Compared:
    """A setting's line in a comparison, as text without any markup."""

    name: str
    seeds: str
    score: str
    best: bool
    observer: str
    server: str
    sent: str
    seconds: str
    paper: str


def compared(settings: Sequence[Setting]) -> list[Compared]:
    """Mean and sample deviation per setting; the best score is marked if its interval overlaps with no other.

    Epsilons name their unit where the settings do not share one: a record's and a client's are no rivals.
    """
    best, measure = best_of(settings), shared_measure(settings)
    rows = []
    for s, (observer, server) in zip(settings, epsilon_cells(_proofs(settings))[1], strict=True):
        spread = s.score if s.measure == measure else None
        sent = Spread.of([_sum(run.bytes_up, run.bytes_down) for run in s.runs])
        seconds = Spread.of([run.seconds for run in s.runs])
        rows.append(
            Compared(
                s.name,
                str(len(s.runs)),
                "-"
                if spread is None
                else measure.formatted(spread.mean, spread.deviation).removesuffix(" %"),
                s is best,
                observer,
                server,
                "-" if sent is None else megabytes(sent.mean),
                "-" if seconds is None else f"{seconds.mean:.1f}",
                _published(s),
            )
        )
    return rows


def _heads(settings: Sequence[Setting], rows: Sequence[Compared]) -> list[str]:
    unit, _ = epsilon_cells(_proofs(settings))
    measure = shared_measure(settings)
    score = f"{measure.name} %" if measure.percent else measure.name
    heads = ["method", "seeds", score, f"ε observer{unit}", f"ε server{unit}", "sent MB", "time s", "paper %"]
    return heads if _any_paper(rows) else heads[:-1]


def _proofs(settings: Sequence[Setting]) -> list[dict[str, tuple[float, str] | None]]:
    found = [{who: s.proof(who) for who in AGAINST} for s in settings]
    return [
        {who: None if p is None or p.epsilon is None else (p.epsilon, p.unit) for who, p in row.items()}
        for row in found
    ]


def comparison_table(settings: Sequence[Setting]) -> Table:
    """For the terminal: one row per setting. Where room is short names and deviations take two lines."""
    table = Table(title="Results (mean ± deviation over seeds)", title_justify="left")
    rows = compared(settings)
    heads = _heads(settings, rows)
    for head in heads:
        named = head == "method"
        table.add_column(
            head.replace(" ", "\n"),
            justify="left" if named else "right",
            no_wrap=head not in heads[0:3:2],
            overflow="fold",
            min_width=10 if named else None,  # numbers before names, but not without them
        )
    for row in rows:
        cells = [Text(cell) for cell in _cells(row)[: len(heads)]]
        for place in (3, 4):  # the unit, where it is named, below its number
            cells[place] = Text(cells[place].plain.replace(" ", "\n"))
        if row.best:
            cells[2].stylize("bold")
        table.add_row(*cells)
    return table


def markdown_table(settings: Sequence[Setting]) -> str:
    """One row per setting, the best score bold."""
    rows = compared(settings)
    heads = _heads(settings, rows)
    lines = [_markdown(heads), "|" + "|".join([":--", *["--:"] * (len(heads) - 1)]) + "|"]
    for row in rows:
        cells = [_markdown_text(cell) for cell in _cells(row)[: len(heads)]]
        if row.best:
            cells[2] = f"**{cells[2]}**"
        lines.append(_markdown(cells))
    return "\n".join(lines) + "\n"


def latex_table(settings: Sequence[Setting]) -> str:
    """A booktabs table, the best score bold."""
    rows = compared(settings)
    heads = _heads(settings, rows)
    body = []
    for row in rows:
        cells = [_latex_text(cell) for cell in _cells(row)[: len(heads)]]
        if row.best:
            cells[2] = rf"\textbf{{{cells[2]}}}"
        body.append(" & ".join(cells) + r" \\")
    return "\n".join(
        [
            r"% Mean and sample deviation over seeds; needs \usepackage{booktabs}.",
            rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
            r"\toprule",
            " & ".join(_latex_text(head) for head in heads) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _cells(row: Compared) -> list[str]:
    return [
        row.name,
        row.seeds,
        row.score,
        row.observer,
        row.server,
        row.sent,
        row.seconds,
        row.paper,
    ]


def _any_paper(rows: Sequence[Compared]) -> bool:
    return any(row.paper != "-" for row in rows)


def _published(setting: Setting) -> str:
    paper = setting.first.paper
    return "-" if paper is None or paper.published is None else paper.published.removesuffix(" %")


def _sum(*parts: float | None) -> float | None:
    return sum(part or 0.0 for part in parts) if any(part is not None for part in parts) else None


def _markdown(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _markdown_text(text: str) -> str:
    for letter in "\\`*_[]<>|":
        text = text.replace(letter, "\\" + letter)
    return text


def _latex_text(text: str) -> str:
    special = {letter: "\\" + letter for letter in "&%$#_{}"}
    special |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {"ε": r"$\varepsilon$", "±": r"$\pm$", "<": r"$<$", ">": r"$>$"}
    return "".join(special.get(letter, letter) for letter in text)
