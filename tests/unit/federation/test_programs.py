"""The server lets other machines in as nodes only, a node runs no foreign code, and one process runs per folder."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import io
import json
import os
import signal
import socket
import subprocess
import sys
import warnings
import zipfile
from base64 import b64decode, b64encode
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr")
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.corestate import in_memory_corestate, sql_corestate
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.retry import http_retry
from flwr.supercore.sql_mixin import SqlMixin
from flwr.superlink import main as superlink_main
from flwr.superlink.federation import NoOpFederationManager
from flwr.supernode import start_client_internal

import fedveil.cli.deploy  # noqa: F401  its commands register themselves on the app
from fedveil.cli import app
from fedveil.errors import InputError
from fedveil.federation import processes
from fedveil.federation.certificates import make_node_key
from fedveil.federation.create import Federation, init
from fedveil.federation.launch import write_app
from fedveil.federation.processes import (
    ProcessError,
    free_port,
    mark_running,
    running_process,
    stop,
    supervise,
)
from fedveil.federation.run_settings import RunSettings
from fedveil.federation.superlink import OnlyNodesFromOutside
from fedveil.federation.supernode import CLIENT_APP, MEMBERS, MOST_BYTES, ForeignAppError, require_own_app
from fedveil.federation.timeouts import START_SECONDS, wait_longer
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.privacy.releases import Plan
from tests.engines.configs import quick_config
from tests.refusals import refuses


def status_of(
    path: str,
    client: str,
    server: str = "10.0.0.5",
    *,
    says: int = 200,
    key: bytes | None = None,
    ready: Path | None = None,
) -> int:
    """What the server answers to a request from this address; `says` is what Flower would."""
    answers: list[dict[str, Any]] = []

    async def served(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": says, "headers": []})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        answers.append(message)

    scope = {
        "type": "http",
        "path": path,
        "client": (client, 50000),
        "server": (server, 8443),
        "method": "POST",
        "headers": [] if key is None else [(FLEET_HTTP_PUBLIC_KEY_HEADER.encode(), key)],
    }
    asyncio.run(OnlyNodesFromOutside(served, ready)(scope, receive, send))
    return int(answers[0]["status"])


def test_other_machines_reach_the_interface_of_nodes_and_nothing_else() -> None:
    assert status_of("/v1/fleet/register-node", "192.0.2.1") == 200
    assert status_of("/health", "192.0.2.1") == 200
    for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/pull", "/docs", "/"):
        assert status_of(path, "192.0.2.1") == 403
        assert status_of(path, "127.0.0.1") == 200
        assert status_of(path, "10.0.0.5") == 200, "its own address"
    assert status_of("/v1/control/../fleet", "192.0.2.1") == 403


def bundle(files: dict[str, str]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return data.getvalue()


def settings(client: str) -> str:
    return f'[tool.flwr.app.components]\nserverapp = "x:y"\nclientapp = "{client}"\n'


def test_nodes_are_asked_to_retry_until_their_keys_are_registered(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    assert status_of("/v1/fleet/activate-node", "192.0.2.1", ready=ready) == 503
    assert status_of("/v1/control/register-node", "127.0.0.1", ready=ready) == 200
    assert status_of("/health", "127.0.0.1", ready=ready) == 200
    assert 503 in http_retry._RETRYABLE_STATUS_CODES, "or a node would give up"
    ready.touch()
    assert status_of("/v1/fleet/activate-node", "192.0.2.1", ready=ready) == 200


def test_a_node_that_is_turned_away_is_named_by_address_and_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = make_node_key(tmp_path)
    shown = load_ssh_public_key(line).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    digest = hashlib.sha256(b64decode(line.split()[1])).digest()  # as ssh-keygen -lf prints it
    mark = "SHA256:" + b64encode(digest).decode().rstrip("=")
    with caplog.at_level("WARNING", "flwr.fedveil"):
        assert status_of("/v1/fleet/activate-node", "192.0.2.1", says=401, key=b64encode(shown)) == 401
        assert f"refused a node at 192.0.2.1 with the key {mark}: it is not registered" in caplog.text
        assert status_of("/v1/fleet/activate-node", "192.0.2.2", says=401) == 401
        assert "192.0.2.2 without a key" in caplog.text
        assert status_of("/v1/fleet/activate-node", "192.0.2.3", says=401, key=b"?") == 401
        assert "192.0.2.3 with a key that cannot be read" in caplog.text
        caplog.clear()
        assert status_of("/v1/fleet/activate-node", "192.0.2.1", key=b64encode(shown)) == 200
        assert status_of("/v1/fleet/pull-object", "192.0.2.1", says=403, key=b64encode(shown)) == 403
        assert not caplog.text


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # in Flower's own command
def test_the_own_application_is_let_through(tmp_path: Path) -> None:
    """As `flwr run` bundles it."""
    config = quick_config("udp-fedavg", "flower", clients=3)
    app_folder = write_app(tmp_path / "fedveil-run", RunSettings(config, 0, "test", tmp_path))
    fab = build_fab_from_disk(app_folder)
    require_own_app(fab)
    with zipfile.ZipFile(io.BytesIO(fab)) as made:
        assert sorted(made.namelist()) == sorted(MEMBERS)


def zipped(*members: tuple[str, str]) -> bytes:
    """A bundle of these members, though some may be there twice."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, text in members:
            file.writestr(name, text)
    return made.getvalue()


@pytest.mark.parametrize(
    "second",
    [
        "pyproject.toml",
        "./pyproject.toml",
        "x/../pyproject.toml",
        ".info//CONTENT",
        ".info/../pyproject.toml",
    ],
)
def test_a_second_member_of_the_same_place_is_refused(second: str) -> None:
    """Flower would unpack both, and run what the one that was not checked names."""
    members = [("pyproject.toml", settings(CLIENT_APP)), (".info/CONTENT", "")]
    require_own_app(zipped(*members))
    foreign = (second, settings("evil:app"))
    for bundled in ([*members, foreign], [foreign, *members]):
        with pytest.raises(ForeignAppError):
            require_own_app(zipped(*bundled))


@pytest.mark.parametrize("name", MEMBERS)
def test_a_bundle_that_unpacks_to_much_is_refused_unread(name: str) -> None:
    members = {"pyproject.toml": settings(CLIENT_APP), ".info/CONTENT": ""}
    members[name] += "\n" * MOST_BYTES
    packed = zipped(*members.items())
    assert len(packed) < MOST_BYTES // 100, "a bomb is small"
    for data in (packed, b" " * (MOST_BYTES + 1)):
        with pytest.raises(ForeignAppError) as caught:
            require_own_app(data)
        assert caught.value.field == "size"


@pytest.mark.parametrize(
    "files",
    [
        {"pyproject.toml": settings("evil:app")},
        {"pyproject.toml": settings(CLIENT_APP), "fedveil/__init__.py": "steal()"},
        {"pyproject.toml": settings(CLIENT_APP), "torch.so": ""},
        {"pyproject.toml": settings(CLIENT_APP), "x.pth": "import os"},
        {"pyproject.toml": settings(CLIENT_APP), "notes.json": "{}"},
        {"pyproject.toml": settings(CLIENT_APP), "README.md": ""},
        {"pyproject.toml": settings(CLIENT_APP), "/pyproject.toml": ""},
        {"README.md": ""},
        {"pyproject.toml": "x = "},
        {"pyproject.toml": "tool = 3"},
    ],
)
def test_an_application_with_code_or_another_client_is_refused(files: dict[str, str]) -> None:
    with pytest.raises(ForeignAppError):
        require_own_app(bundle(files))


def test_what_is_no_bundle_is_refused() -> None:
    with pytest.raises(ForeignAppError) as caught:
        require_own_app(b"no zip")
    assert caught.value.field == "bundle"


def test_flower_asks_where_it_is_answered() -> None:
    """Both refusals depend on places in Flower: a version without them must not pass unnoticed."""
    receives = inspect.getsource(start_client_internal._pull_and_store_message)
    assert receives.index("get_fused_config_from_fab(fab.content") < receives.index("store_fab(fab)")
    assert "extensions.get_middleware()" in inspect.getsource(superlink_main._get_middleware)


@pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")  # in Flower's own database
@pytest.mark.parametrize("state", [in_memory_corestate, sql_corestate])
def test_a_process_that_starts_slowly_is_not_started_again(
    state: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Flower's own 30 s are too short for a busy machine, and a second process makes it busier."""
    for name in ("HEARTBEAT_DEFAULT_INTERVAL", "HEARTBEAT_PATIENCE"):
        monkeypatch.setattr(state, name, getattr(state, name))  # put back afterwards
    wait_longer(state)
    place = FLWR_IN_MEMORY_DB_NAME if state is in_memory_corestate else str(tmp_path / "superlink.db")
    objects = ObjectStoreFactory(place)
    store = LinkStateFactory(place, NoOpFederationManager(), objects).state()
    for database in (store, objects.store()):
        if isinstance(database, SqlMixin):  # an open connection is an error of whichever test runs later
            assert database._engine is not None
            request.addfinalizer(database._engine.dispose)
    task = store.create_task("flwr-serverapp", 1)
    assert task is not None
    token = store.claim_task(task)
    assert token is not None
    began = state.now()
    for later, known in ((START_SECONDS - 5, True), (START_SECONDS + 5, False)):
        monkeypatch.setattr(state, "now", lambda later=later: began + timedelta(seconds=later))
        assert (store.get_task_by_token(token) is not None) == known


HOLDER = """
import fcntl, os, sys, time
file = open(sys.argv[1] + "/pid", "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write(str(os.getpid()))
file.flush()
print("ready", flush=True)
time.sleep(60)
"""


def test_a_free_port_is_none_that_outgoing_connections_are_given() -> None:
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(given.read_text().split()[0]) if given.exists() else 32768
    found = {free_port() for _ in range(20)}
    assert len(found) > 10
    assert all(1024 <= port < max(lowest, 32768) for port in found)
    with socket.socket() as held:
        held.bind(("127.0.0.1", found.pop()))


def test_a_free_port_is_not_one_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        taken = held.getsockname()[1]
        monkeypatch.setattr(processes, "_PORTS", range(taken - 99, taken + 1))
        assert free_port() != taken


def test_a_running_folder_is_stopped_and_a_stale_process_id_is_ignored(tmp_path: Path) -> None:
    assert running_process(tmp_path) is None
    assert not stop(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert running_process(tmp_path) == child.pid
        with refuses("pid", ProcessError):
            mark_running(tmp_path)
        assert stop(tmp_path)
        child.wait(timeout=10)
    assert running_process(tmp_path) is None
    own = mark_running(tmp_path)
    assert running_process(tmp_path) == os.getpid()
    os.close(own)
    (tmp_path / "pid").write_text(str(os.getpid()))
    assert running_process(tmp_path) is None, "nobody holds the lock"
    assert not stop(tmp_path)


def test_a_supervised_program_ends_with_all_that_it_started(tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path}/child; exit 3"
    assert supervise(["sh", "-c", script], dict(os.environ), lambda: True) == 3
    orphan = int((tmp_path / "child").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(orphan, 0)


def test_a_supervised_program_that_is_asked_to_stop_has_not_failed() -> None:
    """Else a service manager that restarts what failed would restart what an operator has stopped."""

    def stopped() -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    assert supervise(["sleep", "60"], dict(os.environ), stopped) == 0


def test_a_nodes_status_shows_the_spent_budget(tmp_path: Path) -> None:
    (folder, _) = init(tmp_path / "f", Federation(nodes=2, epsilon=20.0))
    np.savez(folder / "data.npz", x=np.zeros((6, 4), np.float32), y=np.zeros(6, np.int64))
    from fedveil.federation.node import open_node

    method = UDPFedAvg(noise_scope="local", noise_multiplier=2.0)
    open_node(folder).guard.admit("run", 1, method, Plan(2, 2, "all", 5, 6, 6))
    result = CliRunner().invoke(app, ["deploy", "status", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert (answer["node"], answer["running"], answer["examples"], answer["noise"]) == (
        "node-0",
        False,
        6,
        "entropy",
    )
    (limit,) = answer["limits"]
    assert 0 < limit["spent"] < limit["limit"] == 20.0
    shown = CliRunner().invoke(app, ["deploy", "status", str(folder)]).output
    assert "limits" in shown


def test_a_folder_of_neither_kind_is_refused(tmp_path: Path) -> None:
    for name in ("status", "stop"):
        result = CliRunner().invoke(app, ["deploy", name, str(tmp_path)])
        assert isinstance(result.exception, InputError)
