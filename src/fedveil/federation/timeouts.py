"""How long Flower waits for a process that it has started.

By itself it takes a process that has not reported within 30 s for lost and starts another, while the first is still
being loaded. Where a machine is so busy that 30 s are not enough, processes pile up, each making the others slower, and
no exchange ever ends. This file imports nothing of fedveil: see the programs beside it.
"""

from __future__ import annotations

from types import ModuleType

START_SECONDS = 300
BEAT_SECONDS = 180.0  # afterwards, between two signs of life


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
