"""Tables as data: rows become configurations, runs become records, and records become verdicts and pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedveil.attack_runs.published import attack_as_published
from fedveil.cli import app
from fedveil.errors import InputError, ResultError
from fedveil.experiment.estimates import Estimates
from fedveil.experiment.records import Records
from fedveil.experiment.reproduce import choose, only_missing, open_cells, report, run_job
from fedveil.experiment.tables import (
    PAPERS,
    PublishedTable,
    find_table,
    list_tables,
    load_table,
    tables_folder,
)
from fedveil.methods.fedavg import FedAvg
from tests.refusals import refuses
from tests.unit.experiment.published import TABLE


def test_a_row_is_the_base_with_its_own_values(table: PublishedTable) -> None:
    plain, private, _ = (table.config(row) for row in table.rows)
    assert plain.method == {"lr": 0.1, "name": "fedavg"}  # which has no clip
    assert private.method == {"lr": 0.1, "clip": 2.0, "name": "udp-fedavg", "noise_multiplier": 1.0}
    assert plain.paper is not None
    assert (plain.paper.row, plain.paper.expected, plain.paper.scale) == ("FedAvg", 0.5, "full")
    small = table.config(table.rows[0], reduced=True)
    assert small.run.rounds == 2
    assert small.paper is not None
    assert small.paper.scale == "two rounds"


def test_rows_are_selected_by_name_or_by_words(table: PublishedTable) -> None:
    assert [row.name for row in table.selected(["FedAvg"])] == ["FedAvg"]
    assert len(table.selected(["udp sigma"])) == 2
    assert len(table.selected([])) == 3
    with pytest.raises(InputError) as refused:
        table.selected(["sigma 7"])
    assert refused.value.field == "--rows"
    with pytest.raises(InputError) as refused:
        table.selected(["sigma 1", "sigma 7"])
    assert (refused.value.field, refused.value.value) == ("--rows", "sigma 7")


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["fedceo", "--rows", "udp"], "--rows"),
        (["fedceo", "--estimate"], "--estimate"),
        (["fedceo", "--seeds", "1"], "--seeds"),
        (["--missing"], "--missing"),
        (["fedceo", "--pages", "."], "PAPER"),
        (["fedceo", "table-1-digits", "--claims", "--estimate"], "--estimate"),
        (["fedceo", "table-1-digits", "--claims", "--reduced"], "--reduced"),
    ],
)
def test_options_that_would_do_nothing_are_refused(folder: Path, words: list[str], field: str) -> None:
    ran = CliRunner().invoke(app, ["reproduce", *words, "--tables", str(folder)])
    assert isinstance(ran.exception, InputError)
    assert ran.exception.field == field


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("tolerance = 0.9", "tolerance = -1", "table-1-digits.toml.table.tolerance"),
        ('name = "FedAvg"', 'name = "UDP-FedAvg, sigma 1"', "row.name"),
        ("published = 0.5", "expected = 0.5", "table-1-digits.toml.row.0.expected"),
    ],
)
def test_a_broken_table_is_refused_by_field(folder: Path, old: str, new: str, field: str) -> None:
    path = folder / "fedceo" / "table-1-digits.toml"
    path.write_text(TABLE.replace(old, new))
    with pytest.raises(InputError) as refused:
        load_table(path)
    assert refused.value.field == field


def test_a_row_that_no_method_takes_is_refused_with_its_place(folder: Path) -> None:
    path = folder / "fedceo" / "table-1-digits.toml"
    path.write_text(TABLE.replace("noise_multiplier = 2.0", "noise = 2.0"))
    table = load_table(path)
    with pytest.raises(InputError) as refused:
        table.config(table.rows[2])
    assert refused.value.field.endswith("method.noise")


def test_unknown_papers_and_tables_are_refused(folder: Path) -> None:
    with pytest.raises(InputError) as refused:
        list_tables(folder, "fedavg")
    assert refused.value.field == "PAPER"
    with pytest.raises(InputError) as refused:
        find_table(folder, "fedceo", "table-9")
    assert refused.value.field == "TABLE"
    with pytest.raises(InputError) as refused:
        list_tables(folder, "fedem")
    assert refused.value.field == "--tables"


@pytest.mark.parametrize("paper", PAPERS)
def test_only_rows_on_the_same_data_are_ordered(paper: str) -> None:
    for table in list_tables(tables_folder(), paper):
        tasks: dict[str, set[str]] = {}
        for row in table.rows:
            if row.published is not None:
                config = table.config(row)
                tasks.setdefault(row.group, set()).add(f"{config.task.dataset} {config.partition}")
        assert [group for group, found in tasks.items() if len(found) > 1] == [], table.name


def test_runs_are_recorded_and_resumed(table: PublishedTable, tmp_path: Path) -> None:
    job = choose(table, ["udp"], 2, reduced=False)
    assert len(open_cells(job, tmp_path / "results")) == 4
    done = run_job(job, tmp_path / "results", tmp_path / "records", jobs=1)
    assert done.failed == {}
    assert [len(row.values) for row in done.measured] == [2, 2]
    assert open_cells(job, tmp_path / "results") == []
    records = Records(table, tmp_path / "records")
    entry = records.entry(table.rows[1])
    assert entry is not None
    assert set(entry["seeds"]) == {"0", "1"}
    one = entry["seeds"]["0"]
    assert 0 <= one["accuracy"] <= one["best"] <= 1
    assert one["epsilon"]["client against server"] > 0
    assert records.measured(table.rows[0]).values == ()
    assert len((tmp_path / "records" / "fedceo" / "table-1-digits.json").read_bytes()) < 4000


def test_only_what_is_not_on_record_is_run(folder: Path, table: PublishedTable, tmp_path: Path) -> None:
    def runs(place: str) -> list[str]:
        return sorted(found.parent.name for found in (tmp_path / place).rglob("summary.json"))

    run_job(choose(table, ["sigma 1"], 1, reduced=False), tmp_path / "first", folder / "records", jobs=1)
    command = ["reproduce", "fedceo", "table-1-digits", "--rows", "udp", "--seeds", "2", "--missing"]
    options = ["--tables", str(folder), "--results", str(tmp_path / "then"), "--jobs", "1", "--json"]
    ran = CliRunner().invoke(app, [*command, *options])
    assert ran.exit_code == 0, ran.output
    assert runs("then") == ["seed-0", "seed-1", "seed-1"]
    told = json.loads(ran.stdout.splitlines()[-1])
    assert [len(row["accuracy"]) for row in told["rows"]] == [2, 2]
    (tmp_path / "then").rename(tmp_path / "gone")
    again = CliRunner().invoke(app, [*command, *options])
    assert json.loads(again.stdout.splitlines()[-1])["rows"] == told["rows"]
    assert runs("then") == []


def test_a_record_of_another_configuration_or_numerics_is_stale(
    folder: Path, table: PublishedTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = choose(table, ["FedAvg"], 1, reduced=False)
    run_job(job, tmp_path / "results", tmp_path / "records", jobs=1)
    assert Records(table, tmp_path / "records").stale() == []
    path = folder / "fedceo" / "table-1-digits.toml"
    path.write_text(TABLE.replace("lr = 0.1", "lr = 0.2"))
    changed = load_table(path)
    assert Records(changed, tmp_path / "records").stale() == ["FedAvg"]
    monkeypatch.setattr(FedAvg, "numerics", 99)
    assert Records(table, tmp_path / "records").stale() == ["FedAvg"]


def test_a_methods_own_numerics_leave_records_of_other_methods_and_what_is_accounted(
    table: PublishedTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = choose(table, ["FedAvg", "UDP-FedAvg, sigma 1"], 1, reduced=False)
    run_job(job, tmp_path / "results", tmp_path / "records", jobs=1)
    records = Records(table, tmp_path / "records")
    records.add_accounted(table.rows[0], {"client against server": None})
    records.write()
    monkeypatch.setattr(FedAvg, "numerics", FedAvg.numerics + 1)
    kept = Records(table, tmp_path / "records")
    assert kept.stale() == ["FedAvg"]
    assert [kept.entry(row) is None for row in table.rows[:2]] == [True, False]
    assert kept.epsilons(table.rows[0]) == [{"client against server": None}]


def test_damaged_records_are_refused(table: PublishedTable, tmp_path: Path) -> None:
    path = tmp_path / "records" / "fedceo" / "table-1-digits.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"full": []}')
    with refuses("records", ResultError):
        Records(table, tmp_path / "records")


def test_the_command_ends_with_one_json_object(folder: Path, tmp_path: Path) -> None:
    options = ["--tables", str(folder), "--results", str(tmp_path / "results"), "--json"]
    command = ["reproduce", "fedceo", "table-1-digits", "--rows", "FedAvg", "--seeds", "1", "--jobs", "1"]
    ran = CliRunner().invoke(app, [*command, *options])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["table"] == "table-1-digits"
    (row,) = told["rows"]
    assert (row["row"], row["published"], row["verdict"]) == ("FedAvg", 0.5, "level")
    assert row["mean"] == row["accuracy"][0]
    assert row["seconds"] > 0
    assert told["order"]["published_order_reproduced"] is False  # one row has no order
    listed = CliRunner().invoke(app, ["reproduce", "fedceo", *options])
    (table,) = json.loads(listed.stdout)["tables"]
    assert (table["rows"], table["on_record"]) == (3, 1)
    assert table["seconds_per_seed"] is not None
    assert table["seconds_not_run"] == pytest.approx(2 * row["seconds"], abs=0.1)
    only = CliRunner().invoke(app, [*command[:3], "--estimate", *options])
    assert set(json.loads(only.stdout.splitlines()[-1])["runs"]) == {
        "UDP-FedAvg, sigma 1, seed 0",
        "UDP-FedAvg, sigma 2, seed 0",
    }
    again = CliRunner().invoke(app, ["reproduce", "fedceo", *options])
    (estimated,) = json.loads(again.stdout)["tables"]
    kept = Estimates(find_table(folder, "fedceo", "table-1-digits"), folder / "records")
    assert estimated["seconds_not_run"] == pytest.approx(
        sum(found.seconds for row in kept.table.rows[1:] if (found := kept.of(row))), abs=0.1
    )


def test_names_of_tables_can_be_copied_from_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for paper in PAPERS:
        shown = CliRunner().invoke(app, ["reproduce", paper]).stdout
        assert all(table.name in shown for table in list_tables(tables_folder(), paper))


def test_a_reduced_run_ends_with_one_json_object(folder: Path, tmp_path: Path) -> None:
    options = ["--tables", str(folder), "--results", str(tmp_path / "results"), "--json", "--reduced"]
    ran = CliRunner().invoke(app, ["reproduce", "fedceo", "table-1-digits", "--seeds", "1", *options])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["scale"] == "reduced"
    assert [len(row["accuracy"]) for row in told["rows"]] == [1, 1, 1]
    assert set(told["order"]) >= {"tau", "published_order_reproduced"}


ATTACKED = """
[table]
source = "Somebody"
title = "Table 2, digits"
tolerance = 0.9
seeds = 1

[base.task]
dataset = "digits"
model = "mlp-2"
data_options = { max_train = 200 }

[base.partition]
clients = 4

[base.method]
name = "fedsgd"
batch_size = 2

[base.run]
rounds = 1
sampler = "all"
transcript = true

[[base.attack]]
name = "inverting-gradients"
round = 1
steps = 5

[[row]]
name = "FedSGD"
published = 0.5
published_attack = { psnr = -80.0, kl = 1.0, ml-leaks = 0.5 }
claim = { epsilon = 1.0, unit = "record" }

[[row]]
name = "noisy"
published = 0.4
published_attack = { psnr = -90.0, kl = 1.0 }
wrap = [{ name = "gradient-gaussian", std = 0.1 }]
"""


def test_published_attacks_are_carried_out_judged_and_recorded_once(folder: Path, tmp_path: Path) -> None:
    (folder / "fedem").mkdir()
    (folder / "fedem" / "table-2-digits.toml").write_text(ATTACKED)
    table = find_table(folder, "fedem", "table-2-digits")
    job, records = choose(table, [], 1, reduced=False), tmp_path / "records"
    run_job(job, tmp_path / "results", records, jobs=1)
    assert Records(table, records).attacked(table.rows[0], "psnr").values == ()
    assert len(only_missing(job, records).cells()) == 2
    assert only_missing(job, records, attacks=False).cells() == {}
    done = run_job(job, tmp_path / "results", records, jobs=1, attack=attack_as_published)
    told = report(job, done)["attacks"]
    assert only_missing(job, records).cells() == {}
    assert set(told) == {"psnr", "ml-leaks"}  # kl is of another classifier
    assert [row["verdict"] for row in told["psnr"]["rows"]] in (["missed", "missed"], ["order", "order"])
    assert 0 <= told["ml-leaks"]["rows"][0]["mean"] <= 1
    written = (records / "fedem" / "table-2-digits.json").read_text()
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("finding.json")}
    assert len(times) == 3
    run_job(job, tmp_path / "results", records, jobs=1, attack=attack_as_published)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("finding.json")} == times
    run_job(job, tmp_path / "results", records, jobs=1)  # without attacks: what they found stays
    assert (records / "fedem" / "table-2-digits.json").read_text() == written


def test_runs_are_on_record_before_their_attacks_end(folder: Path, tmp_path: Path) -> None:
    (folder / "fedem").mkdir()
    (folder / "fedem" / "table-2-digits.toml").write_text(ATTACKED)
    table = find_table(folder, "fedem", "table-2-digits")
    job, records = choose(table, ["FedSGD"], 1, reduced=False), tmp_path / "records"

    def interrupted(*_: object) -> dict[str, dict[str, float]]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(job, tmp_path / "results", records, jobs=1, attack=interrupted)
    assert len(Records(table, records).measured(table.rows[0]).values) == 1


def test_a_claimed_epsilon_without_a_proof_is_not_proven(folder: Path, tmp_path: Path) -> None:
    (folder / "fedem").mkdir()
    (folder / "fedem" / "table-2-digits.toml").write_text(ATTACKED)
    table = find_table(folder, "fedem", "table-2-digits")
    assert Records(table, tmp_path / "records").proven(table.rows[0]) == "not run"
    run_job(choose(table, ["FedSGD"], 1, reduced=False), tmp_path / "results", tmp_path / "records", jobs=1)
    kept = Records(table, tmp_path / "records")
    assert kept.proven(table.rows[0]) == "not proven"
    assert kept.proven(table.rows[1]) == "not run"  # nothing is claimed


def test_a_row_with_missing_data_is_reported_as_not_run(folder: Path, tmp_path: Path) -> None:
    path = folder / "fedceo" / "table-1-digits.toml"
    path.write_text(TABLE.replace('dataset = "digits"', 'dataset = "cifar100"'))
    options = [
        "--tables",
        str(folder),
        "--data",
        str(tmp_path),
        "--results",
        str(tmp_path / "results"),
        "--json",
    ]
    ran = CliRunner().invoke(app, ["reproduce", "fedceo", "table-1-digits", "--rows", "FedAvg", *options])
    assert ran.exit_code != 0
    told = json.loads(ran.stdout.splitlines()[-1])
    assert [(row["verdict"], row["accuracy"]) for row in told["rows"]] == [("not run", [])]
    assert not (folder / "records").exists()


def test_claims_are_accounted_for_without_running(folder: Path, tmp_path: Path) -> None:
    path = folder / "fedceo" / "table-1-digits.toml"
    claim = 'claim = {{ epsilon = {}, unit = "client" }}\npublished = 0.{}'
    text = TABLE.replace("published = 0.4", claim.format("1e6", 4)).replace(
        "published = 0.3", claim.format(0.01, 3)
    )
    path.write_text(text)
    options = ["--tables", str(folder), "--results", str(tmp_path / "results"), "--json"]
    ran = CliRunner().invoke(app, ["reproduce", "fedceo", "table-1-digits", "--claims", *options])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout.splitlines()[-1])["claims"]
    assert [(row["row"], row["verdict"]) for row in told] == [
        ("UDP-FedAvg, sigma 1", "proven"),
        ("UDP-FedAvg, sigma 2", "not proven"),
    ]
    assert not (tmp_path / "results").exists()
    table = load_table(path)
    accounted = Records(table, folder / "records").epsilons(table.rows[1])
    run_job(choose(table, [], 1, reduced=False), tmp_path / "results", folder / "records", jobs=1)
    kept = Records(table, folder / "records")
    assert kept.epsilons(table.rows[1]) == accounted  # the run proves what its plan does
    assert kept.stale() == []
    path.write_text(text.replace("noise_multiplier = 1.0", "noise_multiplier = 1.5"))
    assert "UDP-FedAvg, sigma 1" in Records(load_table(path), folder / "records").stale()
