"""A process that has imported what a node needs, and forks one process for each message.

It reads one order per line from its standard input, and ends at end of file. It only imports: it opens no file of the
node, draws no random number and starts no thread, so that every fork is equivalent to a new interpreter. It is started
by its path, by `superexec.py`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import IO, Any, NoReturn

from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode.runtime.run_clientapp import run_clientapp

from fedveil.federation.parent_watch import PARENT, end_with_parent

CLIENT_APP = "fedveil.federation.client_app"


def main(orders: IO[bytes]) -> None:
    """Fork a process for every order."""
    with suppress(Exception):  # an import that fails, fails again in the fork, which reports it
        importlib.import_module(CLIENT_APP)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends at the end of its input
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    for line in orders:
        if os.fork() == 0:
            _answer(json.loads(line))


def _answer(order: dict[str, Any]) -> NoReturn:
    """Do what Flower's `flwr-clientapp` does, then end this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    code = 1
    try:
        # Flower's own watcher raises a signal, which a main thread waiting for a lock does not handle.
        os.environ[PARENT] = str(order["parent_pid"])
        end_with_parent()
        certificates = validate_and_resolve_root_certificates(
            order.pop("root_certificates"), order["insecure"]
        )
        run_clientapp(**order, certificates=certificates)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without the parent's exit handlers


if __name__ == "__main__":
    main(sys.stdin.buffer)
