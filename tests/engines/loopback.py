"""A federation on this machine's loopback: real processes of Flower, a folder for each node, bounded in time."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tomli_w

from fedveil.config import Config
from fedveil.experiment import prepare
from fedveil.flower_app.launch import environment, free_port, program, stop, superlink, write_connection
from fedveil.methods import METHODS


def write_node(folder: Path, config: Config, client: int, *, seeded: bool = True) -> Path:
    """A node's folder with the examples that the simulator would give to this client."""
    folder.mkdir(parents=True, exist_ok=True)
    data = prepare(config, 0).clients.load([client])
    np.savez(folder / "data.npz", x=data.x[0].numpy(), y=data.y[0].numpy())
    node = {
        "name": f"node-{client}",
        "client": client,
        "data": {"reader": "npz", "path": "data.npz"},
        "testing": {"seeded_noise": seeded},
    }
    (folder / "node.toml").write_text(tomli_w.dumps(node))
    (folder / "policy.toml").write_text(tomli_w.dumps({"methods": sorted(METHODS), "minimum_cohort": 1}))
    return folder


@dataclass
class Loopback:
    """The server's processes and the nodes'."""

    place: Path
    port: int = field(default_factory=free_port)
    nodes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.place / "server"

    def log(self, client: int) -> str:
        return (self.place / f"node-{client}.log").read_text(errors="replace")

    def server_log(self) -> str:
        return (self.home / "superlink.log").read_text(errors="replace")

    def arguments(self) -> list[str]:
        return [
            "--insecure",
            "--host", "127.0.0.1",
            "--port", str(self.port),
            "--database", str(self.home / "state.db"),
            "--disable-runtime-dependency-installation",
        ]  # fmt: skip

    @contextmanager
    def server(self) -> Iterator[subprocess.Popen[bytes]]:
        write_connection(self.home, f"127.0.0.1:{self.port}")
        with superlink(self.home, self.arguments(), self.port) as process:
            yield process

    def start_node(self, client: int, folder: Path, extra: Mapping[str, str] | None = None) -> None:
        home = self.place / f"home-{client}"
        home.mkdir(exist_ok=True)
        with (self.place / f"node-{client}.log").open("ab") as log:
            self.nodes[client] = subprocess.Popen(
                [
                    program("flower-supernode"),
                    "--insecure",
                    "--superlink", f"127.0.0.1:{self.port}",
                    "--port", str(free_port()),
                    "--node-config", f"fedveil-node='{folder}'",
                ],
                env=environment(home) | dict(extra or {}),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip

    def stop_nodes(self) -> None:
        for process in self.nodes.values():
            stop(process)


@contextmanager
def federation(
    place: Path, config: Config, clients: Sequence[int], faults: Mapping[int, Mapping[str, str]] | None = None
) -> Iterator[Loopback]:
    """A server and these clients' nodes, all gone at the end; `faults` are environment variables of nodes."""
    loopback = Loopback(place)
    with ExitStack() as stack:
        stack.enter_context(loopback.server())
        stack.callback(loopback.stop_nodes)
        for client in clients:
            folder = write_node(place / f"node-{client}", config, client)
            loopback.start_node(client, folder, (faults or {}).get(client))
        yield loopback


def wait_until(what: object, seconds: float) -> None:
    """Wait until `what()` is true."""
    assert callable(what)
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)
