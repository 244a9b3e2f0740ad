from __future__ import annotations

import subprocess
import sys

import pytest

from fedveil.engines.pool import can_fork

FORKED_FROM_A_PARENT_WITH_THREADS = """
import os, sys, time
import torch
from fedveil.engines.processes import let_threads_sleep

torch.set_num_threads(2)
(torch.ones(400, 400) @ torch.ones(400, 400)).exp().sum()
child = os.fork()
if child == 0:
    let_threads_sleep()
    os._exit(0)
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        sys.exit(status)
    time.sleep(0.01)
os.kill(child, 9)
sys.exit("the forked process hangs")
"""


@pytest.mark.skipif(not can_fork(), reason="this system does not fork")
def test_a_forked_process_does_not_wait_for_threads_of_its_parent() -> None:
    script = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED_FROM_A_PARENT_WITH_THREADS]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
