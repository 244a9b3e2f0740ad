from __future__ import annotations

import pickle

import pytest

from fedveil.errors import DataError, FedveilError, InputError, NobodyAnsweredError


@pytest.mark.parametrize(
    "error",
    [
        FedveilError("wrong", field="a", value=1),
        InputError("run.rounds", -1, "is negative", "Give 1 or more."),
        DataError("line 3: no number", field="age"),
        NobodyAnsweredError(2, {0: "timeout"}),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_crosses_processes_with_all_that_it_says(error: FedveilError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
