"""The tables in README and docs/speed.md are what the measured results say, missed targets included."""

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
    row |= {"peer_seconds": median, "our_seconds": 1.0, "peer_start_up": 2.0, "our_start_up": 0.1}
    machine = {"processor": "a processor", "cores": 2, "torch": "2.13.0"}
    return {"machine": machine, "turns": 3, "rows": [row]}


def on_ray(median: float, finished: bool, overhead: float) -> dict[str, Any]:
    return {
        "what": "W5-200",
        "seconds": {"pool": 1.0, "ray": overhead, "flower": median},
        "overhead": {"median": overhead, "lowest": overhead, "highest": overhead},
        "flower": {"median": median, "lowest": median, "highest": median},
        "flower_finished": finished,
        "targets": {"flower": 30.0, "overhead": 1.3},
    }


@pytest.mark.parametrize(
    ("median", "expected", "shown"),
    [(5.0, 4.0, "5.0 (4.0-6.0) |"), (5.0, None, "5.0 (4.0-6.0) |"), (3.0, 4.0, "target 4 missed |")],
)
def test_a_missed_target_is_shown_as_missed(median: float, expected: float | None, shown: str) -> None:
    table, nothing = load("table"), results(5.0, None) | {"rows": []}
    assert table.summary(results(median, expected), nothing).endswith(shown)
    assert f" {shown}" in table.details(results(median, expected))


def test_ray_targets_are_shown_as_met_missed_or_bounds() -> None:
    table = load("table")
    assert table.ray_line(on_ray(40, True, 1.0)).endswith("| 1.00 (1.00-1.00) | 40.0 (40.0-40.0) |")
    assert "at least 40.0" in table.ray_line(on_ray(40, False, 1.0))
    missed = table.ray_line(on_ray(29, True, 1.4))
    assert "target 1.3 missed" in missed
    assert "target 30 missed" in missed
    recorded = results(5.0, None)
    assert "target 30 missed" in table.summary(recorded, recorded | {"rows": [on_ray(29, True, 1.0)]})


def test_numbers_of_two_machines_or_lengths_say_so() -> None:
    table, recorded = load("table"), results(5.0, None)
    ray = recorded | {"rows": [on_ray(40, True, 1.0)]}
    assert table.summary(recorded, ray).count("turns on") == 1
    assert table.summary(recorded, ray | {"turns": 7}).count("turns on") == 2


def test_writing_a_table_twice_changes_nothing_more() -> None:
    table = load("table")
    page = "before\n<!-- peers: written by `make peers` -->\nold\n<!-- end of peers -->\nafter\n"
    once = table.written(page, "peers", "new")
    assert "old" not in once
    assert table.written(once, "peers", "new") == once
    with pytest.raises(SystemExit):
        table.written(page, "ray", "new")


def test_the_pages_show_the_recorded_results() -> None:
    results, ray = (json.loads((PEERS / name).read_text()) for name in ("results.json", "ray.json"))
    for page, text in load("table").pages(results, ray).items():
        assert page.read_text() == text, f"{page.name} is not what `make peers` measured"


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
