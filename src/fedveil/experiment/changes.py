"""Changes of a configuration given on the command line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fedveil.errors import InputError
from fedveil.methods import METHODS
from fedveil.methods.method import field_names

_DEEPEST_KEY = 8


def parse_value(text: str) -> Any:
    """A value from the command line: TOML, or else plain text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        word = text.strip()
        # TOML requires a digit before and after the decimal point
        return float(word) if re.fullmatch(r"[+-]?(\.\d+|\d+\.)([eE][+-]?\d+)?", word) else word


def apply_change(content: dict[str, Any], change: str) -> None:
    """Change the content of a configuration as `--set section.key=value` says."""
    key, equals, text = change.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts) or len(parts) > _DEEPEST_KEY:
        raise InputError("--set", change, "is not a change", "Write --set section.key=value.")
    value = parse_value(text)
    if parts == ["method", "name"]:
        content["method"] = _other_method(content.get("method", {}), value)
        return
    section: Any = content
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise InputError("--set", change, f"{part} is not a section", "Write --set section.key=value.")
    section[parts[-1]] = value


def _other_method(section: Any, name: Any) -> dict[str, Any]:
    """Another method's defaults, keeping fields that both methods share, except choices that the other lacks."""
    if not isinstance(name, str) or name not in METHODS or not isinstance(section, Mapping):
        return {"name": name}
    offered = get_type_hints(METHODS[name])
    shared = {key for key in field_names(METHODS[name]) if _chooses(offered[key], section.get(key))}
    return {"name": name} | {key: value for key, value in section.items() if key in shared}


def _chooses(annotation: Any, value: Any) -> bool:
    """Whether a field accepts this value, if it is a choice between words."""
    return get_origin(annotation) is not Literal or value in get_args(annotation)
