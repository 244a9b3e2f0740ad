"""The schema of a table: its columns, their scales and categories, and the classes.

The same schema makes the tables of different clients alike, in training and in prediction. It is a file
(`schema.toml`) that clients agree on before a run, and a part of every result folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import torch
from pydantic import Field
from torch import Tensor, nn

from fedveil.atomic_files import write_atomically
from fedveil.validation import Section, parse_content, read_toml

UNKNOWN = -1.0
"""Stands for a category that the schema does not know: no category has this index."""


@dataclass(frozen=True)
class Column:
    """How one column becomes features: a number `(value - mean) / std`, or one feature per category."""

    name: str
    categories: tuple[str, ...] | None
    mean: float = 0.0
    std: float = 1.0

    @property
    def width(self) -> int:
        """The number of features."""
        return 1 if self.categories is None else len(self.categories)


@dataclass(frozen=True)
class TableSchema:
    """How the rows of a table become examples."""

    label: str
    classes: tuple[str, ...]
    columns: tuple[Column, ...]
    user: str | None = None

    @property
    def mean(self) -> tuple[float, ...]:
        return tuple(value for c in self.columns for value in [c.mean] * c.width)

    @property
    def std(self) -> tuple[float, ...]:
        return tuple(value for c in self.columns for value in [c.std] * c.width)

    def to_json(self) -> dict[str, Any]:
        """What `schema_from_json` reads."""
        columns = [
            {"name": c.name, "mean": c.mean, "std": c.std}
            if c.categories is None
            else {"name": c.name, "categories": list(c.categories)}
            for c in self.columns
        ]
        return {"label": self.label, "classes": list(self.classes), "column": columns}


class TableFeatures(nn.Module):
    """Cells `[n, columns]` as features `[n, features]` in float32.

    A cell of a numeric column is its number, one of a categorical column the index of its category.
    """

    def __init__(self, schema: TableSchema) -> None:
        super().__init__()
        rows = [
            (place, column.mean, column.std, float(category))
            for place, column in enumerate(schema.columns)
            for category in ([math.nan] if column.categories is None else range(len(column.categories)))
        ]
        source, mean, std, category = zip(*rows, strict=True)
        self.register_buffer("source", torch.tensor(source))
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float64))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float64))
        self.register_buffer("category", torch.tensor(category, dtype=torch.float64))

    source: Tensor
    mean: Tensor
    std: Tensor
    category: Tensor

    def forward(self, cells: Tensor) -> Tensor:
        values = cells.to(torch.float64).index_select(1, self.source)
        scaled = (values - self.mean) / self.std
        same = (values == self.category).to(torch.float64)
        return torch.where(torch.isnan(self.category), scaled, same).to(torch.float32)


class _Column(Section):
    name: str
    mean: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    std: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    categories: tuple[str, ...] | None = None


class _Schema(Section):
    label: str
    classes: Annotated[tuple[str, ...], Field(min_length=1)]
    column: Annotated[tuple[_Column, ...], Field(min_length=1)]

    def schema_of_table(self) -> TableSchema:
        columns = tuple(Column(c.name, c.categories, c.mean, c.std) for c in self.column)
        return TableSchema(self.label, self.classes, columns)


def schema_from_json(content: Mapping[str, Any], path: Path) -> TableSchema:
    """The schema that `TableSchema.to_json` wrote; `path` is for errors."""
    return parse_content(content, _Schema, path).schema_of_table()


def read_schema(path: Path) -> TableSchema:
    """The schema in this TOML file; columns that it does not name are not read from a table."""
    return read_toml(path, _Schema, missing="Write it with `fedveil deploy form`.").schema_of_table()


def write_schema(schema: TableSchema, path: Path) -> None:
    """Write what `read_schema` reads."""
    write_atomically(path, tomli_w.dumps(schema.to_json()).encode())
