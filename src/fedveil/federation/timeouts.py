"""Flower's timeouts for started processes, and its polling intervals.

By default Flower assumes that a process that has not reported within 30 s has failed, and starts another while the
first is still loading. On a busy machine processes then accumulate, slow each other down, and no exchange ends. And a
node polls for messages every three seconds, which is most of a short exchange. This file does not import fedveil: see
the programs beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

START_SECONDS = 300
BEAT_SECONDS = 180.0  # the interval of heartbeats afterwards
ANSWER_PAUSE = 0.05  # polling interval while a node waits for its own process
FIRST_PAUSE = 0.2  # first polling interval after a message
PAUSE_GROWS = 1.25


def wait_longer(*states: ModuleType) -> None:
    """Set these timeouts in Flower's task stores (the modules that define them); call it before they are used.

    A process must start within the interval, and then send heartbeats within `HEARTBEAT_PATIENCE` times the interval.
    """
    for state in states:
        names = vars(state)
        if not {"HEARTBEAT_DEFAULT_INTERVAL", "HEARTBEAT_PATIENCE"} <= names.keys():
            raise SystemExit("this version of Flower is not supported: its timeouts could not be set")
        names["HEARTBEAT_DEFAULT_INTERVAL"] = START_SECONDS
        names["HEARTBEAT_PATIENCE"] = BEAT_SECONDS / START_SECONDS


class Pauses:
    """A node's polling intervals, in place of Flower's.

    Polling its own process (Flower: every half second) is cheap. The server is polled soon after a message, then with
    increasing intervals up to Flower's three seconds: after a wait of t a node is late by at most a fifth of t, and
    nodes that wait for long cause no more load than with Flower's intervals.
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
    """Make the loop of Flower's SuperNode (the module that defines it) use `Pauses`."""
    if vars(loop).get("time") is not time:
        raise SystemExit("this version of Flower is not supported: its polling intervals could not be set")
    vars(loop)["time"] = SimpleNamespace(sleep=Pauses().sleep)
