"""End a program when the process for which it was started has ended, even if that was killed.

Flower's programs end only on request. If the requesting process is killed, a SuperLink would keep its port, and a
simulation would continue to train. This file does not import fedveil: see the programs beside it.
"""

from __future__ import annotations

import os
import signal
import threading
import time

PARENT = "FEDVEIL_PARENT"  # the id of the process to end with; inherited by child processes
_LAST_SECONDS = 20.0


def end_with_parent() -> None:
    """End this process when the process named by `PARENT` has ended; do nothing if none is named."""
    if named := os.environ.get(PARENT):
        threading.Thread(target=_watch, args=(int(named),), daemon=True).start()


def _watch(parent: int) -> None:
    while _lives(parent):
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LAST_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:  # no such process, or the id was reused
        return False
    return True
