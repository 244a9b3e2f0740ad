"""Programs that do not outlive the one for which they were started, however that ended.

Flower's programs end when they are told to. If whoever would have told them was killed, a SuperLink would keep its
port, and a simulation would train on, for nobody. This file imports nothing of fedveil: see the programs beside it.
"""

from __future__ import annotations

import os
import signal
import threading
import time

PARENT = "FEDVEIL_PARENT"  # the number of the process to end with; handed on to all that is started
_LAST_SECONDS = 20.0


def end_with_parent() -> None:
    """From now on, end this process when the one that `PARENT` names has ended; without such a name, do nothing."""
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
    except OSError:  # nobody has this number, or somebody else has it now
        return False
    return True
