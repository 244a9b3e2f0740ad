"""Files and values checked by pydantic; errors name the field, the value and the remedy."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fedveil.errors import InputError

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
# Parts of pydantic's error location that name a type or validator, not a key of the user's file.
_INNER = re.compile(r"bool|int|float|str|function-.*|(constrained|list|tuple|dict|literal|union)[-\[].*")
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "greater than or equal to"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "less than or equal to"),
}
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a section of keys and values",
    "model": "a section of keys and values",
}
_TYPE = re.compile(rf"({'|'.join(_TYPES)})_(type|parsing|parsing_size|from_float|number)")
M = TypeVar("M", bound=BaseModel)


class Section(BaseModel):
    """A part of a file: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


def read_toml(path: Path, model: type[M], *, missing: str = "Run `fedveil deploy init` first.") -> M:
    """Read the file as this model; any problem is an `InputError` that names the file and the key."""
    try:
        with path.open("rb") as file:
            return parse_content(tomllib.load(file), model, path)
    except FileNotFoundError as error:
        raise InputError("file", str(path), "does not exist", missing) from error
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("file", str(path), f"cannot be read as TOML: {error}", "Fix the file.") from error


def parse_content(content: Mapping[str, Any], model: type[M], path: Path) -> M:
    """Validate a file's content as this model; `path` is for error messages."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        found = refused(error, "", known_keys(model))
        remedy = f"{found.remedy} The file is {path}."
        raise InputError(f"{path.name}: {found.field}", found.value, found.problem, remedy) from error


def refused(error: ValidationError, prefix: str, known: Sequence[str]) -> InputError:
    """The first error of a validation, with the keys of the user's file, which are `known`.

    Where a value may have several types, the remedy covers each of them.
    """
    complaints = error.errors()
    place = _place(complaints[0])
    # Of several types, the one that the value fails inside of is the one that was meant.
    first = next((one for one in complaints if _place(one).startswith(f"{place}.")), complaints[0])
    place = _place(first)
    field = f"{prefix}.{place}" if prefix and place else place or prefix
    if first["type"] in _UNKNOWN:
        return InputError(field, first["input"], "unknown key", _known(place, known))
    if first["type"] == "missing":
        return InputError(field, None, "is missing", f"Give {field}.")
    value = first["input"]
    if isinstance(value, float) and math.isnan(value):
        return InputError(field, value, "is not a number", "Give a number.")
    problem, _ = _in_words(first)
    remedies = dict.fromkeys(_in_words(one)[1] for one in complaints if _place(one) == place)
    return InputError(field, value, problem, " Or: ".join(remedies))


def known_keys(model: type[BaseModel]) -> list[str]:
    """All keys of a file, those of its sections with the section's name."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        keys.append(name)
        section = info.annotation
        for candidate in (section, *getattr(section, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                keys.extend(f"{name}.{field}" for field in candidate.model_fields)
    return keys


def _place(complaint: Any) -> str:
    return ".".join(str(part) for part in complaint["loc"] if not _INNER.fullmatch(str(part)))


def _known(place: str, known: Sequence[str]) -> str:
    section, _, key = place.rpartition(".")
    beside = [name for where, _, name in (one.rpartition(".") for one in known) if where == section]
    elsewhere = [one for one in known if not section and one.endswith(f".{key}")]
    if elsewhere:
        return f"Did you mean {' or '.join(elsewhere)}?"
    near = difflib.get_close_matches(key, beside, n=1, cutoff=0.5)
    return f"Did you mean {near[0]}?" if near else f"Known: {', '.join(beside)}."


def _in_words(complaint: Any) -> tuple[str, str]:
    """The problem and the remedy."""
    kind, context = complaint["type"], complaint.get("ctx", {})
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        bound = context[key]
        number = (
            f"a whole number {words} {bound}" if isinstance(bound, int) else f"a number {words} {bound:g}"
        )
        return "is out of range", f"Use {number}."
    if kind == "literal_error":
        return "is not one of the choices", f"Use {context['expected']}."
    if kind in ("too_short", "too_long"):
        limit = (
            f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        )
        return f"has {context['actual_length']} entries", f"Give {limit}."
    if matched := _TYPE.fullmatch(kind):
        wanted = _TYPES[matched[1]]
        return f"is not {wanted}", f"Give {wanted}."
    message = complaint["msg"].removeprefix("Input ")
    if kind == "value_error":  # the messages of fedveil's own validators are remedies
        message = str(context["error"])
        return "cannot be used", f"{message[0].upper()}{message[1:]}."
    return message[0].lower() + message[1:], "Change it in the configuration."
