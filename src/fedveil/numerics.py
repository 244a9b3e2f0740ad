"""By which arithmetic results were made: runs of different numerics are not the same experiment.

A version of fedveil that changes the bits of private results for the same configuration and seed gets the next number.
One that changes those of single methods leaves `NUMERICS` as it is and raises `Method.numerics` of these methods.
A results folder and its checkpoints carry the number of their method; a folder without one is of numerics 1.

1: privacy noise drawn and added in floating point.
2: privacy noise exact on a grid, sums of uploads and of clipped gradients in float64 (docs/noise.md).
"""

from __future__ import annotations

import json
from pathlib import Path

from fedveil.errors import InputError

NUMERICS = 2
MARK = ".numerics"  # in a run's folder from its beginning; a finished run's summary has the number, too
_FIRST = 1
_UNREADABLE = 0


def numerics_of(folder: Path) -> int | None:
    """The numerics that the run in this folder was made by; None where no run has begun or nothing tells."""
    mark, summary = folder / MARK, folder / "summary.json"
    if mark.is_file():  # a pipe would never end
        text = mark.read_text(errors="replace").strip()
        return int(text) if text.isdecimal() else _UNREADABLE
    if summary.is_file():
        return _told(summary)
    return _FIRST if (folder / ".identity").exists() else None


def require_numerics(place: Path, found: int | None, current: int) -> None:
    """Refuse what other numerics than the method's `current` ones made; `place` is the folder or file."""
    if found is None or found == current:
        return
    raise InputError(
        "numerics",
        found,
        f"{place} was made by other numerics than this version's ({current}), so its results cannot be resumed, "
        "read back or mixed with new ones",
        "Choose another folder with --results, or remove it to run it again. `fedveil report` still shows it alone.",
    )


def _told(summary: Path) -> int | None:
    try:
        content = json.loads(summary.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None  # damaged: said by whoever reads it
    if not isinstance(content, dict):
        return None
    found = content.get("numerics", _FIRST)
    return found if type(found) is int else _UNREADABLE
