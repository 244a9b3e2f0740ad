"""Notes of the privacy statement on the preparation of a table."""

from __future__ import annotations

from typing import Literal, get_args

from fedveil.errors import InputError

Statistics = Literal["rows", "public", "private"]
_BEFORE = "If private rows were read to write it, the guarantee does not cover that."
PRIVATE_NOTE = (
    "Scales of the bounded columns were computed from the training rows with privacy noise, which is part of the "
    f"guarantee; categories, bounds and the other scales are constants of the given schema. {_BEFORE}"
)
STOPPING_NOTE = (
    "The examples that decide when training stops are public because the user declares them so: with the released "
    "models they determine the round of the stop."
)
AGREED_NOTE = (
    f"Scales and categories of the columns are those of the schema that the nodes agreed on. {_BEFORE}"
)


def check_statistics(statistics: object, noise: object, schema: bool) -> None:
    """Refuse unknown kinds of statistics, and private ones without noise or a schema with public bounds."""
    if statistics not in get_args(Statistics):
        known = ", ".join(f'"{name}"' for name in get_args(Statistics))
        raise InputError("statistics", statistics, "is not one of the choices", f"Use {known}.")
    if statistics == "public" and schema:
        remedy = "Leave it out."
        raise InputError("statistics", statistics, "the schema has them, as public constants", remedy)
    if statistics != "private":
        if noise is not None:
            raise InputError("statistics_noise", noise, 'needs statistics = "private"', "Leave it out.")
        return
    number = isinstance(noise, int | float) and not isinstance(noise, bool)
    if not number or not 0 < float(str(noise)) < float("inf"):
        remedy = "Give the noise in units of the sensitivity, such as 10."
        raise InputError("statistics_noise", noise, "private statistics need noise", remedy)
    if not schema:
        remedy = "Give a schema with categories, and low and high of the numbers."
        raise InputError("schema", None, "private statistics need public bounds", remedy)


def statistics_note(given: bool, statistics: Statistics) -> str:
    """The note on scales, medians and categories."""
    what = "Scales and categories of the columns"
    if given:
        return f"{what} are constants of the given schema: this run read no row for them. {_BEFORE}"
    if statistics == "public":
        return f"{what} were computed from the training rows; the user declares them public."
    return (
        f"{what} were computed from the training rows without protection: the guarantee does not cover them. "
        "Give a schema of public constants, or declare them public."
    )


def person_note(person: str | None, rows: int | None) -> str:
    """The note on persons with several rows."""
    apart = "A person with rows at two clients is protected at each separately."
    if person is None:
        return f"A record is a row, not a person: whoever has several rows is protected less. {apart}"
    if rows == 1:
        return f"A record is a person (column {person!r}): nobody has a second training row. {apart}"
    return f"A record is one of at most {rows} training rows of a person (column {person!r}). {apart}"
