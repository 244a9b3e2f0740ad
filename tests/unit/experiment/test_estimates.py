"""How long rows take: measured, kept, and said before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedveil.cli import app
from fedveil.errors import ResultError
from fedveil.experiment.compare import Cell
from fedveil.experiment.estimates import Estimate, Estimates, cost, estimate, wall_time
from fedveil.experiment.reproduce import choose, open_cells
from fedveil.experiment.tables import PublishedTable, load_table
from tests.refusals import refuses
from tests.unit.experiment.published import TABLE


def test_the_time_is_estimated_from_a_measured_round(table: PublishedTable, tmp_path: Path) -> None:
    cells = open_cells(choose(table, ["udp"], 1, reduced=False), tmp_path)
    found = estimate(cells)
    assert set(found) == {"UDP-FedAvg, sigma 1, seed 0", "UDP-FedAvg, sigma 2, seed 0"}
    assert len(set(found.values())) == 1  # they differ in a real number only: one measurement
    assert 0 < wall_time(list(found.values()), 1) < 60
    assert estimate(cells, limit=0.0)["UDP-FedAvg, sigma 1, seed 0"] == Estimate(0.0, lower_bound=True)


def test_a_stored_estimate_is_used_only_for_the_unchanged_row(
    folder: Path, table: PublishedTable, tmp_path: Path
) -> None:
    plain, private, other = table.rows
    kept = Estimates(table, tmp_path / "records")
    kept.add(plain, Estimate(100.0))
    kept.add(private, Estimate(50.0, lower_bound=True))
    kept.write()
    kept = Estimates(table, tmp_path / "records")
    assert (kept.of(plain), kept.of(other)) == (Estimate(100.0), None)
    assert kept.stale() == []
    known = cost(table, [plain, other], tmp_path / "records")
    assert (known.seconds, known.lower_bound) == (200.0, False)  # the unknown one costs as much as the known
    assert cost(table, table.rows, tmp_path / "records").in_words() == "more than 4 minutes"
    assert cost(table, [other], tmp_path / "records").in_words() == "not measured"
    assert cost(table, [other], tmp_path / "records", like=[plain]).in_words() == "about 2 minutes"
    kept.add(private, Estimate(40.0, lower_bound=True))  # knows less
    assert kept.of(private) == Estimate(50.0, lower_bound=True)
    kept.add(private, Estimate(70.0))
    kept.add(private, Estimate(90.0, lower_bound=True))
    assert kept.of(private) == Estimate(70.0)
    path = folder / "fedceo" / "table-1-digits.toml"
    path.write_text(TABLE.replace("lr = 0.1", "lr = 0.2"))
    assert Estimates(load_table(path), tmp_path / "records").stale() == ["FedAvg", "UDP-FedAvg, sigma 1"]


def test_no_round_is_measured_before_runs_whose_times_are_on_record(
    folder: Path, table: PublishedTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[list[str]] = []

    def estimate(cells: Sequence[Cell], _data: object, **_limit: float) -> dict[str, Estimate]:
        measured.append([cell.title for cell in cells])
        return dict.fromkeys(measured[-1], Estimate(10.0))

    monkeypatch.setattr("fedveil.cli.reproduce.estimate", estimate)
    kept = Estimates(table, folder / "records")
    kept.add(table.rows[0], Estimate(7200.0))
    kept.write()
    command = [
        "reproduce",
        "fedceo",
        "table-1-digits",
        "--tables",
        str(folder),
        "--jobs",
        "1",
        "--seeds",
        "1",
    ]
    options = ["--results", str(tmp_path / "results")]
    known = CliRunner().invoke(app, [*command, *options, "--rows", "FedAvg"])
    assert known.exit_code == 0, known.output
    assert "2.0 hours" in known.output
    assert measured == []
    CliRunner().invoke(app, [*command, *options, "--rows", "UDP-FedAvg, sigma 1"])
    assert measured == [["UDP-FedAvg, sigma 1, seed 0"]]
    CliRunner().invoke(
        app, [*command, "--results", str(tmp_path / "other"), "--rows", "FedAvg", "--estimate"]
    )
    assert measured[1:] == [["FedAvg, seed 0"]]


def test_an_unknown_row_of_twice_the_rounds_is_taken_to_cost_twice_as_much(
    folder: Path, tmp_path: Path
) -> None:
    path = folder / "fedceo" / "table-1-digits.toml"
    longer = "noise_multiplier = 2.0 }\nrun = { rounds = 6 }"  # of 3
    path.write_text(TABLE.replace("noise_multiplier = 2.0 }", longer))
    changed = load_table(path)
    kept = Estimates(changed, tmp_path / "records")
    kept.add(changed.rows[0], Estimate(100.0))
    kept.write()
    assert cost(changed, changed.rows[2:], tmp_path / "records", like=changed.rows).seconds == 200.0
    assert cost(changed, changed.rows, tmp_path / "records").seconds == 400.0


def test_a_row_with_another_model_is_not_taken_to_cost_the_same(folder: Path, tmp_path: Path) -> None:
    path = folder / "fedceo" / "table-1-digits.toml"
    larger = 'noise_multiplier = 2.0 }\ntask = { model = "logistic" }'
    path.write_text(TABLE.replace("noise_multiplier = 2.0 }", larger))
    changed = load_table(path)
    kept = Estimates(changed, tmp_path / "records")
    kept.add(changed.rows[0], Estimate(100.0))
    kept.write()
    other = cost(changed, changed.rows[2:], tmp_path / "records", like=changed.rows)
    assert (other.known, other.in_words()) == (0, "not measured")
    whole = cost(changed, changed.rows, tmp_path / "records")
    assert (whole.seconds, whole.lower_bound) == (200.0, True)


def test_damaged_estimates_are_refused(table: PublishedTable, tmp_path: Path) -> None:
    path = tmp_path / "records" / "estimates" / "fedceo" / "table-1-digits.json"
    path.parent.mkdir(parents=True)
    for damaged in ("{", '{"rows": {"FedAvg": {"seconds": 1}}}', '{"rows": []}'):
        path.write_text(damaged)
        with refuses("estimates", ResultError):
            Estimates(table, tmp_path / "records")
