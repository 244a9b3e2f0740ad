"""The commands of docs/deploy.md, as an operator types them: a server and two nodes with tables, over TLS."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from typer.testing import CliRunner

pytest.importorskip("flwr")
import fedveil.cli_deploy  # noqa: F401  its commands register themselves on the app
from fedveil.cli import app
from fedveil.data.table import read_table
from fedveil.deploy.certificates import make_node_key
from fedveil.deploy.form import read_form
from fedveil.deploy.processes import free_port
from fedveil.errors import InputError
from fedveil.models.registry import make_model
from fedveil.task import Task

EXPERIMENT = """
[task]
dataset = "none"
input_shape = [64]
classes = 10
model = "mlp-2"
[run]
rounds = 3
sampler = "all"
deadline = 300
[method]
name = "udp-fedavg"
noise_scope = "local"
noise_multiplier = 1.5
clip = 1.0
lr = 0.1
epochs = 5
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


def accuracy(folder: Path, form: Path, table: Path) -> float:
    """Of a run's model on rows that no node has."""
    examples = read_form(form).examples(read_table(table))
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


@pytest.mark.slow
def test_from_two_tables_to_a_model(tmp_path: Path) -> None:
    place = tmp_path / "federation"
    form, test, config = tmp_path / "form.toml", tmp_path / "test.csv", tmp_path / "digits.toml"
    write_rows(tmp_path / "public.csv", 0, 200)
    write_rows(test, 1500, 1797)
    config.write_text(EXPERIMENT)
    command("deploy", "form", tmp_path / "public.csv", "--label", "digit", "--out", form)
    port = str(free_port())
    command(
        *("deploy", "init", place, "--nodes", "2", "--port", port, "--reader", "table", "--form", form),
        *("--epsilon", "12"),
    )
    nodes = [place / "nodes" / f"node-{number}" for number in range(2)]
    for number, node in enumerate(nodes):
        write_rows(node / "data.csv", 200 + number, 1500, 2)
    server = place / "server"
    with pytest.raises(InputError, match="no server is running there"):
        command("deploy", "submit", server, config)

    def log(name: str) -> str:
        path = tmp_path / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def online() -> int:
        return sum(node["status"] == "online" for node in status(server)["nodes"])

    with program(tmp_path / "server.log", "deploy", "server", server):
        wait_for(lambda: "server is up" in log("server"), "the server")
        assert "node node-1 may take part" in log("server")
        with (
            program(tmp_path / "node-0.log", "deploy", "node", nodes[0]),
            program(tmp_path / "node-1.log", "deploy", "node", nodes[1]),
        ):
            for name in ("node-0", "node-1"):
                wait_for(lambda name=name: "SuperNode ID" in log(name), name)
            assert online() == 2
            results = ["--results", tmp_path / "results"]

            # A private run: it trains, and each node has charged itself.
            answer = json.loads(command("deploy", "submit", server, config, *results, "--json"))
            assert answer["rounds"] == 3
            assert accuracy(Path(answer["result"]), form, test) > 0.5
            proven = {(row["unit"], row["adversary"]): row["epsilon"] for row in answer["privacy"]["proven"]}
            for node in nodes:
                (limit,) = status(node)["limits"]
                assert limit["spent"] == pytest.approx(proven["client", "server"], rel=1e-6)

            # More rounds than the policies allow: the nodes refuse before they work, and the ledger stays as it is.
            before = [status(node)["releases"] for node in nodes]
            quiet = ["--set", "method.noise_multiplier=0.3", "--set", "run.rounds=1", *results]
            command("deploy", "submit", server, config, *quiet)
            assert [status(node)["releases"] for node in nodes] == before
            refusals = "".join(path.read_text() for path in (tmp_path / "results").rglob("federation.log"))
            for number in range(2):
                assert f"node node-{number} refuses round 1" in refusals
            assert "epsilon 12 at delta 1e-05 (client level, against the server)" in refusals

            # FedAvg hides nothing: only nodes whose operators say so take part, and from then on no limit can be kept.
            for node in nodes:
                change_policy(node, methods=["fedavg", "udp-fedavg"], limit=[])
            plain = ["--set", "method.name=fedavg", *results]
            answer = json.loads(command("deploy", "submit", server, config, *plain, "--json"))
            assert accuracy(Path(answer["result"]), form, test) > 0.85
            limits = [{"unit": "client", "adversary": "server", "epsilon": 100.0, "delta": 1e-5}]
            for node in nodes:
                change_policy(node, limit=limits)
                assert status(node)["limits"][0]["spent"] is None

            # A node with a key that nobody registered is not let in; the others do not notice.
            stranger = place / "nodes" / "stranger"
            stranger.mkdir()
            make_node_key(stranger)
            for name in ("ca.crt", "form.toml", "policy.toml", "data.csv", "node.toml"):
                (stranger / name).write_bytes((nodes[0] / name).read_bytes())
            with program(tmp_path / "stranger.log", "deploy", "node", stranger) as process:
                assert process.wait(300) != 0
            assert online() == 2

            # Nor does a node talk to a server whose certificate another authority signed.
            command("deploy", "init", tmp_path / "other", "--nodes", "2", "--port", port)
            (stranger / "ca.crt").write_bytes((tmp_path / "other" / "authority" / "ca.crt").read_bytes())
            (stranger / "node.key").write_bytes((nodes[0] / "node.key").read_bytes())
            with program(tmp_path / "fooled.log", "deploy", "node", stranger):
                wait_for(
                    lambda: "certificate" in log("fooled").lower(), "the complaint about the certificate", 120
                )

            assert "stopped" in command("deploy", "stop", nodes[1])
            assert "was not running" in command("deploy", "stop", nodes[1])
        assert "stopped" in command("deploy", "stop", server)
    assert status(server) == {"running": False}
