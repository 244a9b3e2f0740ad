"""Every registered method through the apps of Flower, in this process: the same bits as the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedveil import METHODS
from fedveil.config import Config, make_config
from fedveil.experiment import result_folder, run_seed
from fedveil.flower_app.client import app as client_app
from fedveil.flower_app.server import app as server_app
from fedveil.flower_app.settings import RunSettings
from fedveil.methods.method import field_names
from fedveil.results import Result, ResultFolder
from tests.contract.federation import QUICK, distance
from tests.engines.grid import InMemoryNodes

CLIENTS = 4


def quick_config(name: str, engine: str = "simulation", **run: Any) -> Config:
    known = set(field_names(METHODS[name]))
    fields = {key: value for key, value in QUICK.items() if key in known} | (
        {"batch_size": 16} if "batch_size" in known else {}
    )
    return make_config(
        {
            "task": {"dataset": "digits", "model": "mlp-2", "data_options": {}, "model_options": {}},
            "partition": {"kind": "dirichlet", "clients": CLIENTS},
            "method": {"name": name} | fields,
            "run": {"rounds": 2, "cohort": 3, "engine": engine, "execution": "one-by-one", "workers": 1}
            | run,
        }
    )


def on_flower(config: Config, results: Path, grid_of: Any = InMemoryNodes) -> tuple[Result, InMemoryNodes]:
    settings = RunSettings(config, 0, "test", results)
    given = settings.to_run_config()
    grid = grid_of(client_app, [{"partition-id": p} for p in range(CLIENTS)], given)
    server_app(grid, Context(1, 1, {}, RecordDict(), dict(given)))
    return ResultFolder(result_folder(config, 0, "test", results)).read(), grid


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_apps_give_the_simulators_bits(name: str, tmp_path: Path) -> None:
    here = run_seed(quick_config(name), 0, experiment="test", results=tmp_path)
    there, _ = on_flower(quick_config(name, "flower-simulation"), tmp_path)
    assert distance(here.model, there.model) == 0
    assert [line["answered"] for line in there.history] == [line["answered"] for line in here.history]
    assert there.summary["privacy"] == here.summary["privacy"]
    assert there.summary["per_client"] == here.summary["per_client"]
    assert there.summary["personal"] == here.summary["personal"]
