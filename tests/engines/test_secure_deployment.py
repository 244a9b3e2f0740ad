"""Secure sums between real processes on loopback: the simulator's bits, and a node that is killed between legs."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("flwr")
from fedveil.engines.flower.secure_engine import LEGS
from fedveil.experiment.config import Config, make_config
from fedveil.experiment.run import run_seed
from fedveil.federation.launch import with_shape
from fedveil.federation.node import open_node
from fedveil.session.results import Result
from tests.contract.federation import distance
from tests.engines.configs import quick_config
from tests.engines.loopback import federation, wait_until

pytestmark = pytest.mark.slow  # every leg starts a process on each node


def config_of(engine: str, clients: int, **run: Any) -> Config:
    content = quick_config("udp-fedavg", engine, clients=clients, cohort=clients, **run).model_dump(
        exclude_none=True
    )
    content["run"]["sampler"] = "all"
    content["aggregation"] = {"kind": "secure"}
    return make_config(content)


def reports(result: Result) -> list[dict[str, Any]]:
    assert result.folder is not None
    return [json.loads(line) for line in (result.folder / LEGS).read_text().splitlines()]


def test_three_processes_give_the_simulators_bits(tmp_path: Path) -> None:
    here = run_seed(config_of("simulation", 3), 0, experiment="simulated", results=tmp_path)
    with federation(tmp_path, quick_config("fedavg", clients=3), 3) as loopback:
        there = loopback.run(config_of("flower", 3))
    assert [line["answered"] for line in there.history] == [3, 3]
    assert distance(here.model, there.model) == 0
    assert there.summary["privacy"] == here.summary["privacy"]
    assert [line["leg"] for line in reports(there)[:5]] == [
        "advertise",
        "share",
        "upload",
        "confirm",
        "unmask",
    ]
    for folder in loopback.folders:
        assert {entry.round for entry in open_node(folder).guard.ledger.entries} == {1, 2}


def test_a_node_killed_while_it_computes_leaves_a_round_that_completes(tmp_path: Path) -> None:
    config = config_of("flower", 4, deadline=120.0)
    with federation(tmp_path, quick_config("fedavg", clients=4), 4, {2: "late"}) as loopback:
        found: list[Result] = []
        thread = Thread(target=lambda: found.append(loopback.run(with_shape(config, None))))
        thread.start()
        wait_until(lambda: loopback.mark(2).exists(), 900)
        loopback.kill("node-2")
        thread.join(900)
    (result,) = found
    assert [line["answered"] for line in result.history] == [4, 3]
