"""Where a node keeps its secrets between the legs of a round: every leg may be answered by a process of its own."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedveil.atomic_files import write_atomically
from fedveil.secure_sum import primitives
from fedveil.secure_sum.identities import packed
from fedveil.secure_sum.journal import Key

_SALT = 32


class RoundStore:
    """One sealed file for each run. Its key lives in the node's memory and ends with the node.

    Guarantees: what was kept is given out once, so no leg can be answered twice
    (`test_a_leg_is_answered_once`); after a restart of the node nothing can be read
    (`test_a_restarted_node_drops_out_of_the_round`).

    Args:
        folder: Of this node alone.
        session: 32 bytes that no other start of the node has.
    """

    def __init__(self, folder: Path, session: bytes) -> None:
        self._folder = folder
        self._session = session

    @contextmanager
    def locked(self, run: str) -> Iterator[None]:
        """One leg of a run at a time, whoever asks."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(self._path(run).with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def keep(self, key: Key, secrets: bytes) -> None:
        """Keep this of the attempt; what was kept of another attempt of the same run is removed."""
        salt = primitives.random_key()
        sealed = primitives.seal(primitives.derive(self._session, b"round store", salt), secrets, _bound(key))
        path = self._path(key[0])
        write_atomically(path, salt + sealed)
        path.chmod(0o600)

    def take(self, key: Key) -> bytes | None:
        """What was kept of this attempt, which is then forgotten; None if nothing was, or by another start."""
        path = self._path(key[0])
        try:
            held = path.read_bytes()
        except FileNotFoundError:
            return None
        derived = primitives.derive(self._session, b"round store", held[:_SALT])
        found = primitives.unseal(derived, held[_SALT:], _bound(key))
        if found is not None:
            path.unlink()
        return found

    def _path(self, run: str) -> Path:
        return self._folder / f"{hashlib.sha256(run.encode()).hexdigest()[:32]}.round"


def _bound(key: Key) -> bytes:
    return packed("round store", *key)
