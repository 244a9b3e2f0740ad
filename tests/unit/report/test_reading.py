"""Folders in every state: what can be read is read, what cannot is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import ResultError
from fedveil.report.html import render
from fedveil.report.reading import read_folder, read_runs, run_folders
from fedveil.session.results import Result, ResultFolder
from tests.refusals import refuses
from tests.unit.report.makers import proof, summary_of, write_everything, write_picture, write_run


def test_a_whole_folder_has_no_problems(tmp_path: Path) -> None:
    run = read_folder(write_run(tmp_path, accuracy=0.75, proven=[proof("server", 3.0)]))
    assert run.problems == ()
    assert run.finished
    assert (run.method, run.seed, run.accuracy, run.rounds, run.planned) == ("fedavg", 0, 0.75, 4, 4)
    assert [(row.adversary, row.epsilon) for row in run.proven] == [("server", 3.0)]
    assert [point.bytes for point in run.history] == [2000, 4000, 6000, 8000]
    assert run.partition[3] == (5, 0, 1)
    assert run.per_class == (0.75, 1.0, None)


def test_an_unfinished_run_keeps_its_rounds_and_their_number(tmp_path: Path) -> None:
    run = read_folder(write_run(tmp_path, "scaffold", seed=7, finished=False))
    assert not run.finished
    assert (run.method, run.seed, run.accuracy) == ("scaffold", 7, None)
    assert len(run.history) == 2
    assert run.problems == ()
    assert any("2 of 4 rounds" in note for note in run.notes)


def test_each_damaged_file_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 5, "accu')
    (folder / "config.toml").write_text("not toml [")
    (folder / "attacks" / "inversion").mkdir(parents=True)
    (folder / "attacks" / "inversion" / "finding.json").write_text("{")
    (folder / "figures").mkdir()
    (folder / "figures" / "fake.png").write_text("<svg onload=alert(1)>")
    write_picture(folder / "figures" / "real.png")
    run = read_folder(folder)
    told = "\n".join(run.problems)
    for part in (
        "rounds.jsonl: line 5",
        "config.toml",
        "attacks/inversion/finding.json",
        "fake.png is no PNG",
    ):
        assert part in told
    assert len(run.history) == 4
    assert run.accuracy == 0.9
    assert [picture.name for picture in run.figures] == ["real"]


@pytest.mark.parametrize("harm", ["removed", "cut", "flipped", "a folder"])
def test_a_damaged_model_file_is_named(tmp_path: Path, harm: str) -> None:
    folder = write_run(tmp_path)
    model = folder / "model.safetensors"
    body = model.read_bytes()
    model.unlink()
    if harm == "a folder":
        model.mkdir()
    elif harm != "removed":
        model.write_bytes(body[:-3] if harm == "cut" else body[:-1] + bytes([body[-1] ^ 1]))
    (problem,) = read_folder(folder).problems
    assert problem.startswith("model.safetensors ")
    with refuses("results", ResultError):
        ResultFolder(folder).read()


def test_a_run_from_python_is_called_after_its_folder(tmp_path: Path) -> None:
    summary = summary_of("fedavg", 0, 0.9)
    del summary["experiment"]
    for folder in (tmp_path / "mine", tmp_path / "demo" / "1234" / "seed-0"):
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(summary))
    assert [run.experiment for run in read_runs([tmp_path])] == ["demo", "mine"]


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '"text"', "\udcff", "{}", '{"privacy": 3, "partition": [[1], [1, 2]]}']
)
def test_a_summary_of_any_content_is_survived(tmp_path: Path, content: str) -> None:
    folder = write_run(tmp_path)
    (folder / "summary.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    run = read_folder(folder)
    assert run.problems
    assert len(run.history) == 4
    assert run.partition == ()


WRONG: list[Any] = [None, True, "text", [], {}, -1, [None], [[None]], {"a": {}}]


@pytest.mark.parametrize("key", sorted(summary_of("fedavg", 0, 0.5)))
def test_a_field_of_a_wrong_type_loses_only_that_field(tmp_path: Path, key: str) -> None:
    folder = write_run(tmp_path)
    for wrong in WRONG:
        summary = summary_of("fedavg", 0, 0.5) | {key: wrong}
        (folder / "summary.json").write_text(json.dumps(summary))
        run = read_folder(folder)
        assert run.method
        assert key == "accuracy" or run.accuracy == 0.5
        assert render([run])


def test_numbers_that_are_not_finite_are_no_numbers(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "summary.json").write_text(
        json.dumps(summary_of("fedavg", 0, float("nan"), proven=[proof("server", float("inf"))]))
    )
    run = read_folder(folder)
    assert run.accuracy is None
    assert run.proven[0].epsilon is None


def test_folders_are_found_at_any_depth_and_once(tmp_path: Path) -> None:
    first = write_run(tmp_path, seed=2)
    write_run(tmp_path, seed=10)
    assert [run.seed for run in read_runs([tmp_path])] == [2, 10]
    assert [run.seed for run in read_runs([first, tmp_path, first / "summary.json"])] == [2, 10]


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with refuses("RESULT"):
        read_runs([tmp_path / "nowhere"])
    with refuses("results", ResultError):
        read_runs([tmp_path])
    (tmp_path / "notes.txt").write_text("")
    with refuses("RESULT"):
        run_folders(tmp_path / "notes.txt")


def test_a_result_in_memory_is_read_like_one_on_disk() -> None:
    summary = summary_of("fedavg", 3, 0.6)
    result = Result(summary, [{"round": 1, "accuracy": 0.6, "bytes_up": 1, "bytes_down": 2}], {}, None)
    (run,) = read_runs([result])
    assert (run.method, run.seed, run.accuracy, run.history[0].bytes) == ("fedavg", 3, 0.6, 3)


@pytest.mark.parametrize(
    "curve", [{}, {"fpr": [0, 1]}, {"fpr": [0, 1], "tpr": [0]}, {"fpr": [0, "x"], "tpr": [0, 1]}, [1]]
)
def test_a_damaged_roc_curve_is_reported(tmp_path: Path, curve: Any) -> None:
    folder = write_run(tmp_path)
    place = folder / "attacks" / "membership"
    place.mkdir(parents=True)
    (place / "finding.json").write_text("{}")
    (place / "roc.json").write_text(json.dumps(curve))
    run = read_folder(folder)
    assert run.attacks[0].roc is None
    assert any("roc.json" in problem for problem in run.problems)


def test_attacks_are_found_at_any_depth_with_their_scores(tmp_path: Path) -> None:
    run = read_folder(write_everything(tmp_path) / "demo" / "fedavg" / "seed-0")
    inversion, membership = run.attacks
    assert (inversion.name, inversion.target) == ("inversion", "round-1-client-0")
    assert ("psnr (against x)", "21.5") in inversion.facts
    assert len(inversion.facts) == 2
    assert [picture.width for picture in inversion.pictures] == [8, 8]
    assert membership.roc == ((0.0, 0.0, 0.5, 1.0), (0.0, 0.5, 1.0, 1.0))
    assert run.problems == ()


def test_an_attack_without_a_finding_is_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "attacks" / "inversion" / "half").mkdir(parents=True)
    assert any("finding.json is missing" in problem for problem in read_folder(folder).problems)
