"""Errors that a user can act on: each names the field, the value and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from operator import index
from typing import Any

LARGEST_SEED = 2**63 - 1  # the largest seed that torch's generators accept


def _restored(kind: type[FedveilError], args: tuple[Any, ...], state: Mapping[str, Any]) -> FedveilError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class FedveilError(Exception):
    """Anything the user can fix. The command line prints it without a traceback and exits with 2.

    Args:
        message: What is wrong, where, and what to do.
        field: What the error is about (a setting, file, column or part), for callers and tests.
        value: What was found there.
    """

    def __init__(self, message: str = "", *, field: str = "", value: object = None) -> None:
        super().__init__(message)
        self.field = field
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the class with the message alone, which ends a process pool that passes the error on.
        return _restored, (type(self), self.args, self.__dict__)


class InputError(FedveilError):
    """A value that cannot be used, with a remedy."""

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{field} = {shown}: {problem}. {remedy}", field=field, value=value)
        self.problem = problem
        self.remedy = remedy


class DataError(FedveilError):
    """Data that is missing, damaged or not of the expected format."""


class DivergedError(FedveilError):
    """A client's upload is not finite; the last good checkpoint is kept."""


class NobodyAnsweredError(FedveilError):
    """Every invited client of a round refused or dropped out; another round would spend budget without an update.

    `reasons` holds the reason of each client.
    """

    def __init__(self, round: int, reasons: Mapping[int, str], released: str = "") -> None:
        listed = "".join(f"\n  client {client}: {why}" for client, why in sorted(reasons.items()))
        super().__init__(
            f"round {round}: none of the {len(reasons)} invited clients answered, so the run ends here.{listed}\n"
            f"{released}Submit the run again to resume once they can take part."
        )
        self.round = round
        self.reasons = dict(reasons)


class ResultError(FedveilError):
    """A results folder that cannot be used for the request."""


class LedgerError(FedveilError):
    """A privacy ledger that was altered, has a gap, or cannot be written."""


def known_name(field: str, kind: str, name: object, known: Collection[str]) -> str:
    """The name, if it is known; else an error that suggests similar names."""
    if isinstance(name, str) and name in known:
        return name
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4)
    remedy = f"Did you mean {' or '.join(near)}? " if near else ""
    remedy += f"Known: {', '.join(sorted(known))}."
    if kind in ("method", "model"):
        remedy += " To use your own: fedveil --plugin FILE.py COMMAND."
    raise InputError(field, name, f"no such {kind}", remedy)


def require_free(kind: str, name: str, made: object, known: object | None) -> None:
    """Refuse a name that another module has registered, since results would be attributed to the wrong one.

    The same module may register it again (a plugin file that is run twice).
    """
    owner = getattr(known, "__module__", None)
    if known is not None and owner != getattr(made, "__module__", None):
        raise InputError(
            "name", name, f"is already registered as a {kind} by {owner}", "Choose another name."
        )


def install(extra: str) -> str:
    """The command that installs an optional extra; the package is installed from a clone of its repository."""
    return f'In the clone of fedveil, run: pip install -e ".[{extra}]"'


def whole_number(field: str, value: object, least: int, most: int | None = None) -> int:
    """The value, if it is a whole number in this range."""
    try:
        number = index(value)  # type: ignore[arg-type]  # accepts every integer type, NumPy's too
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise InputError(field, value, "is not a whole number", f"Use a whole number from {least} on.")
    if number < least or (most is not None and number > most):
        limit = f"from {least} on" if most is None else f"from {least} to {most}"
        raise InputError(field, value, "is out of range", f"Use a whole number {limit}.")
    return number


@contextmanager
def within(section: str) -> Iterator[None]:
    """Prefix the field of an `InputError` raised inside with the section of the user's file."""
    try:
        yield
    except InputError as error:
        field = error.field if "." in error.field else f"{section}.{error.field}"
        raise InputError(field, error.value, error.problem, error.remedy) from error
