"""README's table is what the measured results say, missed targets included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).parents[3]
PEERS = ROOT / "benchmarks" / "peers"


def load(name: str) -> Any:
    return load_script(f"benchmarks/peers/{name}.py")


def results(median: float, expected: float | None) -> dict[str, Any]:
    ratio = {"median": median, "lowest": median - 1, "highest": median + 1}
    row = {"what": "W1", "peer": "plain, 2 threads", "ratio": ratio, "expected": expected}
    machine = {"processor": "a processor", "cores": 2, "torch": "2.13.0"}
    return {"machine": machine, "turns": 3, "rows": [row]}


@pytest.mark.parametrize(
    ("median", "expected", "shown"),
    [(5.0, 4.0, "5.0 (4.0-6.0) |"), (5.0, None, "5.0 (4.0-6.0) |"), (3.0, 4.0, "target 4 missed |")],
)
def test_a_missed_target_is_shown_as_missed(median: float, expected: float | None, shown: str) -> None:
    assert load("table").table(results(median, expected)).endswith(shown)


def test_writing_the_table_twice_changes_nothing_more() -> None:
    table = load("table")
    page = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    once = table.written(page, results(5.0, None))
    assert "old" not in once
    assert table.written(once, results(5.0, None)) == once


def test_readme_shows_the_recorded_results() -> None:
    page = (ROOT / "README.md").read_text()
    assert load("table").written(page, json.loads((PEERS / "results.json").read_text())) == page


def test_results_are_kept_section_by_section_on_one_machine(tmp_path: Path) -> None:
    record, path = load("recording").record, tmp_path / "results.json"
    machine = {"processor": "a", "cores": 2, "torch": "2.13.0"}

    def held() -> list[tuple[str, int]]:
        return [(row["what"], row["seconds"]) for row in json.loads(path.read_text())["rows"]]

    record(path, machine, 9, [{"what": "W1", "seconds": 1}, {"what": "W1", "seconds": 2}])
    record(path, machine, 9, [{"what": "W5", "seconds": 3}])
    record(path, machine, 9, [{"what": "W1", "seconds": 4}])
    assert held() == [("W1", 4), ("W5", 3)]
    record(path, machine | {"cores": 4}, 9, [{"what": "W5", "seconds": 5}])
    assert held() == [("W5", 5)], "numbers of two machines stand in one table"
    record(path, machine | {"cores": 4}, 3, [{"what": "W1", "seconds": 6}])
    assert held() == [("W1", 6)], "numbers of long and short runs stand in one table"
