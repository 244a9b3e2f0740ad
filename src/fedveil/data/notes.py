"""What a privacy statement says about how a table was prepared."""

from __future__ import annotations

from typing import Literal

Statistics = Literal["rows", "public"]


AGREED_NOTE = "Scales and categories of the columns are those of the schema that the nodes agreed on."


def statistics_note(given: bool, statistics: Statistics) -> str:
    """What a privacy statement says about scales, medians and categories."""
    what = "Scales and categories of the columns"
    if given:
        return f"{what} are constants of the given schema: no private row was read for them."
    if statistics == "public":
        return f"{what} were computed from the training rows; the user declares them public."
    return (
        f"{what} were computed from the training rows without protection: the guarantee does not cover them. "
        "Give a schema of public constants, or declare them public."
    )


def person_note(person: str | None, rows: int | None) -> str:
    """What a privacy statement says about people with several rows."""
    apart = "A person with rows at two clients is protected at each separately."
    if person is None:
        return f"A record is a row, not a person: whoever has several rows is protected less. {apart}"
    if rows == 1:
        return f"A record is a person (column {person!r}): nobody has a second training row. {apart}"
    return f"A record is one of at most {rows} training rows of a person (column {person!r}). {apart}"
