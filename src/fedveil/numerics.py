"""The version of the arithmetic that produced a result: runs of different numerics are not the same experiment.

A release of fedveil that changes the bits of private results for the same configuration and seed increases the number.
One that changes only single methods keeps `NUMERICS` and increases their `Method.numerics`. A results folder and its
checkpoints store the number of their method; a folder without one has numerics 1.

1: privacy noise drawn and added in floating point.
2: privacy noise exact on a grid, sums of uploads and of clipped gradients in float64 (docs/noise.md).
"""

from __future__ import annotations

import json
from pathlib import Path

from fedveil.errors import InputError

NUMERICS = 2
MARK = ".numerics"  # written when a run starts; the summary of a finished run holds the number, too
_FIRST = 1
_UNREADABLE = 0


def numerics_of(folder: Path) -> int | None:
    """The numerics of the run in this folder; None if no run has started or it is not recorded."""
    mark, summary = folder / MARK, folder / "summary.json"
    if mark.is_file():  # reading a pipe would block
        text = mark.read_text(errors="replace").strip()
        return int(text) if text.isdecimal() else _UNREADABLE
    if summary.is_file():
        return _told(summary)
    return _FIRST if (folder / ".identity").exists() else None


def require_numerics(place: Path, found: int | None, current: int) -> None:
    """Refuse results of other numerics than the method's `current` ones; `place` is the folder or file."""
    if found is None or found == current:
        return
    raise InputError(
        "numerics",
        found,
        f"{place} was written with other numerics than this version's ({current}), so its results cannot be resumed, "
        "loaded or mixed with new ones",
        "Choose another folder with --results, or remove it to run it again. `fedveil report` can still show it.",
    )


def _told(summary: Path) -> int | None:
    try:
        content = json.loads(summary.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None  # the reader of the summary reports the damage
    if not isinstance(content, dict):
        return None
    found = content.get("numerics", _FIRST)
    return found if type(found) is int else _UNREADABLE
