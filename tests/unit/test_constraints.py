"""The constraints install from an ordinary package index, on every supported Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LINES = [
    line
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]


@pytest.mark.parametrize("line", LINES)
def test_constraints_are_exact_public_versions(line: str) -> None:
    (pinned,) = Requirement(line).specifier
    assert pinned.operator == "=="
    assert "+" not in pinned.version, f"{line}: a local build is on no ordinary index"


def test_peers_have_no_local_builds() -> None:
    text = (ROOT / "benchmarks" / "peers" / "requirements.txt").read_text()
    assert not re.search(r"==[^\s;#]*\+", text)
