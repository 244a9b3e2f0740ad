"""A run's summary as tables and lines for the terminal, and how sizes and epsilons are shown in any table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from fedveil.privacy.statement import show

AGAINST = ("observer", "server")  # whose epsilons have a column
_OTHER_SCORES = {"mcc": "mcc", "perplexity": "per-\nplexity", "r2": "R²", "concordance": "concor-\ndance"}


def size(count: float) -> str:
    """Bytes with a unit in which they are neither 0.00 nor a long number."""
    if count < 1e5:
        return f"{count / 1e3:.2f} kB"
    return f"{count / 1e6:.2f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


def epsilon_cells(proofs: Sequence[Mapping[str, tuple[float, str] | None]]) -> tuple[str, list[list[str]]]:
    """What heads are to add (the unit, if all share one) and the cells, which name it where units differ."""
    units = {proof[1] for row in proofs for proof in row.values() if proof is not None}
    cells = [
        [
            "none"
            if (proof := row[adversary]) is None
            else show(proof[0])
            if len(units) == 1
            else f"{show(proof[0])} {proof[1]}"
            for adversary in AGAINST
        ]
        for row in proofs
    ]
    return (f" {units.pop()}" if len(units) == 1 else ""), cells


def _proof(summary: Mapping[str, Any], adversary: str) -> tuple[float, str] | None:
    """Epsilon and unit proven against this adversary: for whole clients if that is proven, else for records."""
    rows = [
        (row["epsilon"], row["unit"])
        for row in summary["privacy"]["proven"]
        if row["adversary"] == adversary and row["epsilon"] is not None
    ]
    return min(rows, key=lambda row: row[1] != "client", default=None)


def results_table(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """One row per run: accuracy or what the target has in its place, proven epsilon, traffic and time."""
    table = Table(title="Results", title_justify="left")
    table.add_column("method", no_wrap=True)
    others = [name for name in _OTHER_SCORES if any(name in summary for summary in summaries)]
    unit, epsilons = epsilon_cells([{who: _proof(summary, who) for who in AGAINST} for summary in summaries])
    heads = [f"ε {who}{unit}".replace(" ", "\n") for who in AGAINST]
    spelt = [_OTHER_SCORES[name] for name in others]
    for column in ("seed", "accuracy\n%", *spelt, *heads, "sent", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    for summary, epsilon in zip(summaries, epsilons, strict=True):
        accuracy = summary["accuracy"]
        table.add_row(
            summary["method"],
            str(summary["seed"]),
            "-" if accuracy is None else f"{100 * accuracy:.2f}",
            *(f"{summary[name]:.4g}" if name in summary else "-" for name in others),
            *epsilon,
            size(summary["bytes_up"] + summary["bytes_down"]),
            f"{summary['seconds']:.1f}",
        )
    return table


def text_notes(facts: Mapping[str, Any] | None) -> list[str]:
    """How texts became tokens, and how many were cut or left out, one line each; nothing for other data."""
    if facts is None:
        return []
    lines = [f"vocabulary: {facts['vocabulary']}"]
    for key, what in (("truncated", "cut to the length"), ("dropped", "left out as empty")):
        lines += [f"{count} {split} texts were {what}" for split, count in facts[key].items() if count]
    return lines


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
