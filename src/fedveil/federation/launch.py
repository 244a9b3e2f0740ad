"""Start a run on Flower and wait for its result: in a simulation, or on a running federation."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from fedveil.atomic_files import write_atomically
from fedveil.errors import FedveilError, InputError, install
from fedveil.experiment.config import Config
from fedveil.experiment.prepare import Prepared, check_method, load_examples, loss_name
from fedveil.experiment.sections import NO_DATASET, TextSection
from fedveil.experiment.target import with_target_noise
from fedveil.federation.config import SERVER_FILE, ServerConfig
from fedveil.federation.parent_watch import PARENT
from fedveil.federation.processes import (
    CONNECTION,
    START_SECONDS,
    environment,
    free_port,
    is_up,
    own_program,
    write_connection,
)
from fedveil.federation.run_settings import PROBLEM, RUN, RunSettings, agreed_schema, vocabulary_on_nodes
from fedveil.messages import Record
from fedveil.methods.method import At, current_numerics
from fedveil.privacy.releases import Plan
from fedveil.session.loop import Callback, CallbacksFor, RoundEnd
from fedveil.session.results import Result, ResultFolder
from fedveil.validation import read_toml

SERVER_APP = "fedveil.federation.server_app:app"
CLIENT_APP = "fedveil.federation.client_app:app"
_LOOK_EVERY = 0.3
_ASK_EVERY = 20.0
STOPPED = "finished:stopped"
"""Flower's status of a run that was cancelled."""
_TRIES = 3
_RAY_GAVE_UP = "The current node timed out during startup"


class RayNotStartedError(FedveilError):
    """Ray did not start within its own timeout of half a minute, which happens on busy machines."""


def simulate(settings: RunSettings, prepared: Prepared, callbacks_for: CallbacksFor) -> Result:
    """Run on Flower's simulation, with a SuperLink that is started for this run only."""
    check_method(prepared, settings.seed)  # refuses before anything is started
    finished = ResultFolder(settings.folder)
    finished.require_numerics(current_numerics(settings.config.method["name"]))
    if finished.finished:
        finished.require_data(prepared.digest)
        return finished.read()
    with tempfile.TemporaryDirectory(prefix="fedveil-flower-") as place:
        link = ServerConfig(port=free_port(), insecure=True, state=Path())
        home = write_connection(link, Path(place))
        with _simulating(link, home):
            nodes = f"num-supernodes={prepared.plan.clients} client-resources-num-cpus=1"
            nodes += " init-args-log-to-driver=false"
            start = functools.partial(_submit, settings, home, ["--federation-config", nodes])
            callbacks = callbacks_for(prepared.plan)
            for _ in range(_TRIES - 1):
                with suppress(RayNotStartedError):
                    return _follow(settings, home, start, callbacks, prepared.plan)
            return _follow(settings, home, start, callbacks, prepared.plan)


def submit(settings: RunSettings, home: Path, callbacks_for: CallbacksFor = lambda _plan: ()) -> Result:
    """Submit a run to the SuperLink that `home` (a Flower home) names, and wait for its result.

    The run's folder is written by the server; it must be on this machine or on a shared disk. If a run of the same
    settings is already running, it is followed instead of submitted again.
    """
    config = with_shape(settings.config, settings.data)
    section, clients = config.run, config.partition.clients or 1
    plan = Plan(clients, section.cohort or clients, section.sampler, section.rounds)
    config = with_target_noise(config, plan)
    config = config.model_copy(update={"run": config.run.model_copy(update={"federation": None})})
    settings = replace(settings, config=config)  # only settings that nodes need are sent to them
    finished = ResultFolder(settings.folder)
    finished.require_numerics(current_numerics(settings.config.method["name"]))
    if finished.finished:
        return finished.read()

    def start() -> str:
        return _running_attempt(settings, home) or _submit(settings, home, [])

    return _follow(settings, home, start, callbacks_for(plan), plan)


def server_home(config: Config) -> Path:
    """The Flower home of the server that `run.federation` names, the folder of `fedveil deploy server`."""
    if config.run.federation is None:
        raise InputError(
            "run.federation", None, "no server is named", "Give the folder of its `fedveil deploy server`."
        )
    folder = Path(config.run.federation).absolute()
    return write_connection(read_toml(folder / SERVER_FILE, ServerConfig), folder)


def with_shape(config: Config, data_dir: Path | None) -> Config:
    """The configuration with missing shape, classes and loss taken from the server's test set or schema.

    Nodes compare these with their own data.
    """
    if vocabulary_on_nodes(config) is not None:
        length = (config.task.text or TextSection()).length
        if config.task.input_shape not in (None, [length]):
            raise InputError(
                "task.input_shape",
                config.task.input_shape,
                f"texts are {length} tokens long (task.text.length)",
                f"Use [{length}].",
            )
    if config.task.dataset == NO_DATASET:
        schema = agreed_schema(config, data_dir)
        if schema is None:
            return config
        known = {"input_shape": [len(schema.mean)], "classes": schema.outputs}
    else:
        dataset = load_examples(config, data_dir)
        schema = dataset.schema
        known = {"input_shape": list(dataset.example_shape), "classes": dataset.num_classes}
    known["loss"] = loss_name(config, schema)
    said = {key: getattr(config.task, key) or value for key, value in known.items()}
    return config.model_copy(update={"task": config.task.model_copy(update=said)})


def require_flower(engine: str) -> None:
    for module in ("flwr", "ray") if engine == "flower-simulation" else ("flwr",):
        if importlib.util.find_spec(module) is None:
            raise InputError("run.engine", engine, f"{module} is not installed", install("flower"))


def write_app(folder: Path, settings: RunSettings) -> Path:
    """Write an app for `flwr run` without code: it names fedveil's own apps and contains the run's settings."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "project": {
            "name": "fedveil-run",
            "version": "1.0.0",
            "description": "A run of fedveil.",
            "license": "Apache-2.0",
            "dependencies": [],
        },
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


def surroundings(home: Path) -> dict[str, str]:
    """The environment of every program: without telemetry, and with absolute module paths."""
    paths = [
        str(Path(part).absolute()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part
    ]
    return environment(home, PYTHONPATH=os.pathsep.join(paths))


def _flwr_program() -> str:
    """The path of Flower's command, beside the Python interpreter or on PATH."""
    beside = Path(sys.executable).parent / "flwr"
    found = str(beside) if beside.exists() else shutil.which("flwr")
    if found is None:
        raise FedveilError(f"flwr is not installed. {install('flower')}", field="program", value="flwr")
    return found


@contextmanager
def _simulating(link: ServerConfig, home: Path) -> Iterator[None]:
    """Run a SuperLink on loopback that simulates its nodes, for the duration of the context."""
    command = [*own_program("superlink"), "--insecure", "--simulation"]
    command += ["--host", link.listen, "--port", str(link.port), "--disable-runtime-dependency-installation"]
    log = home / "superlink.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=surroundings(home) | {PARENT: str(os.getpid())},
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + START_SECONDS
        while not is_up(link, home):
            if process.poll() is not None or time.monotonic() > end:
                raise FedveilError(
                    f"Flower's SuperLink did not start:\n{_last_lines(log.read_text(errors='replace'))}",
                    field="superlink",
                )
            time.sleep(_LOOK_EVERY)
        yield
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], timeout: float = 10.0) -> None:
    """End a process and all its descendants, since Flower's simulation does not end with its parent."""
    started = family(process.pid)[1:]
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
        process.kill()
    process.wait()
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + timeout
        for one in started:
            with suppress(ProcessLookupError):
                os.kill(one, number)
        while (started := [*_parents().keys() & started]) and time.monotonic() < end:
            time.sleep(_LOOK_EVERY)


def family(process: int) -> list[int]:
    """A process and its descendants, parents first."""
    parents = _parents()
    found = [process]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def _parents() -> dict[int, int]:
    """The parent of every running process; from /proc if it exists, since small images have no `ps`."""
    if not Path("/proc/self/stat").exists():
        command = ["ps", "-A", "-o", "pid=,ppid=,stat="]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in listed.splitlines()]
        return {int(number): int(parent) for number, parent, state in rows if not state.startswith("Z")}
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The name may contain any characters.
            after_name = (place / "stat").read_text().rpartition(")")[2]
            state, parent = after_name.split()[:2]
            if state != "Z":
                found[int(place.name)] = int(parent)
    return found


def _follow(
    settings: RunSettings, home: Path, start: Callable[[], str], callbacks: Sequence[Callback], plan: Plan
) -> Result:
    """Start the run, call the callbacks as rounds appear in its folder, and read the result."""
    folder = ResultFolder(settings.folder)
    problem = settings.folder / PROBLEM
    problem.unlink(missing_ok=True)
    with _terminated_by_exception():
        number = start()
        known = silent = 0
        asked = time.monotonic()
        while True:
            known = _call_round_ends(folder, callbacks, plan, known)
            if folder.finished:
                return folder.read()
            if problem.exists():
                text = problem.read_text()
                if _status(home, number) == STOPPED:
                    raise _cancelled(number)
                raise FedveilError(text, field="run", value=number)
            if silent >= _TRIES:
                raise FedveilError(
                    "the server no longer answers. Submit the run again to resume it.", field="server"
                )
            if time.monotonic() - asked > _ASK_EVERY:
                status = _status(home, number)
                silent = 0 if status else silent + 1
                asked = time.monotonic()
                if status == STOPPED:
                    raise _cancelled(number)
                if status.startswith("finished") and not folder.finished and not problem.exists():
                    raise _without_result(home, number, status)
            time.sleep(_LOOK_EVERY)


def _without_result(home: Path, number: str, status: str) -> FedveilError:
    """The error of a run that ended without a result, with the end of its log."""
    shown = _flwr(home, "log", number, CONNECTION, "--show").stdout
    if _RAY_GAVE_UP in shown:
        return RayNotStartedError("Ray did not start: the machine is busy. Try again later.")
    return FedveilError(
        f"the run ended without a result ({status}):\n{_last_lines(shown)}", field="run", value=number
    )


def _cancelled(number: str) -> FedveilError:
    return FedveilError(
        f"run {number} was cancelled. Nodes keep the charges for its rounds; "
        "submit it again to resume from its last checkpoint.",
        field="run",
        value=number,
    )


def _running_attempt(settings: RunSettings, home: Path) -> str | None:
    """Flower's number of the last attempt of this run, if it is still running."""
    kept = settings.folder / RUN
    number = kept.read_text().strip() if kept.exists() else ""
    status = _status(home, number) if number else ""
    return None if not status or status.startswith("finished") else number


def _submit(settings: RunSettings, home: Path, arguments: Sequence[str]) -> str:
    """Start the run and return Flower's number of it; a server that is slow to answer is asked again."""
    with tempfile.TemporaryDirectory(prefix="run-", dir=home) as place:
        app = write_app(Path(place) / "fedveil-run", settings)
        for _ in range(_TRIES):
            done = _flwr(home, "run", str(app), CONNECTION, "--format", "json", *arguments)
            answer = _json(done.stdout)
            if done.returncode == 0 and answer.get("run-id"):
                settings.folder.mkdir(parents=True, exist_ok=True)
                write_atomically(settings.folder / RUN, str(answer["run-id"]).encode())
                return str(answer["run-id"])
    raise FedveilError(
        f"the run could not be submitted:\n{_last_lines(done.stdout + done.stderr)}", field="submit"
    )


def _status(home: Path, number: str) -> str:
    """The status of a run: pending, starting, running, finished:...; empty if the server does not answer."""
    done = _flwr(home, "list", CONNECTION, "--run-id", number, "--format", "json")
    runs = _json(done.stdout).get("runs") or [{}]
    return str(runs[0].get("status", ""))


def _flwr(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [_flwr_program(), *arguments]
    try:
        return subprocess.run(
            command,
            env=surroundings(home),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=START_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "no answer")


def _json(text: str) -> dict[str, Any]:
    """The JSON object at the end of a command's output."""
    start = text.find("{")
    try:
        found: dict[str, Any] = json.loads(text[start:]) if start >= 0 else {}
    except ValueError:
        return {}
    return found


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """Raise an exception on SIGTERM, so that started processes are ended too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _call_round_ends(folder: ResultFolder, callbacks: Sequence[Callback], plan: Plan, known: int) -> int:
    """Call the callbacks for the rounds after `known`, without models; returns the last round."""
    for line in folder.rounds():
        number = int(line["round"])
        if number <= known:
            continue
        metrics = {key: value for key, value in line.items() if key != "round"}
        end = RoundEnd(At(plan, number), (), Record(), {}, number == plan.rounds, metrics)
        for callback in callbacks:
            callback.round_ends(end)
        known = number
    return known


def _last_lines(text: str, lines: int = 60) -> str:
    return "\n".join(text.splitlines()[-lines:])
