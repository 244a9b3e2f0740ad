from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil import messages
from fedveil.messages import Message, MessageError
from fedveil.methods import METHODS
from fedveil.tree import Params
from tests.refusals import refuses


@dataclass(frozen=True)
class Letter(Message):
    params: Params
    size: torch.Tensor
    step: int
    note: str | None = None


def letter() -> Letter:
    return Letter({"z": torch.ones(3, 2, 2), "a/b": torch.zeros(3, 1).half()}, torch.tensor([1, 2, 3]), 4)


def test_bytes_bring_everything_back_in_order() -> None:
    sent = letter()
    got = Letter.from_bytes(sent.to_bytes())
    assert list(got.params) == ["z", "a/b"]
    assert (got.step, got.note) == (4, None)
    assert got.params["a/b"].dtype == torch.float16
    assert torch.equal(got.size, sent.size)


@pytest.mark.parametrize("step", [4.5, True, "4", None])
def test_a_number_of_another_type_is_refused(step: object) -> None:
    """Who rounds it and who does not would disagree, about the size of a cohort for instance."""
    sent = dataclasses.replace(letter(), step=step)  # type: ignore[arg-type]  # a stranger may send anything
    with refuses("step", MessageError):
        Letter.from_bytes(sent.to_bytes())


def test_an_empty_dictionary_survives() -> None:
    assert Letter.from_bytes(Letter({}, torch.zeros(1), 0, "x").to_bytes()).params == {}


def test_size_is_that_of_one_client() -> None:
    assert letter().row_bytes() == 4 * 4 + 2 + 8


def test_rows_leave_shared_rows_alone() -> None:
    mixed = Letter({"shared": torch.ones(1, 2)}, torch.tensor([5, 6, 7]), 0)
    picked = mixed.rows([2, 0])
    assert picked.size.tolist() == [7, 5]
    assert picked.params["shared"].shape == (1, 2)


def test_concatenation_keeps_the_order() -> None:
    parts = [letter().rows([0]), letter().rows([1, 2])]
    assert torch.equal(Letter.concatenate(parts).size, letter().size)


@dataclass(frozen=True)
class Other(Message):
    size: torch.Tensor


def test_another_kind_is_refused() -> None:
    with refuses("kind", MessageError, value="Other"):
        Letter.from_bytes(Other(torch.zeros(1)).to_bytes())


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_error(data: bytes) -> None:
    with pytest.raises(MessageError):
        Letter.from_bytes(data)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_gives_a_letter_or_a_message_error(place: int, value: int) -> None:
    data = bytearray(letter().to_bytes())
    data[place % len(data)] = value
    with contextlib.suppress(MessageError):
        assert isinstance(Letter.from_bytes(bytes(data)), Letter)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_field_of_a_methods_messages_has_a_type_that_is_checked(name: str) -> None:
    kind = METHODS[name]
    for record in (kind.server_type, kind.down_type, kind.up_type):
        assert set(messages._kinds(record)) == {field.name for field in fields(record)}, record
