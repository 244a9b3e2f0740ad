"""Flower's simulation on Ray, through the command line's own way: the simulator's bits, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from fedveil.experiment.run import run_seed
from fedveil.session.results import ResultFolder
from tests.contract.federation import distance
from tests.engines.configs import COMPARED, quick_config
from tests.engines.loopback import wait_until

pytest.importorskip("ray")
pytestmark = pytest.mark.slow  # Ray alone takes 15 s to start on a machine that does nothing else


MARK = "FEDVEIL_TEST_RUN"


def left_behind(place: Path) -> list[str]:
    """The processes that inherited this test's mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={place}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.parametrize("name", COMPARED)
def test_rays_simulation_gives_the_simulators_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    here = run_seed(quick_config(name), 0, experiment="test", results=tmp_path)
    there = run_seed(quick_config(name, "flower-simulation"), 0, experiment="test", results=tmp_path)
    assert distance(here.model, there.model) == 0
    assert there.folder is not None
    assert ResultFolder(there.folder).read().summary == there.summary
    assert {line["answered"] for line in there.history} == {3}
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(("number", "timeout"), [(signal.SIGTERM, 60), (signal.SIGKILL, 120)])
def test_nothing_outlives_a_run_that_is_ended(number: signal.Signals, timeout: float, tmp_path: Path) -> None:
    """Its SuperLink ends at once, or soon if the run could not disconnect; then what depends on it ends."""
    config = tmp_path / "test.toml"
    config.write_text(quick_config("fedavg", "flower-simulation", rounds=100_000).to_toml())
    command = [sys.executable, "-m", "fedveil", "run", str(config), "--results", str(tmp_path / "results")]
    with (tmp_path / "log").open("wb") as log:
        env = os.environ | {MARK: str(tmp_path)}
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: any((tmp_path / "results").rglob("rounds.jsonl")), 300)
        assert len(left_behind(tmp_path)) > 3, "the run, its SuperLink, its SuperExec, its simulation"
    finally:
        process.send_signal(number)
        process.wait(60)
    wait_until(lambda: not left_behind(tmp_path), timeout)
