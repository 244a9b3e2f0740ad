"""The commands of the pages on deployment, as an operator types them: a server and two nodes with tables, over TLS."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from typer.testing import CliRunner

pytest.importorskip("flwr")
import fedveil.cli.deploy  # noqa: F401  its commands register themselves on the app
from fedveil.cli import app
from fedveil.data.raw_table import read_table
from fedveil.data.schema import read_schema
from fedveil.data.table import table_examples
from fedveil.engines.flower.wire import REASONS
from fedveil.errors import FedveilError, InputError
from fedveil.federation.certificates import make_node_key
from fedveil.federation.processes import CONNECTION, flower, free_port
from fedveil.models.registry import make_model
from fedveil.task import Task
from tests.refusals import refuses

EXPERIMENT = """
[task]
dataset = "none"
input_shape = [64]
classes = 10
model = "mlp-2"
[run]
rounds = 2
sampler = "all"
deadline = 600
[method]
name = "udp-fedavg"
noise_scope = "local"
noise_multiplier = 1.5
clip = 1.0
lr = 0.1
epochs = 8
batch_size = 16
"""


def typed(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "fedveil", *map(str, arguments)]


def command(*arguments: str | Path) -> str:
    """What `fedveil` prints, called in this process to save its start."""
    done = CliRunner().invoke(app, [str(part) for part in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@contextmanager
def program(log: Path, *arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """`fedveil` in the background, ended with the block."""
    with log.open("ab") as out:
        process = subprocess.Popen(typed(*arguments), stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(300)


def wait_for(done: Callable[[], bool], what: str, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.5)


def write_rows(path: Path, first: int, last: int, step: int = 1) -> None:
    digits = load_digits()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"p{number}" for number in range(64)), "digit"])
        for row in range(first, last, step):
            writer.writerow([*digits.data[row].astype(int), digits.target[row]])


def accuracy(folder: Path, schema: Path, table: Path) -> float:
    """Of a run's model on rows that no node has."""
    examples = table_examples(read_schema(schema), read_table(table))
    task = Task(lambda: make_model("mlp-2", (64,), 10))
    model = {name: leaf[None] for name, leaf in load_file(folder / "model.safetensors").items()}
    found = task.outputs(model, examples.x[None])[0].argmax(-1)
    return float((found == examples.y).float().mean())


def change_policy(node: Path, **fields: Any) -> None:
    policy = tomllib.loads((node / "policy.toml").read_text())
    (node / "policy.toml").write_text(tomli_w.dumps(policy | fields))


def status(folder: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(command("deploy", "status", folder, "--json"))
    return answer


@dataclass(frozen=True)
class Federation:
    """A server and two nodes that run, and what belongs to them."""

    place: Path
    server: Path
    nodes: tuple[Path, Path]
    schema: Path
    port: str

    def log(self, name: str) -> str:
        path = self.place / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def said(self, name: str, words: str) -> bool:
        return words in self.log(name)

    def connected(self, name: str) -> bool:
        return self.said(name, "SuperNode ID")

    def online(self) -> int:
        return sum(node["status"] == "online" for node in status(self.server)["nodes"])

    def submit(self, *changes: str) -> dict[str, Any]:
        where = ["--results", str(self.place / "results"), "--json"]
        words = [word for change in changes for word in ("--set", change)]
        answer = command("deploy", "submit", self.server, self.place / "digits.toml", *words, *where)
        result: dict[str, Any] = json.loads(answer)
        return result

    def accuracy(self, result: dict[str, Any]) -> float:
        return accuracy(Path(result["result"]), self.schema, self.place / "test.csv")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    place = tmp_path_factory.mktemp("federation")
    schema, port = place / "schema.toml", str(free_port())
    write_rows(place / "public.csv", 0, 200)
    write_rows(place / "test.csv", 1500, 1797)
    (place / "digits.toml").write_text(EXPERIMENT)
    command("deploy", "schema", place / "public.csv", "--label", "digit", "--out", schema)
    command(
        *(
            "deploy",
            "init",
            place / "fed",
            "--nodes",
            "2",
            "--port",
            port,
            "--reader",
            "table",
            "--schema",
            schema,
        ),
        *("--epsilon", "12"),
    )
    nodes = (place / "fed" / "nodes" / "node-0", place / "fed" / "nodes" / "node-1")
    for number, node in enumerate(nodes):
        write_rows(node / "data.csv", 200 + number, 1500, 2)
    made = Federation(place, place / "fed" / "server", nodes, schema, port)
    with refuses("folder"):
        made.submit()
    with program(place / "server.log", "deploy", "server", made.server):
        with (  # all at once, as on the page: nodes that connect before their keys are registered are let in later
            program(place / "node-0.log", "deploy", "node", nodes[0]),
            program(place / "node-1.log", "deploy", "node", nodes[1]),
        ):
            wait_for(lambda: "server is up" in made.log("server"), "the server")
            assert "node node-1 may participate" in made.log("server")
            for name in ("node-0", "node-1"):
                wait_for(partial(made.connected, name), name)
            yield made
            assert "stopped" in command("deploy", "stop", nodes[1])
            assert "was not running" in command("deploy", "stop", nodes[1])
        assert "stopped" in command("deploy", "stop", made.server)
    assert status(made.server) == {"running": False}


@pytest.mark.slow
def test_a_private_run_adds_its_noise_and_each_node_charges_itself(federation: Federation) -> None:
    result = federation.submit()
    assert result["rounds"] == 2
    start = Task(lambda: make_model("mlp-2", (64,), 10)).init(0)
    model = load_file(Path(result["result"]) / "model.safetensors")
    moved = torch.cat([(model[name] - leaf).flatten() for name, leaf in start.items()])
    # Twice the mean of two uploads with noise 1.5 each; next to it an update of norm 1 is nothing.
    assert float(moved.std()) == pytest.approx(1.5, rel=0.05)
    proven = {(row["unit"], row["adversary"]): row["epsilon"] for row in result["privacy"]["proven"]}
    for node in federation.nodes:
        (limit,) = status(node)["limits"]
        assert limit["spent"] == pytest.approx(proven["client", "server"], rel=1e-6)


@pytest.mark.slow
def test_more_than_the_policies_allow_is_refused_before_any_work(federation: Federation) -> None:
    """The run ends there; the reason is only in the node's own log."""
    before = [status(node)["releases"] for node in federation.nodes]
    with pytest.raises(FedveilError) as caught:
        federation.submit("method.noise_multiplier=0.3", "run.rounds=3")
    assert [status(node)["releases"] for node in federation.nodes] == before
    for number in range(2):
        assert f"node node-{number} refused: {REASONS['policy']}" in str(caught.value)
        assert "epsilon 12 at delta 1e-05 (client level, against the server)" in federation.log(
            f"node-{number}"
        )
    assert "epsilon 12" not in str(caught.value)


@pytest.mark.slow
def test_unregistered_nodes_are_refused_and_false_servers_not_trusted(federation: Federation) -> None:
    stranger = federation.place / "stranger"
    stranger.mkdir()
    make_node_key(stranger)
    for name in ("ca.crt", "schema.toml", "policy.toml", "data.csv", "node.toml"):
        (stranger / name).write_bytes((federation.nodes[0] / name).read_bytes())
    with program(federation.place / "stranger.log", "deploy", "node", stranger) as process:
        assert process.wait(300) != 0
    assert not federation.connected("stranger")
    assert federation.online() == 2, "the others do not notice"

    other = federation.place / "other"
    command("deploy", "init", other, "--nodes", "2", "--port", federation.port)
    (stranger / "ca.crt").write_bytes((other / "authority" / "ca.crt").read_bytes())
    (stranger / "node.key").write_bytes((federation.nodes[0] / "node.key").read_bytes())
    with program(federation.place / "fooled.log", "deploy", "node", stranger):
        wait_for(lambda: "certificate" in federation.log("fooled").lower(), "the complaint")
    assert not federation.connected("fooled")


FOREIGN = """
[project]
name = "foreign"
version = "1.0.0"
description = "Brings code of its own."
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "stranger"
components = { serverapp = "foreign.apps:server", clientapp = "foreign.apps:client" }
"""

FOREIGN_CODE = """
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()

@server.main()
def ask(grid, context):
    content = RecordDict({"any": ConfigRecord({"thing": 1})})
    grid.send_and_receive([Message(content, node, "query") for node in grid.get_node_ids()], timeout=600)
"""


@pytest.mark.slow
def test_an_application_with_code_of_its_own_is_refused_by_every_node(federation: Federation) -> None:
    """Though the server itself submits it, with Flower's own command."""
    app_folder = federation.place / "foreign"
    (app_folder / "foreign").mkdir(parents=True)
    (app_folder / "pyproject.toml").write_text(FOREIGN)
    (app_folder / "foreign" / "__init__.py").touch()
    (app_folder / "foreign" / "apps.py").write_text(FOREIGN_CODE)
    answer = flower(federation.server, "run", str(app_folder), CONNECTION, "--format", "json")
    number = json.loads(answer[answer.index("{") :])["run-id"]
    for name in ("node-0", "node-1"):
        said = f"node {name} refuses run {number}: the application contains 'foreign/"
        wait_for(partial(federation.said, name, said), said)
    flower(federation.server, "stop", str(number), CONNECTION)
    assert federation.online() == 2, "they keep running"


@pytest.mark.slow
def test_a_run_continues_without_its_submitter_and_a_cancelled_run_charges_nothing_more(
    federation: Federation,
) -> None:
    """Ctrl-C only ends the waiting; `deploy cancel` ends the run, and nodes get no further messages of it."""
    words = ["--set", "run.rounds=400", "--set", "method.noise_multiplier=1000.0"]
    words += ["--results", str(federation.place / "results")]
    typed_words = typed("deploy", "submit", federation.server, federation.place / "digits.toml", *words)
    before = status(federation.nodes[0])["releases"]
    with (federation.place / "submit.log").open("ab") as told:
        process = subprocess.Popen(typed_words, stdout=told, stderr=told)
    wait_for(lambda: status(federation.nodes[0])["releases"] > before, "the first round")
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 130
    assert federation.said("submit", "the run continues on the server")
    assert federation.said("submit", f"fedveil deploy cancel {federation.server}")
    left = status(federation.nodes[0])["releases"]
    wait_for(lambda: status(federation.nodes[0])["releases"] > left, "another round without the submitter")
    assert "is cancelled" in command("deploy", "cancel", federation.server)
    with pytest.raises(InputError):
        command("deploy", "cancel", federation.server)
    time.sleep(30)  # what was under way when it was cancelled
    spent = [status(node)["releases"] for node in federation.nodes]
    time.sleep(60)  # several rounds would fit
    assert [status(node)["releases"] for node in federation.nodes] == spent
    assert federation.online() == 2, "server and nodes continue"


@pytest.mark.slow
def test_an_unprotected_round_exceeds_every_limit_afterwards(federation: Federation) -> None:
    for node in federation.nodes:
        change_policy(node, methods=["fedavg", "udp-fedavg"], limit=[])
    assert federation.accuracy(federation.submit("method.name=fedavg")) > 0.8
    limits = [{"unit": "client", "adversary": "server", "epsilon": 100.0, "delta": 1e-5}]
    for node in federation.nodes:
        change_policy(node, limit=limits)
        assert status(node)["limits"][0]["spent"] is None
