"""What tests of every kind share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedveil.methods.method import METHODS
from fedveil.models import registry


@pytest.fixture
def names_of_this_test_only() -> Iterator[None]:
    """Methods and models that the test registers are forgotten after it."""
    methods, models = dict(METHODS), dict(registry._ENTRIES)
    yield
    METHODS.clear()
    METHODS.update(methods)
    registry._ENTRIES.clear()
    registry._ENTRIES.update(models)
