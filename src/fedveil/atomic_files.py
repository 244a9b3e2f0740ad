"""Files written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedveil.errors import ResultError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write (disk full or missing) into a `ResultError` that says how to resume."""
    try:
        yield
    except OSError as error:
        raise ResultError(
            f"cannot write {path}: {error.strerror}. Earlier files are intact. "
            "Free some space or fix the disk, then run it again: it resumes from the last checkpoint.",
            field="file",
            value=str(path),
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file by `data`; after a crash or power cut it holds either the old or the new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sync(path: Path) -> None:
    """Wait until everything appended to this file is on the disk."""
    if not path.exists():
        return
    with writing(path), path.open("ab") as file:
        os.fsync(file.fileno())


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed writers. Only for a folder that no other process writes to."""
    for path in folder.rglob(".*.tmp"):
        path.unlink(missing_ok=True)
