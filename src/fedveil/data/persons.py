"""Persons with several rows: bounded contribution, and each person in one split only."""

from __future__ import annotations

import functools
import unicodedata
from decimal import Context, Decimal
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedveil.data.dataset import stratified_split
from fedveil.data.raw_table import RawTable, require_present
from fedveil.errors import InputError, whole_number
from fedveil.lazy_torch import torch
from fedveil.streams import named_stream

if TYPE_CHECKING:
    from torch import Tensor


def check_persons(person: str | None, rows_per_person: int | None) -> int | None:
    """The number of training rows that a person may have: 1 if only the column is given, None without a column."""
    if person is None:
        if rows_per_person is not None:
            raise InputError(
                "rows_per_person", rows_per_person, "needs a column of persons", "Give person as well."
            )
        return None
    return 1 if rows_per_person is None else whole_number("rows_per_person", rows_per_person, 1)


_DIGITS = Context(prec=400)  # none of a long number is rounded away


@functools.lru_cache(maxsize=1 << 16)
def same_person(cell: str) -> str:
    """One text for all spellings of a person.

    They differ in blanks, capitals, width, dashes, invisible characters, or digits that do not change a number.
    Two persons who are taken for one are protected together, which only costs rows. One who is taken for two would not
    be protected.
    """
    whole = unicodedata.normalize("NFKC", cell).casefold()
    if not whole.isascii():
        kinds = ((mark, unicodedata.category(mark)) for mark in whole)
        whole = "".join("-" if kind == "Pd" else mark for mark, kind in kinds if kind != "Cf")
    text = " ".join(whole.split())
    try:
        number = Decimal(text.replace(",", "."))
        return str(number.normalize(_DIGITS)) if number.is_finite() else text
    except ArithmeticError:  # not a number, or one beyond all exponents
        return text


def people_of(table: RawTable, person: str) -> npt.NDArray[np.int64]:
    """The person of each row, as a number; see `same_person`."""
    require_present(table, [person], "Fill them in or drop these rows.")
    names = np.array([same_person(cell) for cell in table.texts(person, "person")])
    people: npt.NDArray[np.int64] = np.unique(names, return_inverse=True)[1].astype(np.int64)
    return people


def limit_rows(table: RawTable, person: str, most: int, seed: int) -> RawTable:
    """At most `most` rows of each person, drawn with the seed, in the order of the table.

    Guarantees: which rows of a person are kept depends on no other person's rows
    (`test_another_person_changes_none_of_the_rows_that_are_kept`).
    """
    people = people_of(table, person)
    order = np.argsort(people, kind="stable")
    cells = table.texts(person, "person")
    kept: list[npt.NDArray[np.int64]] = []
    for rows in np.split(order, np.cumsum(np.bincount(people))[:-1]):
        if len(rows) > most:
            stream = named_stream(seed, "rows per person", same_person(cells[rows[0]]))
            rows = rows[stream.permutation(len(rows))[:most]]
        kept.append(rows)
    return table.take(np.sort(np.concatenate(kept)))


def split_by_person(
    table: RawTable, person: str, y: npt.NDArray[np.int64], test_fraction: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Rows of a train and a test split, each person in one of them, stratified by the persons' first labels."""
    people = people_of(table, person)
    _, first = np.unique(people, return_index=True)
    train, _ = stratified_split(y[first], test_fraction, seed, "persons")
    kept = np.isin(people, train.numpy())
    return torch.from_numpy(np.flatnonzero(kept)), torch.from_numpy(np.flatnonzero(~kept))
