"""Flower's SuperExec on a node, which keeps a process ready to answer messages.

Flower starts a new interpreter for every message, and importing tensors and methods takes it seconds. Here the first
message starts one process that has imported everything (`client_processes.py`), and every message is answered by a
fork of it: still a process of its own, which inherits nothing of the messages before.

This file imports nothing of fedveil and is run by its path: a node that waits needs no tensors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec as internal
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor, get_executor

CLIENT_PROCESSES = Path(__file__).with_name("client_processes.py")
IDLE_SECONDS = 600.0  # then the process that is kept ready ends, and its memory is free again
TASK_POLL_INTERVAL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"  # Flower's own variable; one second by itself
_END_SECONDS = 5.0


def _started() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-P", str(CLIENT_PROCESSES)], stdin=subprocess.PIPE)


class ReadyProcess(SubprocessExecutor):
    """Answers messages by forks of a process that is kept ready while messages come; other tasks as Flower does.

    **Guarantees** Every message has a process of its own, and their randomness is independent
    (`tests/unit/federation/test_client_processes.py`).
    """

    def __init__(
        self,
        start: Callable[[], subprocess.Popen[bytes]] = _started,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._last = 0.0

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        if spec.task_type is not TaskType.CLIENT_APP:
            return super().launch(spec)
        order = {
            "runtime_api_address": spec.runtime_api_address,
            "token": spec.token,
            "insecure": spec.insecure,
            "root_certificates": spec.root_certificates_path,
            "parent_pid": spec.parent_pid,
        }
        self._last = self._clock()
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = self._start()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:  # it was killed just now: this message is answered as Flower would
            self.close()
            return super().launch(spec)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        if self._process is not None and self._clock() - self._last > IDLE_SECONDS:
            self.close()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()  # it ends by itself; what it has forked answers first
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """`flower-superexec` with its own arguments."""
    if vars(internal).get(get_executor.__name__) is not get_executor:
        raise SystemExit("this version of Flower is not known: it would start every process anew")
    vars(internal)[get_executor.__name__] = lambda *_arguments, **_options: ReadyProcess()
    os.environ.setdefault(TASK_POLL_INTERVAL, "0.2")
    flower_superexec()


if __name__ == "__main__":
    main()
