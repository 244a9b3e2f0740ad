"""Start a run on Flower and wait for its result: in a simulation of its own, or on a federation that is there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import tomli_w

from fedveil.config import Config
from fedveil.errors import FedveilError, InputError
from fedveil.experiment import load_image_or_table, prepare
from fedveil.experiment import run_seed as simulate_seed
from fedveil.flower_app.settings import PROBLEM, RunSettings
from fedveil.messages import Record
from fedveil.methods.method import At
from fedveil.privacy.releases import Plan
from fedveil.results import Result, ResultFolder
from fedveil.run import Observer, RoundEnd

SERVER_APP = "fedveil.flower_app.server:app"
CLIENT_APP = "fedveil.flower_app.client:app"
_NAME = "fedveil-run"
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_LOOK_EVERY = 0.3
_START_SECONDS = 120.0
Observe = Callable[[Plan], Sequence[Observer]]


def run_seed(
    config: Config,
    seed: int,
    *,
    experiment: str,
    results: Path,
    data_dir: Path | None = None,
    observe: Observe = lambda _plan: (),
    federation: Path | None = None,
) -> Result:
    """One seed of an experiment with the engine that its configuration names.

    `federation` is the Flower home of the server to submit to, for the engine "flower".
    """
    if config.run.engine == "simulation":
        return simulate_seed(
            config, seed, experiment=experiment, results=results, data_dir=data_dir, observe=observe
        )
    require_flower(config.run.engine)
    data = None if data_dir is None else data_dir.absolute()
    settings = RunSettings(config, seed, experiment, results.absolute(), data)
    if config.run.engine == "flower":
        if federation is None:
            raise InputError(
                "run.engine",
                "flower",
                "no federation is named",
                "Submit it with `fedveil deploy submit DIR CONFIG`.",
            )
        return submit(settings, federation, observe)
    prepared = prepare(config, seed, data_dir)  # refuses before anything is started
    finished = ResultFolder(settings.folder)
    if finished.finished:
        return finished.read()
    with tempfile.TemporaryDirectory(prefix="fedveil-flower-") as place:
        home = Path(place)
        port = free_port()
        write_connection(home, f"127.0.0.1:{port}")
        arguments = ["--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
        arguments += ["--disable-runtime-dependency-installation"]
        with superlink(home, arguments, port):
            nodes = f"num-supernodes={prepared.plan.clients} client-resources-num-cpus=1"
            nodes += " init-args-log-to-driver=false"
            command = ["--federation-config", nodes]
            return _follow(settings, home, command, observe(prepared.plan), prepared.plan)


def submit(settings: RunSettings, home: Path, observe: Observe = lambda _plan: ()) -> Result:
    """Submit a run to the SuperLink that `home` (a Flower home) names, and wait for its result.

    The run's folder is written by the server; it must be on this machine or on a disk that both see.
    """
    settings = replace(settings, config=with_shape(settings.config, settings.data))
    finished = ResultFolder(settings.folder)
    if finished.finished:
        return finished.read()
    section = settings.config.run
    clients = settings.config.partition.clients or 1
    plan = Plan(clients, section.cohort or clients, section.sampler, section.rounds)
    return _follow(settings, home, [], observe(plan), plan)


def with_shape(config: Config, data_dir: Path | None) -> Config:
    """The configuration with the shape and the classes of the server's test set, where it does not say them."""
    if config.task.input_shape is not None and config.task.classes is not None:
        return config
    dataset = load_image_or_table(config, data_dir)
    known = {"input_shape": list(dataset.input_shape), "classes": dataset.num_classes}
    said = {key: getattr(config.task, key) or value for key, value in known.items()}
    return config.model_copy(update={"task": config.task.model_copy(update=said)})


def require_flower(engine: str) -> None:
    for module in ("flwr", "ray") if engine == "flower-simulation" else ("flwr",):
        if importlib.util.find_spec(module) is None:
            raise InputError("run.engine", engine, f"{module} is not installed", "Install fedveil[flower].")


def write_app(folder: Path, settings: RunSettings) -> Path:
    """An app for `flwr run` that brings no code: it names fedveil's own apps and holds the run's settings."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "project": {"name": "fedveil-run", "version": "1.0.0", "license": "Apache-2.0", "dependencies": []},
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedveil",
                    "components": {"serverapp": SERVER_APP, "clientapp": CLIENT_APP},
                    "config": settings.to_run_config(),
                }
            }
        },
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(content))
    return folder


def write_connection(home: Path, address: str, root_certificates: Path | None = None) -> None:
    """Name a SuperLink in this Flower home; without certificates, the connection is not encrypted."""
    connection: dict[str, str | bool] = {"address": address, "insecure": root_certificates is None}
    if root_certificates is not None:
        connection["root-certificates"] = str(root_certificates)
    home.mkdir(parents=True, exist_ok=True)
    content = {"superlink": {"default": _NAME, _NAME: connection}}
    (home / "config.toml").write_text(tomli_w.dumps(content))


def environment(home: Path) -> dict[str, str]:
    """For every process of Flower: nothing calls home, one thread per client, our own interpreter first."""
    paths = [
        str(Path(part).absolute()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part
    ]
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    own = {"FLWR_HOME": str(home), "PYTHONPATH": os.pathsep.join(paths), "PATH": programs}
    return os.environ | _QUIET | own


def program(name: str) -> str:
    """Flower's command of this name, beside our own interpreter or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FedveilError(f"{name} is not installed. Install fedveil[flower].")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def superlink(home: Path, arguments: Sequence[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A SuperLink without TLS on loopback, up when this begins and gone when it ends."""
    with (home / "superlink.log").open("ab") as log:
        process = subprocess.Popen(
            [program("flower-superlink"), *arguments],
            env=environment(home),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        _wait_until_healthy(process, port, home / "superlink.log")
        yield process
    finally:
        stop(process)


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise FedveilError(f"Flower's SuperLink did not start:\n{_tail(log)}")


def stop(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """End a process that we started, and what it started."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _follow(
    settings: RunSettings, home: Path, arguments: Sequence[str], observers: Sequence[Observer], plan: Plan
) -> Result:
    """Submit the run, tell the observers of its rounds as they appear in its folder, and read the result."""
    folder = ResultFolder(settings.folder)
    problem = settings.folder / PROBLEM
    problem.unlink(missing_ok=True)
    app = write_app(home / "fedveil-run", settings)
    log = home / "run.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [program("flwr"), "run", str(app), _NAME, "--stream", *arguments],
            env=environment(home),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    told = 0
    try:
        with _terminated_by_exception():
            while True:
                ended = process.poll() is not None
                told = _tell(folder, observers, plan, told)
                if folder.finished:
                    return folder.read()
                if problem.exists():
                    raise FedveilError(problem.read_text())
                if ended:
                    raise FedveilError(f"the run on Flower ended without a result:\n{_tail(log)}")
                time.sleep(_LOOK_EVERY)
    finally:
        stop(process)


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """SIGTERM as an exception, so that the processes we started end with us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(folder: ResultFolder, observers: Sequence[Observer], plan: Plan, told: int) -> int:
    """Hand on the rounds after `told`. What a round's model was, only the server knows."""
    for line in folder.rounds():
        number = int(line["round"])
        if number <= told:
            continue
        metrics = {key: value for key, value in line.items() if key != "round"}
        end = RoundEnd(At(plan, number), (), Record(), {}, number == plan.rounds, metrics)
        for observer in observers:
            observer.round_ends(end)
        told = number
    return told


def _tail(log: Path, lines: int = 80) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
