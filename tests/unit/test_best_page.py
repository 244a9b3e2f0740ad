"""docs/best.md says what the records say, and the records are of the settings that are shipped."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def best() -> ModuleType:
    path = ROOT / "docs" / "figures" / "make_best_page.py"
    spec = importlib.util.spec_from_file_location("make_best_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_best_page"] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_page_agrees_with_the_records(best: ModuleType) -> None:
    tuned, attacks = best.read_baseline_records(), best.read_attack_records()
    assert best.PAGE.read_text() == best.page(best.read_rows(), best.read_records(), tuned, attacks)


def test_every_record_is_of_a_row_and_of_its_present_configuration(best: ModuleType) -> None:
    rows = {row.id: row for group in best.read_rows() for row in group.rows}
    records = best.read_records()
    assert records
    for name, record in records.items():
        assert record["row"] == name
        assert record["config"] == rows[name].config().identity()
        assert record["command"] == rows[name].command()
        assert 0 < record["epsilon"] <= rows[name].config().privacy.target_epsilon


def test_every_row_is_a_configuration_that_can_run(best: ModuleType) -> None:
    names = [row.id for group in best.read_rows() for row in group.rows]
    assert len(names) == len(set(names))
    for group in best.read_rows():
        for row in group.rows:
            row.config().build_method()
            assert row.config().privacy.target_epsilon is not None


def test_a_missed_target_is_reported_as_missed(best: ModuleType) -> None:
    row = replace(best.read_rows()[0].rows[0], target=97.0, stretch=98.0)
    record = {"epsilon": 1.0, "runs": [{"seed": 0, "accuracy": 0.96}, {"seed": 1, "accuracy": 0.97}]}
    assert best.reached(row, record) == "**missed** by 0.50"
    assert best.reached(replace(row, target=96.5), record) == "target"
    assert best.reached(replace(row, stretch=96.4), record) == "stretch"
    text = best.page([best.Group("g", "G", "n", (row,))], {row.id: record})
    assert "**missed** by 0.50" in text
    assert row.command() in best.page([best.Group("g", "G", "n", (row,))], {})


def test_the_verdict_counts_targets_that_are_met_missed_and_not_run(best: ModuleType) -> None:
    row = replace(best.read_rows()[0].rows[0], target=97.0, stretch=98.0)
    rows = [replace(row, id=name, what=f"epsilon {name}") for name in ("low", "met", "far", "none")]
    records = {
        name: {"epsilon": 1.0, "runs": [{"seed": 0, "accuracy": accuracy}]}
        for name, accuracy in (("low", 0.9), ("met", 0.975), ("far", 0.99))
    }
    text = best.verdict([best.Group("g", "G", "n", tuple(rows))], records)
    assert "2 of 4 targets are met, 1 of them with the stretch" in text
    assert "Missed: MNIST, record, epsilon low." in text
    assert "Not run: MNIST, record, epsilon none." in text


def test_collecting_keeps_the_seeds_of_the_same_setting(best: ModuleType) -> None:
    def record(*runs: tuple[int, float], **other: object) -> dict[str, object]:
        found = [{"seed": seed, "accuracy": accuracy} for seed, accuracy in runs]
        return {"row": "a", "config": "c", "numerics": 2, "command": "now", "runs": found} | other

    both = best.merged(record((0, 0.1), (1, 0.2), command="before"), record((1, 0.3), (2, 0.4)))
    assert both == record((0, 0.1), (1, 0.3), (2, 0.4))
    for key, value in (("config", "d"), ("numerics", 1), ("row", "b")):
        assert best.merged(record((0, 0.1), **{key: value}), record((2, 0.4))) == record((2, 0.4))
    assert best.merged({}, record((2, 0.4))) == record((2, 0.4))
