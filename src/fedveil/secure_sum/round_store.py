"""A node's store of its secrets between the legs of a round, each of which may run in a separate process."""

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
    """One encrypted file for each run, with a key that exists only in the node's memory.

    Guarantees: stored secrets can be taken once, so no leg can be answered twice
    (`test_a_leg_is_answered_once`); after a restart of the node nothing can be decrypted
    (`test_a_restarted_node_drops_out_of_the_round`).

    Args:
        folder: A folder used by this node only.
        session: 32 random bytes drawn at each start of the node.
    """

    def __init__(self, folder: Path, session: bytes) -> None:
        self._folder = folder
        self._session = session

    @contextmanager
    def locked(self, run: str) -> Iterator[None]:
        """Serialise the legs of a run."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(self._path(run).with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def keep(self, key: Key, secrets: bytes) -> None:
        """Store the secrets of the attempt; replaces those of any other attempt of the same run."""
        salt = primitives.random_key()
        sealed = primitives.seal(primitives.derive(self._session, b"round store", salt), secrets, _bound(key))
        path = self._path(key[0])
        write_atomically(path, salt + sealed)
        path.chmod(0o600)

    def take(self, key: Key) -> bytes | None:
        """The secrets of this attempt, which are deleted; None if there are none or they are from another start."""
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
