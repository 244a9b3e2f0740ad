"""The fields of a method, wrapper, attack or section in words: one source for `fedveil list` and the documentation.

Ranges, choices and defaults come from the validation of the fields, meanings from their descriptions or from the
docstring below a field in the source.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

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
            written.get(name) or _meaning(schema.get(name, {})),
            _values(schema.get(name, {})),
        )
        for name, default in _defaults(kind).items()
    ]


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
