"""The constraints install from an ordinary package index, on every supported Python."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
EXTRAS = ("dev", "flower", "report", "text")  # what the tests need


def pins(name: str) -> list[str]:
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


LINES = [*pins("constraints.txt"), *pins("constraints-lowest.txt")]


@pytest.mark.parametrize("line", LINES)
def test_constraints_are_exact_public_versions(line: str) -> None:
    (pinned,) = Requirement(line).specifier
    assert pinned.operator == "=="
    assert "+" not in pinned.version, f"{line}: a local build is on no ordinary index"


def test_the_lowest_versions_that_are_declared_are_the_ones_tested() -> None:
    """`make test-lowest` installs constraints-lowest.txt; `make lowest` writes it from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = {canonicalize_name(Requirement(line).name): line for line in pins("constraints-lowest.txt")}
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *(line for name in EXTRAS for line in extras[name])):
        needed = Requirement(text)
        (lowest,) = (s.version for s in needed.specifier if s.operator in (">=", "=="))
        (pinned,) = Requirement(tested[canonicalize_name(needed.name)]).specifier
        assert Version(pinned.version) == Version(lowest), f"{text} is tested with {pinned}"


def test_peers_have_no_local_builds() -> None:
    text = (ROOT / "benchmarks" / "peers" / "requirements.txt").read_text()
    assert not re.search(r"==[^\s;#]*\+", text)
