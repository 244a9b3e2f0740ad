"""A node's journal of the rounds it participated in, so that it answers none twice after a restart."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

Event = Literal["begun", "unmasked"]
Key = tuple[str, int, int]


class Journal:
    """Events by (run, round, attempt), each recorded at most once and on disk before it takes effect.

    Processes that may record the same event are serialised (`RoundStore.locked`); each reads the file first.

    Args:
        path: A file used by this node only; None keeps the journal in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: set[tuple[Event, Key]] = set()

    def record(self, event: Event, key: Key) -> bool:
        """Record the event; False if it was already recorded."""
        torn = self._read()
        if (event, key) in self._known:
            return False
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(("\n" if torn else "") + json.dumps([event, *key]) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self._known.add((event, key))
        return True

    def _read(self) -> bool:
        """Read the file; whether it ends in an interrupted write, whose event never took effect."""
        if self._path is None or not self._path.exists():
            return False
        *lines, rest = self._path.read_text().split("\n")
        for line in lines:
            try:
                event, run, round_, attempt = json.loads(line)
            except ValueError:  # an interrupted write, terminated by the next one
                continue
            self._known.add((event, (run, round_, attempt)))
        return bool(rest)
