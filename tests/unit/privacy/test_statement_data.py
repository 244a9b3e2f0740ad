"""What a statement says about the data it speaks of."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fedveil.experiment.config import make_config
from fedveil.experiment.run import run_seed


def run(place: Path, **options: Any) -> dict[str, Any]:
    path = place / "visits.csv"
    rows = [(f"p{k % 20}", f"H{k % 2}", (k * 37 % 11) / 2, k % 2) for k in range(80)]
    path.write_text("who,h,a,y\n" + "".join(f"{who},{h},{a},{y}\n" for who, h, a, y in rows))
    data = {"path": str(path), "label": "y", "user": "h", **options}
    config = make_config(
        {
            "task": {"dataset": "table", "model": "logistic", "data_options": data},
            "partition": {"kind": "user"},
            "method": {"name": "dp-fedavg", "unit": "record", "epochs": 1, "batch_size": 4},
            "run": {"rounds": 1},
        }
    )
    return run_seed(config, 0, experiment="visits", results=place / "results").summary


def test_the_statement_names_the_source_of_scales_and_that_records_are_rows(tmp_path: Path) -> None:
    plain = run(tmp_path, drop=["who"])
    declared = run(tmp_path, drop=["who"], statistics="public")
    assert plain["privacy"]["data"][0] != declared["privacy"]["data"][0]
    for summary in (plain, declared):
        assert all(note in summary["privacy_in_words"] for note in summary["privacy"]["data"])
        assert summary["privacy"]["persons"] == []


def test_group_privacy_is_the_bound_for_a_person(tmp_path: Path) -> None:
    summary = run(tmp_path, person="who", rows_per_person=3)
    rows = {
        row["adversary"]: row
        for row in summary["privacy"]["proven"]
        if row["unit"] == "record" and row["epsilon"] is not None
    }
    assert rows
    for bound in summary["privacy"]["persons"]:
        row = rows[bound["adversary"]]
        assert bound["epsilon"] == pytest.approx(3 * row["epsilon"])
        expected = 3 * math.exp(min(700, 2 * row["epsilon"])) * row["delta"]
        assert bound["delta"] == pytest.approx(min(1, expected))
