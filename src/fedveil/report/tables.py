"""Results as tables: on the terminal, in Markdown and in LaTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from fedveil.privacy.statement import show


def megabytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB"


def proven_epsilon(summary: Mapping[str, Any], adversary: str) -> str:
    """The proven epsilon against this adversary, or a dash where nothing is proven."""
    rows = [row for row in summary["privacy"]["proven"] if row["adversary"] == adversary]
    values = [row["epsilon"] for row in rows if row["epsilon"] is not None]
    return show(values[0]) if values else "none"


def results_table(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """One row per run: accuracy, proven epsilon, traffic and time."""
    table = Table(title="Results", title_justify="left")
    table.add_column("method")
    table.add_column("seed", justify="right")
    table.add_column("accuracy", justify="right")
    table.add_column("ε observer", justify="right")
    table.add_column("ε server", justify="right")
    table.add_column("sent up", justify="right")
    table.add_column("sent down", justify="right")
    table.add_column("seconds", justify="right")
    for summary in summaries:
        accuracy = summary["accuracy"]
        table.add_row(
            summary["method"],
            str(summary["seed"]),
            "-" if accuracy is None else f"{100 * accuracy:.2f} %",
            proven_epsilon(summary, "observer"),
            proven_epsilon(summary, "server"),
            megabytes(summary["bytes_up"]),
            megabytes(summary["bytes_down"]),
            f"{summary['seconds']:.1f}",
        )
    return table


def guarantees_table(rows: Sequence[Mapping[str, Any]], title: str = "Proven") -> Table:
    """One row per unit and adversary: epsilon, and beneath the table each proof or why there is none."""
    notes: list[str] = []
    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in ("against", "unit", "ε", "δ", "neighbours", "sampler", "note"):
        table.add_column(column, justify="right" if column in ("ε", "δ", "note") else "left")
    for row in rows:
        epsilon = "none" if row["epsilon"] is None else show(row["epsilon"])
        note = row["theorem"] if row["epsilon"] is not None else row.get("reason", "")
        if note not in notes:
            notes.append(note)
        number = str(notes.index(note) + 1)
        cells = (
            row["adversary"],
            row["unit"],
            epsilon,
            f"{row['delta']:g}",
            row["adjacency"],
            row["sampler"],
        )
        table.add_row(*cells, number)
    table.caption = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, start=1))
    return table
