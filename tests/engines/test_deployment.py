"""A federation of real processes on loopback, with TLS and registered keys: same bits, and it outlives its faults."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from fedveil.errors import FedveilError
from fedveil.experiment.config import Config
from fedveil.experiment.run import run_seed
from fedveil.federation.certificates import make_node_key
from fedveil.federation.launch import with_shape
from fedveil.federation.node import open_node
from fedveil.federation.run_settings import LOG
from fedveil.privacy.ledger import Ledger
from fedveil.session.results import Result
from tests.contract.federation import distance
from tests.engines.configs import COMPARED, quick_config
from tests.engines.loopback import Loopback, federation, wait_until
from tests.refusals import refuses

pytestmark = pytest.mark.slow  # seconds per exchange, and more to start the nodes


def simulated(config: Config, place: Path) -> Result:
    return run_seed(config, 0, experiment="simulated", results=place)


def log_of(result: Result) -> str:
    assert result.folder is not None
    return (result.folder / LOG).read_text()


def answered(result: Result) -> list[int]:
    return [line["answered"] for line in result.history]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    with federation(tmp_path_factory.mktemp("two"), quick_config("fedavg", clients=2), 2) as loopback:
        yield loopback


@pytest.mark.parametrize("name", COMPARED)
def test_two_nodes_give_the_simulators_bits(name: str, two_nodes: Loopback, tmp_path: Path) -> None:
    here = simulated(quick_config(name, clients=2), tmp_path)
    there = two_nodes.run(quick_config(name, "flower", clients=2))
    assert distance(here.model, there.model) == 0
    assert answered(there) == [2, 2]
    assert there.summary["privacy"] == here.summary["privacy"]
    run = f"{there.summary['experiment']}/"
    for folder in two_nodes.folders:
        charged = [entry for entry in open_node(folder).guard.ledger.entries if entry.run.startswith(run)]
        assert {entry.round for entry in charged} == {1, 2}


def test_broken_uploads_are_refused_by_name_and_never_aggregated(tmp_path: Path) -> None:
    faults = {1: "nan", 2: "shape", 3: "size"}
    with federation(tmp_path, quick_config("fedavg"), 4, faults) as loopback:
        result = loopback.run(quick_config("fedavg", "flower", cohort=4, deadline=300.0, max_message="500kB"))
    assert answered(result) == [1, 1]
    for client, said in ((1, "is not finite"), (2, "the model's is"), (3, "more than the 500000 allowed")):
        lines = [
            line for line in log_of(result).splitlines() if f"client {client}, node 'node-{client}'" in line
        ]
        assert len(lines) == 2
        assert all(said in line for line in lines)


def test_unregistered_nodes_are_refused_and_the_run_continues(tmp_path: Path) -> None:
    """Another version, another model, a key that nobody registered."""
    loopback = Loopback(tmp_path, quick_config("fedavg"), 4)
    for name in ("node.key", "node.pub"):
        (loopback.folders[3] / name).unlink()
    make_node_key(loopback.folders[3])
    try:
        loopback.start_server()
        for client, fault in ((0, None), (1, "version"), (2, "model"), (3, None)):
            loopback.start_node(client, fault)
        wait_until(lambda: loopback.processes["node-3"].poll() is not None, 900)
        result = loopback.run(quick_config("fedavg", "flower", clients=3, cohort=3, deadline=300.0))
    finally:
        loopback.close()
    assert answered(result) == [1, 1]
    log = log_of(result)
    assert "node 'node-1'" in log
    assert "its fedveil is '9.9.9'" in log
    assert "node 'node-2'" in log
    assert "its model or method is another" in log
    assert "node-3" not in log
    refused = loopback.log("node-3")
    assert "305" in refused or "not registered" in refused.lower() or "unauth" in refused.lower()
    assert "refused a node at 127.0.0.1 with the key SHA256:" in loopback.log("server")


def test_a_node_killed_in_a_round_and_one_that_is_late(tmp_path: Path) -> None:
    """The round continues with the others at its deadline; a straggler is back in the next, a dropout is not."""
    with federation(tmp_path, quick_config("fedavg", clients=3), 3, {1: "late", 2: "late"}) as loopback:
        once = loopback.run(quick_config("fedavg", "flower", clients=3, cohort=3, rounds=1), "once")
        assert answered(once) == [3]
        deadline = max(
            60.0, 4 * round(once.history[0]["seconds"])
        )  # what this machine needs, and time to spare
        config = quick_config("fedavg", "flower", clients=3, cohort=3, rounds=3, deadline=deadline)
        rounds = loopback.settings(with_shape(config, None)).folder / "rounds.jsonl"
        results: list[Result] = []
        waiting = threading.Thread(target=lambda: results.append(loopback.run(config)))
        waiting.start()
        wait_until(lambda: loopback.mark(1).exists() and loopback.mark(2).exists(), 900)
        loopback.kill("node-2")
        wait_until(lambda: len(rounds.read_text().splitlines()) == 2, 60 + 2 * deadline)
        loopback.mark(1).unlink()
        waiting.join(900)
        assert results, "the run did not end"
    (result,) = results
    assert answered(result) == [3, 1, 2]
    log = log_of(result)
    assert "round 2, exchange 0: client 1, node 'node-1'" in log
    assert "round 2, exchange 0: client 2, node 'node-2'" in log
    assert f"no answer within {deadline:g} s" in log
    assert "round 3, exchange 0: client 1" not in log


def test_a_killed_server_resumes_and_charges_every_attempt(tmp_path: Path) -> None:
    config = quick_config("udp-fedavg", "flower", clients=2, cohort=2, rounds=4, checkpoint_every=1)
    here = simulated(quick_config("udp-fedavg", clients=2, cohort=2, rounds=4, checkpoint_every=1), tmp_path)
    loopback = Loopback(tmp_path, quick_config("fedavg", clients=2), 2)
    folder = loopback.settings(with_shape(config, None)).folder
    try:
        loopback.start_server()
        for client in (0, 1):
            loopback.start_node(client)
        waiting = threading.Thread(target=lambda: attempt(loopback, config))
        waiting.start()
        wait_until(lambda: started(folder) == 2, 900)
        loopback.kill("server")
        waiting.join(400)
        assert not waiting.is_alive()
        loopback.start_server()
        result = loopback.run(config)
    finally:
        loopback.close()
    assert "was interrupted; submit it again to resume it" in loopback.log("server")
    assert distance(here.model, result.model) == 0, "the noise of this test is seeded"
    assert [line["round"] for line in result.history] == [1, 2, 3, 4]
    for node in loopback.folders:
        charged = {entry.round for entry in open_node(node).guard.ledger.entries}
        assert charged == {1, 2, 3, 4}
    assert len(Ledger(folder / "ledger.jsonl")) >= len(Ledger(here.folder / "ledger.jsonl"))  # type: ignore[operator]


def attempt(loopback: Loopback, config: Config) -> None:
    with refuses("server", FedveilError):
        loopback.run(config)


def started(folder: Path) -> int:
    """The last round that was begun: charged before anything is sent."""
    path = folder / "ledger.jsonl"
    return (
        max((json.loads(line)["round"] for line in path.read_text().splitlines()), default=0)
        if path.exists()
        else 0
    )
