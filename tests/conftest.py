"""What tests of every kind share."""

from __future__ import annotations

import faulthandler
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedveil.methods.method import METHODS
from fedveil.models import registry

_MOST_MEMORY = 3 << 30  # bytes that input may make the process grow by: room for torch, not for a bomb
_MOST_SECONDS = 900  # of all tests of a module, on a machine that is busy with other work


@pytest.fixture(scope="module")
def bounded() -> Iterator[None]:
    """Whatever the tests of this module read: a hang ends them, and memory without bound is refused."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + _MOST_MEMORY, hard))
    faulthandler.dump_traceback_later(_MOST_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture
def names_of_this_test_only() -> Iterator[None]:
    """Methods and models that the test registers are forgotten after it."""
    methods, models = dict(METHODS), dict(registry._ENTRIES)
    yield
    METHODS.clear()
    METHODS.update(methods)
    registry._ENTRIES.clear()
    registry._ENTRIES.update(models)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built strictly: a warning of any kind fails the build."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target
