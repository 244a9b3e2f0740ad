"""Flower's simulation on Ray, through the command line's own way: the simulator's bits, and nothing left behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fedveil import experiment
from fedveil.flower_app.launch import run_seed
from fedveil.results import ResultFolder
from tests.contract.federation import distance
from tests.engines.configs import COMPARED, quick_config

pytest.importorskip("ray")
pytestmark = pytest.mark.slow  # Ray alone takes 15 s to start on a machine that does nothing else


@pytest.mark.parametrize("name", COMPARED)
def test_rays_simulation_gives_the_simulators_bits(name: str, tmp_path: Path) -> None:
    here = experiment.run_seed(quick_config(name), 0, experiment="test", results=tmp_path)
    there = run_seed(quick_config(name, "flower-simulation"), 0, experiment="test", results=tmp_path)
    assert distance(here.model, there.model) == 0
    assert there.folder is not None
    assert ResultFolder(there.folder).read().summary == there.summary
    assert {line["answered"] for line in there.history} == {3}
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in listed, "a process of the run is still there"
