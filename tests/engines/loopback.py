"""A federation on loopback made by `fedveil deploy`: real processes, TLS, registered keys; bounded in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import tomli_w

from fedveil.experiment.config import Config
from fedveil.experiment.prepare import prepare
from fedveil.federation.config import SERVER_FILE, ServerConfig
from fedveil.federation.create import Federation, init
from fedveil.federation.launch import submit
from fedveil.federation.processes import free_port, is_up
from fedveil.federation.run_settings import RunSettings
from fedveil.methods import METHODS
from fedveil.session.results import Result
from fedveil.validation import read_toml

FAULTS = Path(__file__).parent / "faults"


class Loopback:
    """The processes of one server and its nodes."""

    def __init__(self, place: Path, config: Config, nodes: int) -> None:
        """Write everybody's folders; a node gets the examples that the simulator gives to this client."""
        self.place = place
        federation = Federation(
            nodes=nodes,
            port=free_port(),
            methods=tuple(sorted(METHODS)),
            epsilon=None,
            minimum_cohort=1,
            trial=True,
        )
        self.folders = init(place / "federation", federation)
        self.server = place / "federation" / "server"
        clients = prepare(config, 0).clients
        for client, folder in enumerate(self.folders):
            data = clients.load([client])
            np.savez(folder / "data.npz", x=data.x[0].numpy(), y=data.y[0].numpy())
            change_toml(folder / "node.toml", testing={"seeded_noise": True})
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_server(self) -> None:
        self._start("server", "server", self.server, {})
        config = read_toml(self.server / SERVER_FILE, ServerConfig)
        wait_until(lambda: is_up(config, self.server) and "server is up" in self.log("server"), 600)

    def start_node(self, client: int, fault: str | None = None) -> None:
        folder = self.folders[client]
        more = {}
        if fault is not None:
            paths = [str(FAULTS), os.environ.get("PYTHONPATH", "")]
            more = {
                "FEDVEIL_TEST_FAULT": fault,
                "FEDVEIL_TEST_MARK": str(self.mark(client)),
                "PYTHONPATH": os.pathsep.join(part for part in paths if part),
            }
        self._start(folder.name, "node", folder, more)

    def mark(self, client: int) -> Path:
        """A straggling node creates this file when it begins to wait, and continues when the file is deleted."""
        return self.place / f"late-{client}"

    def _start(self, name: str, role: str, folder: Path, more: Mapping[str, str]) -> None:
        with (self.place / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "fedveil", "deploy", role, str(folder)],
                env=os.environ | more,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def log(self, name: str) -> str:
        path = self.place / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self, name: str) -> None:
        """As a power cut would: the process and all that it started, at once."""
        for process in _family(self.processes[name].pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.processes.pop(name).wait()

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for name, process in list(self.processes.items()):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill(name)

    def run(self, config: Config, experiment: str = "test") -> Result:
        """Submit this configuration, with the server's noise seeded as the nodes' is."""
        return submit(self.settings(config, experiment), self.home)

    @property
    def home(self) -> Path:
        return self.server / "state" / "flwr"

    def settings(self, config: Config, experiment: str = "test") -> RunSettings:
        return RunSettings(config, 0, experiment, self.place / "results", None, "seeded")


def _family(process: int) -> list[int]:
    """A process and its descendants, the parents first."""
    found = [process]
    for parent in found:
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=False
        )
        found += [int(line) for line in listed.stdout.split()]
    return found


def change_toml(path: Path, **sections: object) -> None:
    content = tomllib.loads(path.read_text())
    path.write_text(tomli_w.dumps(content | sections))


@contextmanager
def federation(
    place: Path, config: Config, nodes: int, faults: Mapping[int, str] | None = None
) -> Iterator[Loopback]:
    """A server and nodes, all started, and all stopped at the end."""
    loopback = Loopback(place, config, nodes)
    try:
        loopback.start_server()
        for client in range(nodes):
            loopback.start_node(client, (faults or {}).get(client))
        yield loopback
    finally:
        loopback.close()


def wait_until(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)
