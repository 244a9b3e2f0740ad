"""Missing values, as written by spreadsheets and data frames, which are not a class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedveil.errors import DataError

MISSING_MARKS = ("", "?", "nan", "na", "n/a", "#n/a", "<na>", "null", "nat")
"""Texts that spreadsheets and data frames write for a missing value, in lower case."""


def require_labels(path: Path, what: str, cells: Sequence[str], place: Callable[[int], str]) -> None:
    """Refuse missing labels; `what` names their source, and `place` the position in the file of an index."""
    rows = [row for row, cell in enumerate(cells) if cell.strip().casefold() in MISSING_MARKS]
    if rows:
        first = cells[rows[0]].strip()
        shown = f"is {first!r}" if first else "is empty"
        raise DataError(
            f"{path}: {what} {shown} in {place(rows[0])}: {len(rows)} of {len(cells)} labels are missing. Fill them in "
            "or remove these rows from the file; rename a class of this name.",
            field="labels",
            value=len(rows),
        )
