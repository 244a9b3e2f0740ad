"""The JSON file of `compare.py`, written section by section: what was measured is kept when a later section fails."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def record(path: Path, machine: Mapping[str, Any], turns: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add these rows. Older ones of the same workloads are replaced; those of another machine or length are dropped."""
    head = {"machine": dict(machine), "turns": turns}
    measured = {row["what"] for row in rows}
    kept: list[Mapping[str, Any]] = []
    if path.exists():
        content = json.loads(path.read_text())
        if {key: content[key] for key in head} == head:
            kept = content["rows"]
    places = [row["what"] for row in kept]
    place = min((places.index(what) for what in measured if what in places), default=len(kept))
    before = [row for row in kept[:place] if row["what"] not in measured]
    after = [row for row in kept[place:] if row["what"] not in measured]
    content = {**head, "rows": [*before, *rows, *after]}
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(content, indent=1) + "\n")
    scratch.replace(path)
