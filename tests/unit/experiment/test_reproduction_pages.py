"""The documentation's pages are made of tables and records alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.errors import InputError
from fedveil.experiment.records import Records
from fedveil.experiment.reproduce import choose, report, run_job
from fedveil.experiment.tables import PublishedTable, load_table, readings
from fedveil.report.reproduction import pages
from tests.unit.experiment.published import TABLE


def test_each_reading_is_judged_by_itself(folder: Path, tmp_path: Path) -> None:
    path = folder / "fedceo" / "table-1-digits.toml"
    path.write_text(TABLE.replace('sigma 2"\n', 'sigma 2"\nreading = "other"\n'))
    table = load_table(path)
    assert {reading: len(rows) for reading, rows in readings(table.rows).items()} == {"": 2, "other": 1}
    job = choose(table, [], 1, reduced=False)
    done = run_job(job, tmp_path / "results", tmp_path / "records", jobs=1)
    told = report(job, done)
    assert {name: judged["order"]["pairs"] for name, judged in told["readings"].items()} == {
        "": 1,
        "other": 0,
    }
    assert {name: judged["rows_run"] for name, judged in told["readings"].items()} == {"": 2, "other": 1}
    assert (told["rows_run"], told["rows_at_level"]) == (3, 3)
    for paper in ("fedlap-dp", "dp-fedags", "fedem"):
        (folder / paper).mkdir()
        (folder / paper / "table-1-digits.toml").write_text(TABLE)
    text = pages(folder, tmp_path / "records", tmp_path / "docs")[tmp_path / "docs/reproduction/fedceo.md"]
    assert "### Table 1, digits\n" in text
    assert "### Table 1, digits, other\n" in text


def test_findings_quote_the_records_and_nothing_else(
    folder: Path, table: PublishedTable, tmp_path: Path
) -> None:
    for paper in ("fedlap-dp", "dp-fedags", "fedem"):
        (folder / paper).mkdir()
        (folder / paper / "table-1-digits.toml").write_text(TABLE)
    words = folder / "fedceo" / "findings.md"
    words.write_text("It reaches {{table-1-digits | FedAvg}} %.")
    with pytest.raises(InputError) as refused:
        pages(folder, tmp_path / "records", tmp_path / "docs")
    assert refused.value.field == str(words)
    done = run_job(
        choose(table, ["FedAvg"], 1, reduced=False), tmp_path / "results", tmp_path / "records", jobs=1
    )
    text = pages(folder, tmp_path / "records", tmp_path / "docs")[tmp_path / "docs/reproduction/fedceo.md"]
    assert f"It reaches {100 * done.measured[0].values[0]:.2f} %." in text
    entry = Records(table, tmp_path / "records").entry(table.rows[0])
    assert entry is not None
    words.write_text(
        "Best {{table-1-digits | FedAvg | best}} %, then {{table-1-digits | FedAvg | before last}} %."
    )
    text = pages(folder, tmp_path / "records", tmp_path / "docs")[tmp_path / "docs/reproduction/fedceo.md"]
    best, before = (100 * entry["seeds"]["0"][key] for key in ("best", "before_last"))
    assert f"Best {best:.2f} %, then {before:.2f} %." in text
    words.write_text("{{table-1-digits | FedAvg | own models}}")  # it has none
    with pytest.raises(InputError) as refused:
        pages(folder, tmp_path / "records", tmp_path / "docs")
    assert refused.value.field == str(words)


def test_the_documentations_pages_are_those_of_the_records() -> None:
    root = Path(__file__).parents[3]
    for path, text in pages(root / "experiments", root / "experiments" / "records", root / "docs").items():
        assert path.read_text() == text, f"run `fedveil reproduce --pages docs`: {path.name} differs"
