"""The fields of a method, wrapper, attack or section in words: one source for `fedveil list` and the documentation.

Ranges, choices and defaults come from the validation of the fields, meanings from their descriptions or from the
docstring below a field in the source.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, TypeAdapter

_BOUNDS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
_KINDS = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "null": "not given",
}


@dataclass(frozen=True)
class Described:
    """One field: its name, default, meaning and valid values."""

    name: str
    default: Any
    meaning: str
    values: str


def describe_fields(kind: type[Any]) -> list[Described]:
    """The fields of a configurable class, in order.

    Args:
        kind: The class of a method, a wrapper, an attack or a section of a configuration.

    Returns:
        One entry per field. `meaning` is empty where the class does not describe the field.
    """
    schema = TypeAdapter(kind).json_schema()["properties"]
    written = _attribute_docstrings(kind)
    return [
        Described(
            name,
            default,
            _sentence(written.get(name) or _meaning(schema.get(name, {}))),
            _values(schema.get(name, {})),
        )
        for name, default in _defaults(kind).items()
    ]


def describe_options(
    made_by: Callable[..., Any], defaults: Mapping[str, Any], meanings: Mapping[str, tuple[str, str]]
) -> list[Described]:
    """The options of a function, in order.

    Args:
        made_by: The function that takes them: its annotations say what they may be.
        defaults: The options, with what they are if not given.
        meanings: What each means and the bounds of its numbers.
    """
    given = inspect.signature(made_by).parameters
    names = vars(inspect.getmodule(made_by))
    described = []
    for name, default in defaults.items():
        meaning, bounds = meanings.get(name, ("", ""))
        written = given[name].annotation if name in given else int | None
        only = types.SimpleNamespace(__annotations__={name: written})  # others may name what is not imported
        kind = get_type_hints(only, names)[name]
        described.append(Described(name, default, meaning, _bounded(_values(_in_files(kind)), bounds)))
    return described


def _in_files(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type, without what only Python code can give."""
    if get_origin(kind) in (Union, types.UnionType):
        kept = [part for part in get_args(kind) if not is_dataclass(part)]
        parts = [TypeAdapter(part).json_schema() for part in kept]
        return {
            "anyOf": [part for k, part in enumerate(parts) if _values(part) not in map(_values, parts[:k])]
        }
    return TypeAdapter(kind).json_schema()


def _bounded(values: str, bounds: str) -> str:
    """The words for a number with its bounds behind it."""
    before, number, after = values.partition("number")
    return f"{before}{number} {bounds}{after}" if bounds and number else values


def _defaults(kind: type[Any]) -> dict[str, Any]:
    """The fields with their defaults; "needed" for required fields."""
    if issubclass(kind, BaseModel):
        return {
            name: "needed" if field.is_required() else field.get_default(call_default_factory=True)
            for name, field in kind.model_fields.items()
        }
    return {field.name: field.default for field in fields(kind)}


def _meaning(schema: Mapping[str, Any]) -> str:
    """The description of the field's type; for alternatives, the first that has one."""
    found = [schema, *schema.get("anyOf", ())]
    return next((str(part["description"]) for part in found if "description" in part), "")


def _sentence(text: str) -> str:
    """The same form for all meanings: a capital first, a full stop last; code and names stay as they are."""
    if not text:
        return ""
    first = text.partition(" ")[0]
    begun = f"{text[0].upper()}{text[1:]}" if first.isalpha() and first.islower() else text
    return begun if begun.endswith((".", ":", "?")) else f"{begun}."


def _values(schema: Mapping[str, Any]) -> str:
    """The kind, range or choices of a field."""
    if "anyOf" in schema:
        return ", or ".join(_values(part) for part in schema["anyOf"])
    if "const" in schema:
        return f'"{schema["const"]}"'
    if "enum" in schema:
        return ", ".join(f'"{choice}"' for choice in schema["enum"])
    if schema.get("type") == "object" or "$ref" in schema:
        return "a section of keys and values"
    if schema.get("type") == "array":
        return f"list of {_values(schema.get('items', {}))}"
    kind = _KINDS.get(str(schema.get("type")), "a value")
    bounds = [f"{sign} {schema[key]:g}" for key, sign in _BOUNDS if key in schema]
    return f"{kind} {' and '.join(bounds)}" if bounds else kind


def _attribute_docstrings(kind: type[Any]) -> dict[str, str]:
    """The docstrings that follow field declarations, in the class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # built in, or made at run time
            continue
        (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
        for declared, text in itertools.pairwise(body):
            if not isinstance(declared, ast.AnnAssign) or not isinstance(declared.target, ast.Name):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[declared.target.id] = " ".join(str(text.value.value).split())
    return found
