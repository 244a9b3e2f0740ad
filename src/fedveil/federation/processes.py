"""Start, supervise and stop the processes of a server or a node: Flower's programs with secure options.

A folder (of a server or a node) has at most one running process. It holds a lock on `pid` in its state folder while it
runs, so that a process id left behind by a crash is never mistaken for it.
"""

from __future__ import annotations

import fcntl
import http.client
import importlib.util
import json
import os
import random
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tomli_w

from fedveil.atomic_files import write_atomically
from fedveil.errors import FedveilError, InputError, install
from fedveil.federation.config import (
    MEMBERS,
    NODE_FILE,
    REGISTRY,
    ROSTER,
    SERVER_FILE,
    SESSION,
    NodeConfig,
    ServerConfig,
    is_loopback,
)
from fedveil.federation.identity_files import ROSTER_FILE
from fedveil.federation.parent_watch import PARENT
from fedveil.validation import read_toml

CONNECTION = "fedveil"
DATABASE = "superlink.db"
START_SECONDS = 300.0
STOP_SECONDS = 60.0
ANSWER_SECONDS = 300.0
_PAUSE = 0.2
_PORTS = range(10240, 32768)


class ProcessError(FedveilError):
    """A program did not start, or a command failed."""


def require_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise InputError("deploy", "flwr", "is not installed", install("flower"))


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of every program: no telemetry, no update checks, no installation at run time."""
    scripts = os.pathsep.join(
        dict.fromkeys([sysconfig.get_path("scripts"), str(Path(sys.executable).parent)])
    )
    return {
        **os.environ,
        "PATH": os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)]),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        **more,
    }


def server_command(config: ServerConfig, folder: Path) -> list[str]:
    """The command of the SuperLink: with TLS and only registered nodes, unless insecure on loopback."""
    command = own_program("superlink")
    command += ["--host", config.listen, "--port", str(config.port)]
    command += ["--database", str(folder / config.state / DATABASE)]
    command += ["--disable-runtime-dependency-installation"]
    if config.insecure:
        return [*command, "--insecure"]
    for option, name in (
        ("--ssl-ca-certfile", "ca.crt"),
        ("--ssl-certfile", "server.crt"),
        ("--ssl-keyfile", "server.key"),
    ):
        command += [option, str(_existing(folder / name))]
    _require_private(folder / "server.key", "server.key")
    return [*command, "--enable-supernode-auth"]


def node_command(config: NodeConfig, folder: Path, port: int) -> list[str]:
    """The command of the SuperNode: it verifies the server and authenticates by its key, or is insecure on loopback.

    `port` is for its own programs, on loopback.
    """
    connection = config.connection
    if connection is None:
        raise InputError(
            "connection",
            None,
            "the node does not know its server",
            f"Add [connection] to {folder / NODE_FILE}.",
        )
    command = own_program("supernode")
    command += ["--superlink", connection.address, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--node-config", f"fedveil-node={json.dumps(str(folder))}"]
    if connection.insecure:
        return [*command, "--insecure"]
    key = _existing(folder / connection.key)
    _require_private(key, "connection.key")
    command += ["--root-certificates", str(_existing(folder / connection.ca))]
    return [*command, "--auth-supernode-private-key", str(key)]


def own_program(name: str) -> list[str]:
    """The command of a program beside this file; -P keeps its folder off the module path."""
    return [sys.executable, "-P", str(Path(__file__).with_name(f"{name}.py"))]


def free_port() -> int:
    """A free port of this machine outside the ephemeral range.

    An ephemeral port would often be taken again before a program that starts slowly listens on it.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ProcessError(f"no free port was found between {_PORTS[0]} and {_PORTS[-1]}.", field="port")


def write_connection(config: ServerConfig, folder: Path) -> Path:
    """Write the connection to this server into a separate Flower home, which is returned."""
    home = (folder / config.state / "flwr").absolute()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    entry: dict[str, Any] = {"address": f"{_dialled(config)}:{config.port}"}
    entry |= {"insecure": True} if config.insecure else {"root-certificates": str(folder / "ca.crt")}
    content = {"superlink": {"default": CONNECTION, CONNECTION: entry}}
    write_atomically(home / "config.toml", tomli_w.dumps(content).encode())
    return home


def _dialled(config: ServerConfig) -> str:
    """The address by which the server reaches itself: loopback, unless it listens on another address only."""
    return "127.0.0.1" if config.listen == "0.0.0.0" or is_loopback(config.listen) else config.listen


def flower(folder: Path, *arguments: str) -> str:
    """Run `flwr` with these arguments against the server of this folder; returns its output."""
    home = write_connection(read_toml(folder / SERVER_FILE, ServerConfig), folder)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "flwr.cli.app", *arguments],
            env=environment(home),
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ProcessError(
            f"flwr {arguments[0]} did not answer within {ANSWER_SECONDS:g} s.",
            field="timeout",
            value=arguments[0],
        ) from error
    if done.returncode:
        raise ProcessError(
            f"flwr {' '.join(arguments[:2])} failed: {(done.stderr or done.stdout).strip()}",
            field="flwr",
            value=arguments[:2],
        )
    return done.stdout


def register_keys(folder: Path) -> list[str]:
    """Register exactly the nodes whose public keys are in `keys/`; returns the changes in words.

    The registry binds Flower's number of a node, authenticated by its key, to its name and client number.
    """
    config = read_toml(folder / SERVER_FILE, ServerConfig)
    registry = folder / config.state / REGISTRY
    known: dict[str, dict[str, Any]] = json.loads(registry.read_text()) if registry.exists() else {}
    wanted = {path.stem: path for path in sorted((folder / "keys").glob("*.pub"))}
    for name in wanted:
        if name not in config.clients:
            remedy = f"Add {name} = NUMBER, the node's client, to [clients] in {folder / SERVER_FILE}."
            raise InputError(f"clients.{name}", None, "this node's key has no client number", remedy)
    listed = {str(node["node-id"]) for node in listed_nodes(folder)} if known else set()
    changed = []
    for name, entry in list(known.items()):
        if name in wanted and wanted[name].read_text() == entry["key"] and entry["id"] in listed:
            del wanted[name]
            continue
        if entry["id"] in listed:
            flower(folder, "supernode", "unregister", entry["id"], CONNECTION)
        del known[name]
        changed.append(f"node {name} may no longer participate")
    for name, path in wanted.items():
        answer = flower(folder, "supernode", "register", str(path), CONNECTION, "--format", "json")
        known[name] = {"id": str(json.loads(answer)["node-id"]), "key": path.read_text()}
        changed.append(f"node {name} may participate")
    for name, entry in known.items():
        entry["client"] = config.clients[name]
    write_atomically(registry, (json.dumps(known) + "\n").encode())
    return changed


def node_names(folder: Path) -> dict[str, str]:
    """The names of the registered nodes by Flower's number."""
    registry = folder / read_toml(folder / SERVER_FILE, ServerConfig).state / REGISTRY
    if not registry.exists():
        return {}
    return {entry["id"]: name for name, entry in json.loads(registry.read_text()).items()}


def listed_nodes(folder: Path) -> list[dict[str, Any]]:
    answer = json.loads(flower(folder, "supernode", "list", CONNECTION, "--format", "json"))
    return list(answer.get("nodes", []))


def listed_runs(folder: Path) -> list[dict[str, Any]]:
    answer = json.loads(flower(folder, "list", CONNECTION, "--format", "json"))
    return list(answer.get("runs", []))


def cancel_run(folder: Path, number: str | None = None) -> str:
    """Cancel an active run, by default the only one; other runs and all nodes continue.

    The server sends the nodes no further messages of the run, so they charge nothing more.

    Returns:
        Flower's number of the run.

    Raises:
        InputError: No such run is active, or several are and none is named.
    """
    active = [
        str(run["run-id"]) for run in listed_runs(folder) if not str(run["status"]).startswith("finished")
    ]
    if number is None and len(active) > 1:
        raise InputError("RUN", None, f"{len(active)} runs are active", f"Name one: {', '.join(active)}.")
    chosen = number or next(iter(active), None)
    if chosen is None or chosen not in active:
        raise InputError("RUN", number, "is not an active run", "See `fedveil deploy status`.")
    flower(folder, "stop", chosen, CONNECTION)
    return chosen


def end_lost_runs(folder: Path) -> list[str]:
    """End the runs of a server that was killed: their processes ended with it, and nodes would wait for them.

    Returns the changes in words. Submitting such a run again resumes from its last checkpoint.
    """
    lost = [
        str(run["run-id"]) for run in listed_runs(folder) if not str(run["status"]).startswith("finished")
    ]
    for number in lost:
        flower(folder, "stop", number, CONNECTION)
    return [f"run {number} was interrupted; submit it again to resume it" for number in lost]


def is_up(config: ServerConfig, folder: Path) -> bool:
    """Whether the server answers, with its own certificate."""
    try:
        if config.insecure:
            link = http.client.HTTPConnection(_dialled(config), config.port, timeout=5)
        else:
            context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
            link = http.client.HTTPSConnection(_dialled(config), config.port, timeout=5, context=context)
        link.request("GET", "/health")
        status = link.getresponse().status
        link.close()
    except (OSError, http.client.HTTPException):
        return False
    return status == 200


def mark_running(state: Path) -> int:
    """Lock this state folder for this process, while the returned file is open."""
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = os.open(state / "pid", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise ProcessError(
            f"{state.parent}: is already running. Stop it with `fedveil deploy stop`.", field="pid"
        ) from error
    os.ftruncate(file, 0)
    os.write(file, str(os.getpid()).encode())
    return file


def running_process(state: Path) -> int | None:
    """The id of the process that runs in this state folder; None if there is none."""
    try:
        file = os.open(state / "pid", os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return int(os.read(file, 32) or b"0") or None
    finally:
        os.close(file)
    return None


def stop(state: Path) -> bool:
    """End the process of this state folder; returns whether there was one."""
    process = running_process(state)
    if process is None:
        return False
    os.kill(process, signal.SIGTERM)
    end = time.monotonic() + STOP_SECONDS
    while running_process(state) is not None:
        if time.monotonic() > end:
            raise ProcessError(
                f"process {process} did not stop within {STOP_SECONDS:g} s.", field="timeout", value=process
            )
        time.sleep(_PAUSE)
    return True


def supervise(command: Sequence[str], env: dict[str, str], started: Callable[[], bool]) -> int:
    """Run a program until it ends; a stop signal is forwarded to it and its children, and the exit code is then 0.

    `started` is called repeatedly until it returns that the program is up and set up.
    """
    child = subprocess.Popen(command, env=env, start_new_session=True)
    asked = False

    def forward(_number: int, _frame: object) -> None:
        nonlocal asked
        asked = True
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        end = time.monotonic() + START_SECONDS
        while child.poll() is None and not started():
            if time.monotonic() > end:
                raise ProcessError(
                    f"{Path(command[2]).stem} was not up within {START_SECONDS:g} s.",
                    field="timeout",
                    value=command[2],
                )
            time.sleep(_PAUSE)
        code = child.wait()
        return 0 if asked else code  # otherwise a service manager would restart a stopped program
    finally:
        _end_group(child)
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End everything that the program started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        end = time.monotonic() + 5.0
        while time.monotonic() < end:
            child.poll()
            try:
                os.killpg(child.pid, 0)
            except (ProcessLookupError, PermissionError):
                break
            time.sleep(0.05)
    child.wait()


def run_server(folder: Path, tell: Callable[[str], None]) -> int:
    """Run the server of this folder in the foreground; register the keys in `keys/` when it is up."""
    require_flower()
    folder = folder.absolute()
    config = read_toml(folder / SERVER_FILE, ServerConfig)
    home = write_connection(config, folder)
    ready = folder / config.state / "ready"
    was_there = (folder / config.state / DATABASE).exists()

    def started() -> bool:
        if not is_up(config, folder):
            return False
        lost = end_lost_runs(folder) if was_there else []
        for change in [*lost, *([] if config.insecure else register_keys(folder))]:
            tell(change)
        ready.touch()
        tell(f"server is up on {config.listen}:{config.port}")
        return True

    lock = mark_running(folder / config.state)
    try:
        ready.unlink(missing_ok=True)
        more = {"FEDVEIL_READY": str(ready), PARENT: str(os.getpid()), ROSTER: str(folder / ROSTER_FILE)}
        if not config.insecure:
            more[MEMBERS] = str(folder / config.state / REGISTRY)
        return supervise(server_command(config, folder), environment(home, **more), started)
    finally:
        os.close(lock)


def unknown_said(column: str, rows: int) -> str:
    """What a node's operator is told of categories that the schema does not contain."""
    return (
        f"WARNING, column {column!r} holds categories that the schema does not have, in {rows} rows; "
        "they count as none of its categories"
    )


def run_node(folder: Path, tell: Callable[[str], None]) -> NoReturn:
    """Replace this process by the node of this folder, after its data and policy have been read and checked."""
    require_flower()
    from fedveil.federation.node import checked_node, unknown_in

    folder = folder.absolute()
    config = read_toml(folder / NODE_FILE, NodeConfig)
    node = checked_node(folder)
    tell(f"node {node.name}: client {node.client}, {len(node.held)} examples")
    if config.data.records is None:
        tell(f"node {node.name}: their number is public; set data.records in {NODE_FILE} to declare another")
    for column, rows in unknown_in(node).items():
        tell(f"node {node.name}: {unknown_said(column, rows)}")
    if node.noise == "seeded":
        tell(
            f"node {node.name}: WARNING, [testing] seeded_noise makes its noise predictable; it gives no protection"
        )
    command = node_command(config, folder, free_port())
    home = node.state / "flwr"
    home.mkdir(exist_ok=True, mode=0o700)
    lock = mark_running(node.state)
    os.set_inheritable(lock, True)  # the program that replaces this process inherits the lock
    own = {"FEDVEIL_NODE": node.name, SESSION: secrets.token_hex(32)}
    os.execve(command[0], command, environment(home, **own))


def _require_private(key: Path, field: str) -> None:
    """Refuse a private key that others may read."""
    if key.stat().st_mode & 0o077:
        raise InputError(field, str(key), "others may read it", f"Run: chmod 600 {key}")


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise InputError("file", str(path), "does not exist", "Run `fedveil deploy init`, or copy it here.")
    return path
