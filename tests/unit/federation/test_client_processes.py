"""A node keeps a process ready; every message is answered by a fork of it that inherits nothing but imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor
from flwr.supernode import start_client_internal

from fedveil.federation.superexec import IDLE_SECONDS, ReadyProcess
from fedveil.federation.timeouts import FIRST_PAUSE, Pauses, ask_sooner

COMMON = {
    "runtime_api_address": "x",
    "insecure": True,
    "root_certificates": None,
    "parent_pid": os.getpid(),
}
# Runs the module's own loop; what it would do for Flower is replaced by a line that tells this test about the process.
LOOP = """
import json, os, sys, threading
from fedveil.federation import client_processes
from fedveil.streams import ClientStreams

def tell(**order):
    threads = threading.active_count()
    drawn = ClientStreams(0, 1, (0,), noise_source="entropy").noise()[0].standard_normal(4).tolist()
    line = {"token": order["token"], "pid": os.getpid(), "threads": threads, "drawn": drawn,
            "imported": "fedveil.federation.client_app" in sys.modules, "stdin": os.read(0, 1).decode()}
    os.write(1, (json.dumps(line) + "\\n").encode())
    raise SystemExit(0)

client_processes.run_clientapp = tell
client_processes.main(sys.stdin.buffer)
"""


def spec(token: str, kind: TaskType = TaskType.CLIENT_APP) -> ExecutionSpec:
    return ExecutionSpec(kind, "127.0.0.1:1", token, True, None, False, None, False, 1)


STUCK = """
import os, signal, sys, threading
from fedveil.federation import client_processes, parent_watch

def hang(**order):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, (str(os.getpid()) + "\\n").encode())
    held = threading.Lock()
    held.acquire()
    held.acquire()

parent_watch._LAST_SECONDS = 0.2
client_processes.run_clientapp = hang
client_processes.main(sys.stdin.buffer)
"""


def test_a_process_that_hangs_does_not_outlive_the_node() -> None:
    with subprocess.Popen(["sleep", "600"]) as node:
        order = {"token": "0", **COMMON, "parent_pid": node.pid}
        loop = subprocess.Popen(
            [sys.executable, "-c", STUCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert loop.stdin is not None
        assert loop.stdout is not None
        loop.stdin.write(json.dumps(order) + "\n")
        loop.stdin.flush()
        assert int(loop.stdout.readline()) != loop.pid
        loop.stdin.close()
        loop.wait(60)
        node.kill()
    assert loop.stdout.read() == "", "this ends when the last process that could write has ended"
    loop.stdout.close()


def test_each_message_has_its_own_process_with_its_own_randomness_and_no_inherited_thread() -> None:
    orders = "".join(json.dumps({"token": str(number), **COMMON}) + "\n" for number in range(3))
    done = subprocess.run(
        [sys.executable, "-c", LOOP], input=orders, capture_output=True, text=True, timeout=300
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(line["token"] for line in told) == ["0", "1", "2"], done.stderr
    assert len({line["pid"] for line in told}) == 3
    assert len({tuple(line["drawn"]) for line in told}) == 3
    assert all(line["imported"] and line["threads"] == 2 for line in told), "the watch alone"
    assert all(line["stdin"] == "" for line in told), "a fork could read the orders of others"


class Sink:
    """Starts processes that write what they are told to a file."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.started: list[subprocess.Popen[bytes]] = []

    def __call__(self) -> subprocess.Popen[bytes]:
        with self.place.open("ab") as out:
            self.started.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=out))
        return self.started[-1]

    def tokens(self) -> list[str]:
        return [json.loads(line)["token"] for line in self.place.read_text().splitlines()]


def test_one_process_answers_many_messages_and_ends_when_none_come(tmp_path: Path) -> None:
    sink, now = Sink(tmp_path / "told"), [0.0]
    ready = ReadyProcess(sink, lambda: now[0])
    for token in ("a", "b"):
        ready.launch(spec(token))
        now[0] += IDLE_SECONDS
        ready.reconcile()
    assert len(sink.started) == 1
    assert sink.started[0].poll() is None
    now[0] += 1
    ready.reconcile()
    assert sink.started[0].poll() == 0
    ready.launch(spec("c"))
    ready.close()
    ready.close()
    assert len(sink.started) == 2
    assert sink.tokens() == ["a", "b", "c"]


def test_a_killed_process_loses_no_message(tmp_path: Path) -> None:
    sink = Sink(tmp_path / "told")
    ready = ReadyProcess(sink)
    ready.launch(spec("a"))
    sink.started[0].kill()
    sink.started[0].wait()
    ready.launch(spec("b"))
    ready.close()
    assert sink.tokens()[-1] == "b"


def test_a_message_that_cannot_be_handed_over_is_answered_as_flower_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[str] = []

    def launch(_self: SubprocessExecutor, asked: ExecutionSpec) -> LaunchResult:
        launched.append(asked.token)
        return LaunchResult.accepted()

    monkeypatch.setattr(SubprocessExecutor, "launch", launch)
    deaf = [sys.executable, "-c", "import os, time; os.close(0); print(flush=True); time.sleep(60)"]

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(deaf, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        return process

    monkeypatch.setattr("fedveil.federation.superexec._END_SECONDS", 0.1)
    ready = ReadyProcess(start)
    ready.launch(spec("a"))
    ready.launch(spec("b", TaskType.SERVER_APP))
    ready.close()
    assert launched == ["a", "b"]


def test_a_node_asks_soon_after_a_message_and_no_more_often_than_flower_when_it_waits() -> None:
    slept: list[float] = []
    pauses = Pauses(slept.append)
    for _ in range(30):
        pauses.sleep(3)
    assert slept[0] == FIRST_PAUSE
    assert slept == sorted(slept)
    assert slept[-1] == 3
    assert all(
        later <= 0.3 * sum(slept[:number]) + FIRST_PAUSE for number, later in enumerate(slept) if number
    )
    pauses.sleep(0.5)
    pauses.sleep(3)
    assert slept[-1] == FIRST_PAUSE


def test_another_flower_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(start_client_internal, "time")
    with pytest.raises(SystemExit):
        ask_sooner(start_client_internal)
