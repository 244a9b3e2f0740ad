"""Secure sums over Flower's apps, in this process: the simulator's bits, dropouts, restarts, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import Error, Message
from flwr.common.serde import recorddict_to_proto

from fedveil.engines.flower.secure_engine import LEGS as LEGS_FILE
from fedveil.engines.flower.wire import HELLO, LEG, read_leg
from fedveil.engines.simulation import Simulation
from fedveil.experiment.prepare import prepare
from fedveil.experiment.run import run_seed
from fedveil.federation.node import open_node
from fedveil.federation.run_settings import LOG
from fedveil.methods.method import At
from fedveil.privacy.ledger import Ledger
from fedveil.session.results import Result
from fedveil.streams import ServerStreams
from tests.contract.federation import distance
from tests.engines.grid import Fault, InMemoryNodes
from tests.engines.secure import run_securely, secure_config, write_secure_nodes

FIELDS: dict[str, dict[str, object]] = {
    "udp-fedavg": {},
    "dp-fedavg": {},
    "fedavg": {},
    "fedprox": {"weighting": "uniform"},
    "fedceo": {"restart": "mean", "interval": 2},
    "dp-fedags-proven": {},
    "dp-fedsgd": {"record_rate": 0.5},
}


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_deployment_ends_with_the_bits_of_the_simulator(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = run_seed(
        secure_config(name, "simulation", method=FIELDS[name]), 0, experiment="test", results=tmp_path
    )
    folders = write_secure_nodes(tmp_path / "nodes")
    there = run_securely(secure_config(name, method=FIELDS[name]), folders, tmp_path, monkeypatch)
    assert [line["answered"] for line in there.history] == [5, 5]
    assert distance(here.model, there.model) == 0
    assert there.summary["privacy"] == here.summary["privacy"]
    assert there.summary["bytes_up"] == here.summary["bytes_up"]


LEGS = ("advertise", "share", "upload", "confirm", "unmask")


def silent_from(leg: str, round_: int = 1) -> Fault:
    """A node that is killed before it answers this leg, and comes back in the next round."""
    dead = LEGS[LEGS.index(leg) :]

    def fault(message: Message, answer: Callable[[], Message]) -> Message | None:
        if message.metadata.message_type == LEG:
            asked = read_leg(message.content)
            if asked.key[1] == round_ and asked.name in dead:
                return Message(Error(3, "Node Unavailable"), reply_to=message)
        return answer()

    return fault


def reports(result: Result) -> list[dict[str, Any]]:
    assert result.folder is not None
    return [json.loads(line) for line in (result.folder / LEGS_FILE).read_text().splitlines()]


@pytest.mark.parametrize("leg", LEGS)
def test_a_node_killed_at_any_leg_leaves_a_round_that_completes(
    leg: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who uploaded is in the sum, though it drops out later; the sum is exact either way."""
    folders = write_secure_nodes(tmp_path / "nodes")
    found = run_securely(secure_config(), folders, tmp_path, monkeypatch, faults={1002: silent_from(leg)})
    summed = 4 if leg in LEGS[:3] else 5
    assert [line["answered"] for line in found.history] == [summed, 5]
    here = simulated(left_out={1: () if summed == 5 else (2,)})
    assert distance(here, found.model) == 0
    rows = found.summary["privacy"]["proven"]
    assert any(f"at least {summed} of 5 clients answered" in text for text in rows[0]["assumptions"])


def simulated(left_out: Mapping[int, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The simulator's model where these clients do not answer in these rounds."""
    config = secure_config(engine="simulation")
    prepared = prepare(config, 0)
    task, method, plan = prepared.task, prepared.method, prepared.plan
    engine = Simulation(task, prepared.clients, method, plan, seed=0, execution="one-by-one", workers=1)
    server = method.init_server(task.init(0), plan)
    for number in range(1, plan.rounds + 1):
        at, ids = At(plan, number), tuple(range(plan.clients))
        answers = engine.exchange(ids, method.broadcast(at, server, ids), at)
        assert answers.up is not None
        kept = [i for i in ids if i not in left_out.get(number, ())]
        server = method.server_update(task, at, server, kept, answers.up.rows(kept), ServerStreams(0, number))
    engine.close()
    model: dict[str, torch.Tensor] = method.model(server)
    return model


@pytest.mark.parametrize("leg", LEGS)
def test_below_the_threshold_a_round_is_abandoned(
    leg: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is learnt, the model stays, and the round is charged: by the server, and by nodes that computed."""
    folders = write_secure_nodes(tmp_path / "nodes")
    faults = {1001: silent_from(leg), 1003: silent_from(leg)}
    found = run_securely(secure_config(), folders, tmp_path, monkeypatch, faults=faults)
    assert [line["answered"] for line in found.history] == [0, 5]
    assert distance(simulated({1: tuple(range(5))}), found.model) == 0
    assert found.folder is not None
    assert "is abandoned" in (found.folder / LOG).read_text()
    assert Ledger(found.folder / "ledger.jsonl").is_charged(run_of(found), 1)
    computed = 1 if leg in LEGS[:2] else 2
    assert len(open_node(folders[0]).guard.ledger) == 3 * computed, "three releases in each round"


def run_of(result: Result) -> str:
    assert result.folder is not None
    lines = (result.folder / "ledger.jsonl").read_text().splitlines()
    return next(str(json.loads(line)["run"]) for line in lines if "run" in json.loads(line))


def test_a_straggler_drops_out_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(message: Message, answer: Callable[[], Message]) -> Message | None:
        slow = message.metadata.message_type == LEG and read_leg(message.content).name == "upload"
        return None if slow else answer()

    folders = write_secure_nodes(tmp_path / "nodes")
    config = secure_config(run={"deadline": 2.0, "rounds": 1})
    found = run_securely(config, folders, tmp_path, monkeypatch, faults={1004: late})
    assert [line["answered"] for line in found.history] == [4]


@pytest.mark.parametrize("leg", LEGS)
def test_a_server_restarted_between_legs_begins_another_attempt(
    leg: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes forget what they kept of the first attempt, and are charged for both if they computed twice."""
    folders = write_secure_nodes(tmp_path / "nodes")

    class PowerCutError(Exception):
        """Of the server."""

    def cut(grid: InMemoryNodes) -> None:
        push = grid.push_messages

        def pushed(messages: Iterable[Message]) -> Iterable[str]:
            sent = list(messages)
            for message in sent:
                if message.metadata.message_type == LEG:
                    asked = read_leg(message.content)
                    if (asked.name, asked.key[1], asked.key[2]) == (leg, 2, 1):
                        raise PowerCutError
            return push(sent)

        monkeypatch.setattr(grid, "push_messages", pushed)

    with pytest.raises(PowerCutError):
        run_securely(secure_config(), folders, tmp_path, monkeypatch, watch=cut)
    found = run_securely(secure_config(), folders, tmp_path, monkeypatch)
    assert distance(simulated({}), found.model) == 0
    attempts = {(line["round"], line["attempt"]) for line in reports(found)}
    assert attempts >= {(1, 1), (2, 2)}
    uploads = 2 + (LEGS.index(leg) > LEGS.index("upload"))
    assert len(open_node(folders[0]).guard.ledger) == 3 * uploads


def test_ten_nodes_and_fifty_thousand_parameters_cost_at_most_a_fifth_more_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys, shares and signatures beside a model that is sent once and an upload of the same size."""
    folders = write_secure_nodes(tmp_path / "nodes", count=10)
    changes: dict[str, Any] = {
        "run": {"rounds": 1},
        "partition": {"clients": 10},
        "task": {"model_options": {"hidden": 680}},
    }
    sizes = {}
    for kind in ("plain", "secure"):
        config = secure_config(aggregation={"kind": kind}, **changes)
        counted = Counted()
        found = run_securely(config, folders, tmp_path / kind, monkeypatch, watch=counted.watch)
        assert found.history[-1]["answered"] == 10
        sizes[kind] = counted.bytes
        if kind == "secure":
            assert found.summary["parameters"] >= 50_000
            assert [line["leg"] for line in reports(found)] == list(LEGS)
            total = sum(line["bytes_up"] + line["bytes_down"] for line in reports(found))
            assert total <= sizes["secure"]
            assert all(line["seconds"] >= 0 and line["nodes"] == 10 for line in reports(found))
    assert sizes["secure"] <= 1.2 * sizes["plain"]


class Counted:
    """The bytes of all messages of a run after the introductions, as they go over the wire."""

    def __init__(self) -> None:
        self.bytes = 0

    def watch(self, grid: InMemoryNodes) -> None:
        answer = grid._reply

        def counted(message: Message) -> Message | None:
            reply = answer(message)
            if message.metadata.message_type != HELLO and reply is not None:
                for one in (message, reply):
                    self.bytes += recorddict_to_proto(one.content).ByteSize()
            return reply

        grid._reply = counted  # type: ignore[method-assign]
