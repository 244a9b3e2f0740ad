"""What tests of refusals share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedveil.errors import InputError


@contextmanager
def refuses(field: str) -> Iterator[None]:
    """The block must raise an `InputError` about this field; its wording is free."""
    with pytest.raises(InputError) as caught:
        yield
    assert caught.value.field == field
