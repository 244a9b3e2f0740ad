"""The schema of a table as a file: agreed on by all nodes before a run, so that their features mean the same.

A schema computed from private rows discloses something about them; compute it from public or invented rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tomli_w
from pydantic import Field

from fedveil.atomic_files import write_atomically
from fedveil.data.table import Column, TableSchema, class_names, fit_schema, read_table
from fedveil.federation.config import Section, read_toml


class _Column(Section):
    name: str
    mean: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    std: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    categories: tuple[str, ...] | None = None


class _Schema(Section):
    label: str
    classes: Annotated[tuple[str, ...], Field(min_length=1)]
    column: Annotated[tuple[_Column, ...], Field(min_length=1)]


def read_schema(path: Path) -> TableSchema:
    """The schema in this file; columns that it does not name are not read from a table."""
    schema = read_toml(path, _Schema)
    columns = tuple(Column(c.name, c.categories, c.mean, c.std) for c in schema.column)
    return TableSchema(schema.label, schema.classes, columns)


def write_schema(schema: TableSchema, path: Path) -> None:
    """Write what `read_schema` reads."""
    columns = [
        {"name": c.name, "mean": c.mean, "std": c.std}
        if c.categories is None
        else {"name": c.name, "categories": list(c.categories)}
        for c in schema.columns
    ]
    content = {"label": schema.label, "classes": list(schema.classes), "column": columns}
    write_atomically(path, tomli_w.dumps(content).encode())


def schema_of(
    path: Path, label: str, *, categorical: Sequence[str] = (), drop: Sequence[str] = ()
) -> TableSchema:
    """The schema that standardises the rows of this table."""
    table = read_table(path)
    classes = class_names([table], label)
    return fit_schema(table, label=label, classes=classes, categorical=categorical, drop=drop)
