"""Files of results folders, read defensively: damage is reported as a problem in words, never as an exception."""

from __future__ import annotations

import json
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LARGEST_TEXT = 256 << 20
_LARGEST_NUMBER = 1e100  # beyond anything measured, and far from where sums overflow


class Problems(list[str]):
    """Damaged or missing parts of a run's folder; `notes` are other remarks, such as an unfinished run."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []


def read_bytes(path: Path, most: int) -> bytes:
    """What a file holds: a pipe would never end, and neither would a device."""
    seen = path.stat()
    if not stat.S_ISREG(seen.st_mode):
        raise OSError(0, "it is no file")
    if seen.st_size > most:
        raise OSError(0, f"it is larger than {most >> 20} MiB")
    return path.read_bytes()


def read_text(path: Path, problems: list[str]) -> str | None:
    try:
        return read_bytes(path, _LARGEST_TEXT).decode()
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path.name} {why(error)}")
    return None


def parse_json(text: str) -> Any:
    """JSON whose texts can be written down again: half a surrogate pair is no letter."""
    return _written(json.loads(text)) if "\\ud" in text.lower() else json.loads(text)


def _written(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_written(item) for item in value]
    if isinstance(value, dict):
        return {_written(key): _written(item) for key, item in value.items()}
    return value


def read_json(path: Path, problems: list[str], within: str = "") -> Any:
    text = read_text(path, problems)
    if text is None:
        return None
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"{within}{path.name} is damaged: {why(error)}")
        return None


def parse_toml(text: str, problems: list[str]) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"config.toml is damaged: {error}")
        return {}


def why(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or 'unknown reason'}"
    return "cannot be read: not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)


def number(value: Any) -> float | None:
    """A finite number that charts can work with, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST_NUMBER:
        return None
    return float(value)


def natural(path: Path | str) -> list[tuple[int, int, str]]:
    """Sort seed-2 before seed-10."""
    parts = re.split(r"(\d{1,300})", str(path))
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]


class Fields:
    """Values by name and type; a wrong type is a problem, and so is a missing required value."""

    def __init__(self, values: Mapping[str, Any], problems: list[str], prefix: str = "") -> None:
        self.values = values
        self.problems = problems
        self._prefix = prefix

    def number(self, name: str, *, required: bool = True) -> float | None:
        value = number(self.values.get(name))
        return value if self._fits(name, value is not None, required) else None

    def text(self, name: str, *, required: bool = True) -> str:
        value = self.values.get(name)
        return str(value) if self._fits(name, isinstance(value, str), required) else ""

    def mapping(self, name: str, *, required: bool = True) -> Mapping[str, Any]:
        value = self.values.get(name)
        return value if self._fits(name, isinstance(value, Mapping), required) and value else {}

    def items(self, name: str, *, required: bool = True) -> list[Any]:
        value = self.values.get(name)
        return list(value) if self._fits(name, isinstance(value, list), required) and value else []

    def _fits(self, name: str, right: bool, required: bool) -> bool:
        if right:
            return True
        if self.values.get(name) is not None:
            self.problems.append(f"summary.json: {self._prefix}{name} cannot be read")
        elif required:
            self.problems.append(f"summary.json: {self._prefix}{name} is missing")
        return False
