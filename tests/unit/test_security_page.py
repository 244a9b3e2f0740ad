"""The threat model names a test for every promise, and the tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ")
]


def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_promise_of_the_threat_model_names_a_test_that_exists() -> None:
    head, *rows = ROWS
    assert head == ["who", "capability", "promised", "not promised", "which test"]
    assert rows
    for row in rows:
        assert len(row) == len(head)
        assert all(row), f"{row[0]}: an empty cell"
        match = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", row[-1])
        assert match is not None, row[-1]
        path, name = match.groups()
        assert (ROOT / path).exists(), path
        assert name in functions(path), row[-1]


def test_guarantees_in_docstrings_name_tests_that_exist() -> None:
    for source in (ROOT / "src" / "fedveil").rglob("*.py"):
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", source.read_text()):
            assert name in functions(path), f"{source.name}: {path}::{name}"


def test_the_policy_names_no_address_and_the_page_is_reached_from_it() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert "private security advisory" in text
    assert "docs/security.md" in text
    assert "@" not in text
