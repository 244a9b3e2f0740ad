"""Memory shared between unrelated processes of one machine: an anonymous file.

It is freed when the process that created it ends. Others open it through that process's entry in /proc.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from fedveil.engines.shared_memory import SharedMemory


@dataclass(frozen=True)
class Address:
    """The location of a block of memory, for any process of the machine `node`."""

    node: str
    path: str
    file: tuple[int, int]
    """Device and inode, since on another machine or in another container the path may be another file."""
    capacity: int

    def opened(self, node: str) -> SharedMemory | None:
        """The memory for a process on `node`; None if it is not accessible."""
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
        """Create a block; None if the system does not support it or has no free memory."""
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
        """Close the file; the memory is freed when no process uses it."""
        os.close(self._file)
