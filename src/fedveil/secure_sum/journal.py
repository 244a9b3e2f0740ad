"""What a node remembers of the rounds it took part in, so that no restart makes it answer one twice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

Event = Literal["begun", "unmasked"]
Key = tuple[str, int, int]


class Journal:
    """Events by (run, round, attempt), each recorded at most once and on disk before it takes effect.

    Args:
        path: A file of this node alone; None keeps the journal in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: set[tuple[Event, Key]] = set()
        self._torn = False
        if path is not None and path.exists():
            *lines, rest = path.read_text().split("\n")
            self._torn = bool(rest)  # of a write that a power cut ended, so it never took effect
            self._known = {
                (event, (run, round_, attempt))
                for event, run, round_, attempt in map(json.loads, filter(None, lines))
            }

    def record(self, event: Event, key: Key) -> bool:
        """Record it; False if it was there already."""
        if (event, key) in self._known:
            return False
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(("\n" if self._torn else "") + json.dumps([event, *key]) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self._torn = False
        self._known.add((event, key))
        return True
