"""How long Flower waits: for a process that it has started, and before it asks again.

By itself it takes a process that has not reported within 30 s for lost and starts another, while the first is still
being loaded. Where a machine is so busy that 30 s are not enough, processes pile up, each making the others slower, and
no exchange ever ends. And a node asks for messages every three seconds, which is most of a short exchange. This file
imports nothing of fedveil: see the programs beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

START_SECONDS = 300
BEAT_SECONDS = 180.0  # afterwards, between two signs of life
ANSWER_PAUSE = 0.05  # while a node waits for a process of its own
FIRST_PAUSE = 0.2  # after a message
PAUSE_GROWS = 1.25


def wait_longer(*states: ModuleType) -> None:
    """Make Flower's stores of tasks (the modules that define them) wait so long; to be called before they are used.

    A process must start within the interval, and then beat within `HEARTBEAT_PATIENCE` times the interval.
    """
    for state in states:
        names = vars(state)
        if not {"HEARTBEAT_DEFAULT_INTERVAL", "HEARTBEAT_PATIENCE"} <= names.keys():
            raise SystemExit("this version of Flower is not known: it would start processes without end")
        names["HEARTBEAT_DEFAULT_INTERVAL"] = START_SECONDS
        names["HEARTBEAT_PATIENCE"] = BEAT_SECONDS / START_SECONDS


class Pauses:
    """How long a node sleeps where Flower's would for `seconds`.

    Waiting for its own process (Flower: half a second) costs nobody anything. The server is asked again soon after a
    message, then ever later, up to Flower's three seconds: a node that waited for t is late by a fifth of t at most,
    and nodes that wait for long are no more work for the server than before.
    """

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._pause = FIRST_PAUSE

    def sleep(self, seconds: float) -> None:
        if seconds < 1:
            self._pause = FIRST_PAUSE
            self._sleep(ANSWER_PAUSE)
            return
        self._sleep(min(seconds, self._pause))
        self._pause = min(seconds, PAUSE_GROWS * self._pause)


def ask_sooner(loop: ModuleType) -> None:
    """Make the loop of Flower's SuperNode (the module that defines it) sleep by `Pauses`."""
    if vars(loop).get("time") is not time:
        raise SystemExit("this version of Flower is not known: exchanges would be slow")
    vars(loop)["time"] = SimpleNamespace(sleep=Pauses().sleep)
