"""A folder of tables with one small published table."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.experiment.tables import PublishedTable, find_table
from tests.unit.experiment.published import TABLE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fedceo").mkdir()
    (tmp_path / "fedceo" / "table-1-digits.toml").write_text(TABLE)
    return tmp_path


@pytest.fixture
def table(folder: Path) -> PublishedTable:
    return find_table(folder, "fedceo", "table-1-digits")
