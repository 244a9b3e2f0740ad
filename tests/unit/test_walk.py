"""CONTRIBUTING's walk through the code is the way that a run takes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from fedveil.cli import main
from tests.unit.test_architecture import LAYERS, SOURCE

ROOT = SOURCE.parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
WALK = PAGE[PAGE.index("## The walk") : PAGE.index("## Layout")]
HOPS: list[tuple[str, str]] = re.findall(r"`([a-z_/]+\.py): (\w+)`", WALK)


@contextmanager
def traced(entered: dict[tuple[str, str], None]) -> Iterator[None]:
    """Adds every function of the package, by file and name, in the order of its first call."""

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(SOURCE)):
            entered.setdefault((Path(path).relative_to(SOURCE).as_posix(), frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def test_the_walk_is_short_enough_to_read() -> None:
    assert len(re.findall(r"^\d+\. ", WALK, re.MULTILINE)) == 10
    assert 10 <= len(HOPS) <= 15


def test_every_file_of_the_walk_exists() -> None:
    for name in re.findall(r"`([\w/]+\.py)[`:]", WALK):
        assert (SOURCE / name).exists() or (ROOT / name).exists(), name


def test_a_run_and_its_report_take_the_walk_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    run = ["run", str(ROOT / "experiments" / "demo.toml"), "--results", str(results)]
    run += ["--set", "run.rounds=1", "--set", "run.workers=1"]  # clients train in this process
    entered: dict[tuple[str, str], None] = {}
    for arguments in (run, ["report", str(results / "demo"), "-o", str(tmp_path / "report.html")]):
        monkeypatch.setattr(sys, "argv", ["fedveil", *arguments])
        with traced(entered), pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
    order = list(entered)
    assert [hop for hop in HOPS if hop not in entered] == []
    assert sorted(HOPS, key=order.index) == HOPS


def test_the_layout_is_the_one_that_imports_are_held_to() -> None:
    table = PAGE[PAGE.index("## Layout") : PAGE.index("## Rules")]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert [re.findall(r"`([\w.]+)`", row) for row in rows] == LAYERS
