"""The table of accuracies in docs/secure-aggregation.md says what the records say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def what_it_buys() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "experiments" / "secure" / "what_it_buys.py"))


def test_the_page_is_written_from_the_records() -> None:
    made = what_it_buys()
    page = made["PAGE"].read_text()
    assert made["with_table"](page) == page


def test_records_are_complete() -> None:
    """Every kind, epsilon and seed; no epsilon above what was asked for."""
    made = what_it_buys()
    for path in sorted(made["RECORDS"].glob("secure-*.json")):
        rows = json.loads(path.read_text())
        if path.stem == "secure-noise":
            continue
        assert len(rows) == len(made["KINDS"]) * 2 * 3, path.name
        assert all(row["epsilon_against_server"] <= row["epsilon"] for row in rows)
