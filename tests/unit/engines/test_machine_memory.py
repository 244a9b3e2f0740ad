"""Processes of one machine write where another reads; processes elsewhere never read the wrong memory."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fedveil.engines.machine_memory import MachineMemory
from fedveil.engines.shared_memory import Leaf

WRITER = """
import pickle, sys
from fedveil.engines.shared_memory import Leaf
memory = pickle.loads(sys.stdin.buffer.read()).opened("here")
memory.view(Leaf("w", "float32", 2, (3,), 64))[1] = 7.0
"""
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files without a name are Linux'")


def made(capacity: int = 4096) -> MachineMemory:
    found = MachineMemory.made("here", capacity)
    assert found is not None
    return found


def test_another_process_of_the_machine_writes_what_this_one_reads() -> None:
    block = made()
    table = block.memory.view(Leaf("w", "float32", 2, (3,), 64))
    table.zero_()
    subprocess.run([sys.executable, "-c", WRITER], input=pickle.dumps(block.address), check=True, timeout=120)
    assert torch.equal(table, torch.tensor([[0.0] * 3, [7.0] * 3]))
    block.close()


def test_another_machine_and_another_file_of_that_name_are_not_opened() -> None:
    block, other = made(), made()
    assert block.address.opened("there") is None
    assert replace(block.address, path=other.address.path).opened("here") is None
    assert replace(block.address, path="/proc/0/fd/0").opened("here") is None
    block.close()
    assert block.address.opened("here") is None, "its number may be another file's by now"
    other.close()


def test_without_room_there_is_none() -> None:
    assert MachineMemory.made("here", 0) is None
