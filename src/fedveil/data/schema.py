"""The schema of a table: its columns, their scales and categories, and the classes.

The same schema gives the tables of all clients the same features, in training and in prediction. It is a file
(`schema.toml`) that clients agree on before a run, and a part of every results folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli_w
from pydantic import Field, model_validator

from fedveil.atomic_files import write_atomically
from fedveil.errors import InputError
from fedveil.losses import LossName, Target
from fedveil.validation import Section, parse_content, read_toml

Missing = Literal["refuse", "drop", "median", "category"]
Decimal = Literal[".", ","]
MISSING_CATEGORY = "(missing)"
UNKNOWN = -1.0
"""The index of a category that the schema does not contain."""


@dataclass(frozen=True)
class Column:
    """The conversion of one column to features: a number, or one-hot categories.

    Features are `(value - mean) / std`.
    """

    name: str
    categories: tuple[str, ...] | None
    mean: float = 0.0
    std: float = 1.0
    fill: float | None = None
    """The replacement of a missing cell: a number, or the index of a category; None: it is refused."""
    indicator: bool = False
    """Whether an additional feature indicates missing numbers."""
    reference: str | None = None
    """A category without a feature: all features of the column are 0."""
    bounds: tuple[float, float] | None = None
    """Public bounds of a number; values outside count as the bound in private statistics."""

    @property
    def width(self) -> int:
        """The number of features."""
        return 1 + self.indicator if self.categories is None else len(self.categories)

    @property
    def rest(self) -> tuple[float, float]:
        """The mean and the standard deviation of the features after the first."""
        return (0.0, 1.0) if self.categories is None else (self.mean, self.std)

    def to_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {"name": self.name}
        if self.categories is None:
            said |= {"mean": self.mean, "std": self.std}
            if self.bounds is not None:
                said |= {"low": self.bounds[0], "high": self.bounds[1]}
        else:
            said |= {"categories": list(self.categories)}
            if (self.mean, self.std) != (0.0, 1.0):
                said |= {"mean": self.mean, "std": self.std}
        if self.fill is not None:
            said["fill"] = self.fill
        if self.reference is not None:
            said["reference"] = self.reference
        return said | {"indicator": True} if self.indicator else said


@dataclass(frozen=True)
class TableSchema:
    """The conversion of a table's rows to examples."""

    label: str
    classes: tuple[str, ...]
    columns: tuple[Column, ...]
    user: str | None = None
    person: str | None = None
    missing: Missing = "refuse"
    decimal: Decimal = "."
    limit: float | None = None
    """The bound to which standardised numbers are clipped."""
    unit_norm: bool = False
    """Whether the features of every row are scaled to norm 1, so that no row has a large gradient."""
    target: Target = "classes"
    event: str | None = None
    """The column that is 1 if the time in the label column is that of an event, 0 if it is censored."""
    intervals: tuple[float, ...] = ()
    """The ends of the intervals of a hazard model; none for Cox's model."""
    label_mean: float = 0.0
    label_std: float = 1.0
    """A number is learned as `(value - label_mean) / label_std`."""

    @property
    def outputs(self) -> int:
        """The outputs that a model needs."""
        return len(self.classes) if self.target == "classes" else max(1, len(self.intervals))

    @property
    def usual_loss(self) -> LossName | None:
        """The default loss of the target; None for classes."""
        if self.target == "survival":
            return "hazard" if self.intervals else "cox"
        return "squared" if self.target == "number" else None

    @property
    def mean(self) -> tuple[float, ...]:
        return tuple(value for c in self.columns for value in [c.mean, *[c.rest[0]] * (c.width - 1)])

    @property
    def std(self) -> tuple[float, ...]:
        return tuple(value for c in self.columns for value in [c.std, *[c.rest[1]] * (c.width - 1)])

    def to_json(self) -> dict[str, Any]:
        """The input of `schema_from_json`."""
        said: dict[str, Any] = {"label": self.label, "classes": list(self.classes)}
        if self.missing != "refuse":
            said["missing"] = self.missing
        if self.decimal != ".":
            said["decimal"] = self.decimal
        if self.limit is not None:
            said["limit"] = self.limit
        if self.unit_norm:
            said["unit_norm"] = True
        if self.target == "number":
            said |= {"target": self.target, "label_mean": self.label_mean, "label_std": self.label_std}
        if self.target == "survival":
            said |= {"target": self.target, "event": self.event, "intervals": list(self.intervals)}
        return said | {"column": [column.to_json() for column in self.columns]}


class _Column(Section):
    name: str
    mean: Annotated[float | None, Field(allow_inf_nan=False)] = None
    std: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    low: Annotated[float | None, Field(allow_inf_nan=False)] = None
    high: Annotated[float | None, Field(allow_inf_nan=False)] = None
    categories: tuple[str, ...] | None = None
    fill: Annotated[float | None, Field(allow_inf_nan=False)] = None
    indicator: bool = False
    reference: str | None = None

    @model_validator(mode="after")
    def _bounded(self) -> _Column:
        if (self.low is None) != (self.high is None) or (self.low or 0) > (self.high or 0):
            raise InputError("high", self.high, f"low is {self.low}", "Give both, low below high.")
        if self.low is not None and (self.low == self.high or self.categories is not None):
            problem = "is as low" if self.categories is None else "categories have no bounds"
            raise InputError("high", self.high, problem, "Give low below high, of numbers only.")
        return self

    def column(self, missing: Missing) -> Column:
        """The column; without constants a bounded column is scaled by its bounds."""
        bounds = None if self.low is None or self.high is None else (self.low, self.high)
        middle, half = (0.0, 1.0) if bounds is None else (sum(bounds) / 2, (bounds[1] - bounds[0]) / 2)
        mean = middle if self.mean is None else self.mean
        filled = bounds is not None and self.fill is None and missing in ("median", "category")
        return Column(
            self.name,
            self.categories,
            mean,
            half if self.std is None else self.std,
            mean if filled else self.fill,
            self.indicator or (filled and missing == "category"),
            self.reference,
            bounds,
        )


class _Schema(Section):
    label: str
    missing: Missing = "refuse"
    decimal: Decimal = "."
    limit: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    unit_norm: bool = False
    target: Target = "classes"
    event: str | None = None
    intervals: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = ()
    label_mean: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    label_std: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    classes: tuple[str, ...] = ()
    column: Annotated[tuple[_Column, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _whole(self) -> _Schema:
        check_target(self.target, self.event, self.intervals)
        if self.target == "classes" and not self.classes:
            raise InputError("classes", [], "there is no class", "List the classes.")
        return self

    def schema_of_table(self) -> TableSchema:
        columns = tuple(column.column(self.missing) for column in self.column)
        return TableSchema(
            self.label,
            self.classes,
            columns,
            missing=self.missing,
            decimal=self.decimal,
            limit=self.limit,
            unit_norm=self.unit_norm,
            target=self.target,
            event=self.event,
            intervals=self.intervals,
            label_mean=self.label_mean,
            label_std=self.label_std,
        )


def check_target(target: Target, event: str | None, intervals: Sequence[float]) -> None:
    """Refuse keys that do not apply to the target."""
    if target not in get_args(Target):
        known = ", ".join(f'"{name}"' for name in get_args(Target))
        raise InputError("target", target, "is not one of the choices", f"Use {known}.")
    if target == "survival" and event is None:
        raise InputError(
            "event", event, "is required for survival", "Give the column that is 1 for an event, else 0."
        )
    for field, given in (("event", event), ("intervals", list(intervals))):
        if given and target != "survival":
            raise InputError(field, given, f'does not apply to target = "{target}"', "Leave it out.")
    numbers = [isinstance(end, (int, float)) and not isinstance(end, bool) for end in intervals]
    ends = list(intervals) if all(numbers) else []
    if len(ends) != len(intervals) or any(b <= a for a, b in itertools.pairwise([0.0, *ends])):
        raise InputError(
            "intervals",
            list(intervals),
            "is not an ascending list of times",
            "Use a list like [30, 90, 365].",
        )


def schema_from_json(content: Mapping[str, Any], path: Path) -> TableSchema:
    """The schema that `TableSchema.to_json` wrote; `path` is for errors."""
    return parse_content(content, _Schema, path).schema_of_table()


def read_schema(path: Path) -> TableSchema:
    """The schema in this TOML file; columns of a table that it does not name are ignored."""
    return read_toml(path, _Schema, missing="Write it with `fedveil deploy schema`.").schema_of_table()


def write_schema(schema: TableSchema, path: Path) -> None:
    """Write a schema as TOML."""
    write_atomically(path, tomli_w.dumps(schema.to_json()).encode())
