"""Flower's SuperExec on a node, which keeps a preloaded process for messages.

Flower starts a new interpreter for every message, and importing torch and fedveil takes seconds. Here the first
message starts one process that has imported everything (`client_processes.py`), and every message is answered by a
fork of it: still a separate process, which inherits no state of earlier messages.

This file does not import fedveil and is run by its path, so that an idle node does not load torch.
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
IDLE_SECONDS = 600.0  # the preloaded process ends after this time without messages, to free its memory
TASK_POLL_INTERVAL = (
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"  # Flower's environment variable; its default is one second
)
_END_SECONDS = 5.0


def _started() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-P", str(CLIENT_PROCESSES)], stdin=subprocess.PIPE)


class ReadyProcess(SubprocessExecutor):
    """Answers messages by forks of a preloaded process; other tasks as Flower does.

    **Guarantees** Every message has a separate process, and their randomness is independent
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
        except OSError:  # it was killed: start this task as Flower does
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
            process.stdin.close()  # it ends at end of file; its forks finish their messages
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """`flower-superexec` with its own arguments."""
    if vars(internal).get(get_executor.__name__) is not get_executor:
        raise SystemExit("this version of Flower is not supported: processes could not be preloaded")
    vars(internal)[get_executor.__name__] = lambda *_arguments, **_options: ReadyProcess()
    os.environ.setdefault(TASK_POLL_INTERVAL, "0.2")
    flower_superexec()


if __name__ == "__main__":
    main()
