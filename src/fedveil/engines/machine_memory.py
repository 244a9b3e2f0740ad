"""Memory that processes of one machine share although none was forked from another: a file without a name.

It is gone with the process that made it, however that ended. Others open it through that process's entry in /proc.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from fedveil.engines.shared_memory import SharedMemory


@dataclass(frozen=True)
class Address:
    """Where a block of memory is, for any process of the machine `node`."""

    node: str
    path: str
    file: tuple[int, int]
    """Device and number: on another machine, or in another container, the path may lead to something else."""
    capacity: int

    def opened(self, node: str) -> SharedMemory | None:
        """The memory as a process on `node` sees it; None where it cannot be seen."""
        if node != self.node:
            return None
        try:
            file = os.open(self.path, os.O_RDWR)
        except OSError:
            return None
        try:
            found = os.fstat(file)
            if (found.st_dev, found.st_ino) != self.file:
                return None
            return SharedMemory(self.capacity, file)
        finally:
            os.close(file)


class MachineMemory:
    """A block of this process that others on its machine can open."""

    def __init__(self, file: int, node: str, capacity: int) -> None:
        self._file = file
        self.memory = SharedMemory(capacity, file)
        found = os.fstat(file)
        path = f"/proc/{os.getpid()}/fd/{file}"
        self.address = Address(node, path, (found.st_dev, found.st_ino), capacity)

    @classmethod
    def made(cls, node: str, capacity: int) -> MachineMemory | None:
        """None where the system has no such files, or no room."""
        if not hasattr(os, "memfd_create") or capacity <= 0:
            return None
        with suppress(OSError):
            file = os.memfd_create("fedveil", os.MFD_CLOEXEC)
            try:
                os.ftruncate(file, capacity)
                return cls(file, node, capacity)
            except OSError:
                os.close(file)
        return None

    def close(self) -> None:
        """Close the file; the memory stays until nobody uses it."""
        os.close(self._file)
