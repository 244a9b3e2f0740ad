"""Which runs a comparison takes, and that none is run twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import tomli_w

from fedveil.attack_runs.inversion import attack_smallest
from fedveil.errors import FedveilError
from fedveil.experiment import compare
from fedveil.experiment.compare import Cell, plan_cells, run_cells
from fedveil.session.results import ResultFolder
from tests.refusals import refuses

CONFIG = """
[paper]
source = "A paper"
expected = 0.5
[partition]
clients = 6
[method]
name = "udp-fedavg"
batch_size = 16
noise_multiplier = 1.5
[run]
rounds = 2
cohort = 3
seeds = [0, 1]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


def test_a_grid_is_every_combination_and_methods_without_the_field_are_run_once(config: Path) -> None:
    cells = plan_cells(
        [config],
        methods=["fedavg", "udp-fedavg"],
        grid=["method.noise_multiplier=0.5,1.0", "run.cohort=2,3"],
        seeds=[4],
    )
    shown = [
        (c.config.method["name"], c.config.method.get("noise_multiplier"), c.config.run.cohort, c.seed)
        for c in cells
    ]
    assert shown == [
        ("fedavg", None, 2, 4),
        ("fedavg", None, 3, 4),
        ("udp-fedavg", 0.5, 2, 4),
        ("udp-fedavg", 0.5, 3, 4),
        ("udp-fedavg", 1.0, 2, 4),
        ("udp-fedavg", 1.0, 3, 4),
    ]


def test_a_change_applies_to_the_methods_that_have_the_field(config: Path) -> None:
    fedavg, private = plan_cells(
        [config], methods=["fedavg", "udp-fedavg"], changes=["method.clip=0.3", "method.lr=0.2"], seeds=[0]
    )
    assert fedavg.config.method == {"name": "fedavg", "batch_size": 16, "lr": 0.2}
    assert private.config.method["clip"] == 0.3
    assert private.config.method["lr"] == 0.2
    assert private.config.method["noise_multiplier"] == 1.5


@pytest.mark.parametrize("option", [{"changes": ["method.clipp=1"]}, {"grid": ["method.clipp=1,2"]}])
def test_a_field_that_no_method_has_is_refused(config: Path, option: dict[str, list[str]]) -> None:
    with refuses("method.clipp"):
        plan_cells([config], methods=["fedavg", "udp-fedavg"], **option)  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", ["method.clip", "=1,2", "method.clip=", "method.clip=1,,2"])
def test_an_axis_that_is_none_is_refused(config: Path, axis: str) -> None:
    with refuses("--grid"):
        plan_cells([config], grid=[axis])


def test_the_method_is_named_in_one_place(config: Path) -> None:
    with refuses("method.name"):
        plan_cells([config], methods=["fedavg"], changes=["method.name=scaffold"])
    with refuses("method.name"):
        plan_cells([config], methods=["fedawg"])


def test_commas_in_brackets_belong_to_the_value(config: Path) -> None:
    cells = plan_cells([config], grid=["task.model_options.hidden=[8,4],[16,8]"], seeds=[0])
    assert [cell.config.task.model_options["hidden"] for cell in cells] == [[8, 4], [16, 8]]


def test_a_published_number_belongs_to_the_file_as_written_only(config: Path) -> None:
    written, other = plan_cells([config], methods=["udp-fedavg", "fedavg"], seeds=[0])
    assert written.config.paper is not None
    assert other.config.paper is None
    (changed,) = plan_cells([config], changes=["run.rounds=1"], seeds=[0])
    assert changed.config.paper is None


def test_finished_cells_are_not_run_again_and_a_failure_does_not_stop_others(
    config: Path, tmp_path: Path
) -> None:
    cells = plan_cells([config], methods=["fedavg", "udp-fedavg"], seeds=[0])
    results = tmp_path / "results"
    assert run_cells(cells[:1], results, jobs=1) == {}
    mark = (cells[0].folder(results) / "summary.json").stat().st_mtime_ns
    taken = cells[1].folder(results)
    taken.mkdir(parents=True)
    (taken / ".identity").write_text("a run of another configuration")
    other = plan_cells([config], methods=["fedprox"], seeds=[0])
    failed = run_cells([*cells, *other], results, jobs=1)
    assert list(failed) == ["udp-fedavg seed 0"]
    assert ResultFolder(other[0].folder(results)).finished
    assert (cells[0].folder(results) / "summary.json").stat().st_mtime_ns == mark


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_was_finished_on_a_table_as_it_was_is_not_shown_for_the_table_as_it_is(
    tmp_path: Path, jobs: int
) -> None:
    table, config = tmp_path / "own.csv", tmp_path / "own.toml"
    rows = [f"{row % 3},{row}.5,{row % 2}\n" for row in range(60)]
    table.write_text("who,a,y\n" + "".join(rows))
    options = f'path = "{table}"\nlabel = "y"\nuser = "who"\n'
    config.write_text(
        f'[task]\ndataset = "table"\nmodel = "logistic"\n[task.data_options]\n{options}'
        '[partition]\nkind = "user"\n[run]\nrounds = 1\n'
    )
    cells, results = plan_cells([config], methods=["fedavg", "fedprox"]), tmp_path / "results"
    assert run_cells(cells, results, jobs=1) == {}
    assert run_cells(cells, results, jobs=1) == {}  # read back
    table.write_text("who,a,y\n" + "".join(rows).replace("59.5,", "58.5,"))
    failed = run_cells(cells, results, jobs=jobs)
    assert len(failed) == 2
    assert all("holds a run on other data" in reason for reason in failed.values())


def test_processes_give_the_results_of_one(config: Path, tmp_path: Path) -> None:
    cells = plan_cells([config], methods=["udp-fedavg"])
    heard: list[tuple[int, int]] = []
    assert (
        run_cells(
            cells, tmp_path / "many", jobs=2, on_progress=lambda rounds, runs: heard.append((rounds, runs))
        )
        == {}
    )
    assert run_cells(cells, tmp_path / "one", jobs=1) == {}
    for cell in cells:
        many, one = (
            json.loads((cell.folder(tmp_path / p) / "summary.json").read_text()) for p in ("many", "one")
        )
        assert many["accuracy"] == one["accuracy"]
        assert many["privacy"] == one["privacy"]
    assert heard[-1] == (4, 2)


def _killed(_cell: Cell, _results: Path, _data: Path | None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_reported_with_a_remedy(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "_run_elsewhere", _killed)
    with refuses("--jobs", FedveilError):
        run_cells(plan_cells([config], seeds=[0, 1]), tmp_path / "results", jobs=2)


_PARENT = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from fedveil.experiment.compare import _begin
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600)
    time.sleep(600)
"""


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """Otherwise they would keep training, and lock the folders against the same command."""
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the process of a run outlived its command")


def test_the_most_exposed_upload_is_attacked_once(config: Path, tmp_path: Path) -> None:
    cells = plan_cells([config], methods=["fedavg", "udp-fedavg"], changes=["run.transcript=[1]"], seeds=[0])
    assert run_cells(cells, tmp_path / "results", jobs=1) == {}
    for cell in cells:
        folder = cell.folder(tmp_path / "results")
        place = attack_smallest(folder, "inverting-gradients", {"steps": 2})
        found = json.loads((place / "finding.json").read_text())
        sizes = [sum(row) for row in json.loads((folder / "summary.json").read_text())["partition"]]
        taking_part = json.loads((folder / "transcript/round-000001/exchange-0000/clients.json").read_text())
        assert sizes[found["clients"][0]] == min(sizes[client] for client in taking_part)
        before = (place / "finding.json").stat().st_mtime_ns
        assert attack_smallest(folder, "inverting-gradients", {"steps": 2}) == place
        assert (place / "finding.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("attack", "words"),
    [("inverting-gradients", "run.transcript"), ("lira", "--attack = 'lira': is a membership attack")],
)
def test_the_command_refuses_an_attack_that_it_cannot_try(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    attack: str,
    words: str,
) -> None:
    from fedveil.cli import main

    results = tmp_path / "results"
    arguments = ["compare", str(config), "--attack", attack, "--results", str(results)]
    monkeypatch.setattr("sys.argv", ["fedveil", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert words in capsys.readouterr().err
    assert not results.exists()


def test_the_command_ends_with_table_and_report(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedveil.cli import main

    report = tmp_path / "out" / "report.html"
    where = ["--seed", "0", "--jobs", "1", "--results", str(tmp_path / "results")]
    arguments = [str(config), "--methods", "fedavg,udp-fedavg", *where, "--report", str(report)]
    monkeypatch.setattr("sys.argv", ["fedveil", "compare", *arguments, "--markdown"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("| method | seeds | accuracy % |")
    assert len(table) == 4
    assert table[3].endswith("| 50.00 |")
    assert "udp-fedavg" in report.read_text()
    monkeypatch.setattr("sys.argv", ["fedveil", "compare", *arguments, "--json"])
    with pytest.raises(SystemExit):
        main()
    told = json.loads(capsys.readouterr().out)
    assert [run["method"] for run in told["runs"]] == ["fedavg", "udp-fedavg"]
    assert told["report"] == str(report)


def test_two_formats_at_once_are_refused_by_name(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedveil.cli import main

    monkeypatch.setattr("sys.argv", ["fedveil", "compare", str(config), "--markdown", "--latex"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "--markdown --latex" in capsys.readouterr().err


def test_another_file_is_compared_with_its_own_method(config: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    content = tomllib.loads(config.read_text())
    content["method"] = {"name": "udp-fedavg"}
    content["run"] = {**content.get("run", {}), "sampler": "all"}
    content["run"].pop("cohort", None)
    content["aggregation"] = {"kind": "secure"}
    other.write_text(tomli_w.dumps(content))
    cells = plan_cells([config], methods=["fedavg", "udp-fedavg"], also=[other], seeds=[0])
    assert [cell.title for cell in cells] == [
        "fedavg seed 0",
        "udp-fedavg seed 0",
        "udp-fedavg secure seed 0",
    ]
    assert {cell.experiment for cell in cells} == {config.stem}
