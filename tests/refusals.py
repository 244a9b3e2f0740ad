"""What tests of refusals share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedveil.errors import FedveilError, InputError

ANY = object()


@contextmanager
def refuses(
    field: str, kind: type[FedveilError] = InputError, *, value: object = ANY
) -> Iterator[pytest.ExceptionInfo[FedveilError]]:
    """The block must raise an error of this kind about this field (and value); its wording is free."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.field == field, str(caught.value)
    if value is not ANY:
        assert caught.value.value == value, str(caught.value)
