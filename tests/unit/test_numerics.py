"""Runs of different numerics are neither resumed nor mixed, and an old folder can still be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedveil import numerics
from fedveil.errors import InputError
from fedveil.experiment.compare import plan_cells, run_cells
from fedveil.methods import METHODS
from fedveil.methods.method import AnyMethod, Method
from fedveil.methods.wrappers.averaging import ModelAverage
from fedveil.report.html import write_report
from fedveil.session.results import ResultFolder
from tests.contract.federation import StopsAfter, make_method
from tests.unit.experiment.test_compare import CONFIG
from tests.unit.session.test_session import go

NEXT = numerics.NUMERICS + 1


def upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the next version of fedveil, with other numerics, was installed."""
    monkeypatch.setattr(Method, "numerics", NEXT)


def upgrade_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> int:
    """As if the next version computed this method alone in another way; the method's next number."""
    next_own = METHODS[name].numerics + 1
    monkeypatch.setattr(METHODS[name], "numerics", next_own)
    return next_own


def interrupted(folder: Path, method: AnyMethod | None = None) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(folder, callbacks=[StopsAfter(2)], **({} if method is None else {"method": method}))


def test_a_run_records_its_numerics(tmp_path: Path) -> None:
    assert go(tmp_path / "r").summary["numerics"] == numerics.NUMERICS
    assert numerics.numerics_of(tmp_path / "r") == numerics.NUMERICS
    assert numerics.numerics_of(tmp_path / "nothing") is None


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "from before numbers"])
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "interrupted"])
def test_other_numerics_are_neither_resumed_nor_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marked: bool, finished: bool
) -> None:
    folder = tmp_path / "r"
    if finished:
        go(folder)
    else:
        interrupted(folder)
    if not marked:
        (folder / numerics.MARK).unlink()
        if finished:
            content = json.loads((folder / "summary.json").read_text())
            (folder / "summary.json").write_text(
                json.dumps({key: value for key, value in content.items() if key != "numerics"})
            )
    upgrade(monkeypatch)
    with pytest.raises(InputError) as refused:
        go(folder)
    assert (refused.value.field, refused.value.value) == ("numerics", NEXT - 1 if marked else 1)


def test_a_checkpoint_of_other_numerics_is_refused_even_in_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path / "r")
    upgrade(monkeypatch)
    (tmp_path / "r" / numerics.MARK).write_text(str(NEXT))
    with pytest.raises(InputError) as refused:
        go(tmp_path / "r")
    assert refused.value.field == "numerics"


def test_a_damaged_number_counts_as_another_version(tmp_path: Path) -> None:
    go(tmp_path / "r")
    (tmp_path / "r" / numerics.MARK).write_bytes(b"\xff\x00")
    with pytest.raises(InputError) as refused:
        go(tmp_path / "r")
    assert refused.value.field == "numerics"


def test_a_comparison_does_not_take_runs_of_other_numerics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "small.toml"
    config.write_text(CONFIG)
    cells = plan_cells([config], seeds=[0])
    assert run_cells(cells, tmp_path / "results", jobs=1) == {}
    upgrade(monkeypatch)
    failed = run_cells(cells, tmp_path / "results", jobs=1)
    assert set(failed) == {"udp-fedavg seed 0"}
    assert "numerics" in failed["udp-fedavg seed 0"]


def test_a_report_shows_an_old_folder_alone_and_refuses_to_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(tmp_path / "old")
    upgrade(monkeypatch)
    go(tmp_path / "new")
    assert ResultFolder(tmp_path / "old").read().summary["numerics"] == NEXT - 1
    for alone in ("old", "new"):
        assert write_report([tmp_path / alone], tmp_path / f"{alone}.html").exists()
    with pytest.raises(InputError) as refused:
        write_report([tmp_path / "old", tmp_path / "new"], tmp_path / "both.html")
    assert (refused.value.field, refused.value.value) == ("numerics", [NEXT - 1, NEXT])
    assert not (tmp_path / "both.html").exists()


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "interrupted"])
@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "plain"])
def test_a_methods_own_numerics_make_no_other_method_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool, wrapped: bool
) -> None:
    methods = {name: make_method(name) for name in ("fedlap", "fedceo")}
    if wrapped:
        methods = {name: ModelAverage().around(method) for name, method in methods.items()}
    for name, method in methods.items():
        if finished:
            go(tmp_path / name, method=method)
        else:
            interrupted(tmp_path / name, method)
    before = methods["fedlap"].numerics
    assert upgrade_alone(monkeypatch, "fedlap") == before + 1
    result = go(tmp_path / "fedceo", method=methods["fedceo"])
    assert (result.summary["rounds"], result.summary["numerics"]) == (4, numerics.NUMERICS)
    for _ in range(2):
        with pytest.raises(InputError) as refused:
            go(tmp_path / "fedlap", method=methods["fedlap"])
        assert (refused.value.field, refused.value.value) == ("numerics", before)
        # Without the folder's mark the checkpoint still tells.
        (tmp_path / "fedlap" / numerics.MARK).write_text(str(before + 1))
        if finished:
            break


def test_a_report_knows_the_number_of_each_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lap = make_method("fedlap")
    go(tmp_path / "lap", method=lap)
    go(tmp_path / "ceo", method=make_method("fedceo"))
    upgrade_alone(monkeypatch, "fedlap")
    go(tmp_path / "new", method=lap)
    go(tmp_path / "averaged", method=ModelAverage().around(lap))
    write_report([tmp_path / name for name in ("new", "averaged", "ceo")], tmp_path / "current.html")
    for mixed in (("lap", "new"), ("lap", "new", "ceo")):
        with pytest.raises(InputError) as refused:
            write_report([tmp_path / name for name in mixed], tmp_path / "mixed.html")
        assert refused.value.field == "numerics"


def test_a_comparison_keeps_the_runs_of_other_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "small.toml"
    config.write_text(CONFIG)
    cells = plan_cells([config], methods=["fedavg", "udp-fedavg"], seeds=[0])
    assert run_cells(cells, tmp_path / "results", jobs=1) == {}
    upgrade_alone(monkeypatch, "fedavg")
    assert set(run_cells(cells, tmp_path / "results", jobs=1)) == {"fedavg seed 0"}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_no_method_is_behind_the_numerics_of_all(name: str) -> None:
    assert METHODS[name].numerics >= numerics.NUMERICS
