"""Values that are not there: what spreadsheets and data frames write for one, which is no class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedveil.errors import DataError

MISSING_MARKS = ("", "?", "nan", "na", "n/a", "#n/a", "<na>", "null", "nat")
"""What spreadsheets and data frames write for a missing value, in small letters."""


def require_labels(path: Path, what: str, cells: Sequence[str], place: Callable[[int], str]) -> None:
    """Refuse missing labels; `what` holds them, and `place` says where in the file the label at an index stands."""
    rows = [row for row, cell in enumerate(cells) if cell.strip().casefold() in MISSING_MARKS]
    if rows:
        first = cells[rows[0]].strip()
        shown = f"is {first!r}" if first else "is empty"
        raise DataError(
            f"{path}: {what} {shown} in {place(rows[0])}: {len(rows)} of {len(cells)} labels are missing. Fill them in "
            "or drop these rows; a class of this name needs another one.",
            field=what.removeprefix("column ").strip("'"),
        )
