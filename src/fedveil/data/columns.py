"""The columns of a table: the user's options, and the schema derived from the rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from fedveil.data.raw_table import (
    RawTable,
    numbers,
    parse_numbers,
    read_table,
    require_present,
    suspicion,
)
from fedveil.data.schema import (
    MISSING_CATEGORY,
    Column,
    Decimal,
    Missing,
    TableSchema,
    check_target,
)
from fedveil.data.targets import target_numbers
from fedveil.errors import DataError, InputError
from fedveil.losses import Target

_MOST_CATEGORIES = 1000
_FEW = 20  # classes; a schema may name so many whatever the number of rows
FILL_IN = 'Fill them in, drop the columns, or set missing = "drop", "median" or "category".'
TRAIN_WITH_GAPS = 'Fill them in, or use a model that was trained with missing = "median" or "category".'


@dataclass(frozen=True)
class ColumnOptions:
    """The user's options for columns.

    Attributes:
        categorical: Columns that are categories even if they look like numbers or identifiers.
        numeric: Columns that are measurements even if they look like identifiers.
        drop: Columns that are left out.
        missing: "refuse" missing cells, "drop" their rows, replace them by the "median" (for categories the most
            frequent), or make them a separate "category" (for numbers, an indicator feature).
        decimal: The decimal mark.
        limit: The bound to which standardised numbers are clipped; None: not clipped.
        unit_norm: Scale the features of every row to length 1.
        target: The kind of label: "classes", a "number", or "survival" (a time).
        event: For survival, the column that is 1 if the time is that of an event, 0 if it is censored.
        intervals: For survival, the ends of the intervals of discrete-time hazards; without them Cox's loss is used.
    """

    categorical: Sequence[str] = ()
    numeric: Sequence[str] = ()
    drop: Sequence[str] = ()
    missing: Missing = "refuse"
    decimal: Decimal = "."
    limit: float | None = None
    unit_norm: bool = False
    target: Target = "classes"
    event: str | None = None
    intervals: Sequence[float] = ()

    def check(self, table: RawTable) -> None:
        """Refuse columns that the table does not have, and unknown choices."""
        check_target(self.target, self.event, self.intervals)
        if self.event is not None:
            table.column(self.event, "event")
        for field in ("categorical", "numeric", "drop"):
            names = getattr(self, field)
            if isinstance(names, str) or not isinstance(names, Sequence):
                raise InputError(field, names, "is not a list of columns", "Give a list of column names.")
            for name in names:
                table.column(name, field)
        for field, choices in (("missing", Missing), ("decimal", Decimal)):
            if getattr(self, field) not in get_args(choices):
                known = ", ".join(f'"{choice}"' for choice in get_args(choices))
                raise InputError(field, getattr(self, field), "is not one of the choices", f"Use {known}.")
        if self.limit is not None and not (isinstance(self.limit, (int, float)) and self.limit > 0):
            raise InputError("limit", self.limit, "is not a positive number", "Use a number such as 3.")
        if not isinstance(self.unit_norm, bool):
            raise InputError("unit_norm", self.unit_norm, "is neither true nor false", "Use true or false.")


def complete_rows(table: RawTable, names: Sequence[str]) -> RawTable:
    """The rows that have a value in each of these columns."""
    gone = np.zeros(len(table), dtype=bool)
    for name in names:
        gone |= table.missing(name)
    if not gone.any():
        return table
    if gone.all():
        counts = {name: int(table.missing(name).sum()) for name in names}
        worst = max(counts, key=lambda name: counts[name])
        raise DataError(
            f'{table.path}: every row has a missing value, so missing = "drop" leaves none. Column {worst!r} lacks '
            f"{counts[worst]} of {len(table)}: name it in drop = [{worst!r}], or use another choice.",
            field="missing",
            value="drop",
        )
    return table.take(np.flatnonzero(~gone))


def schema_of(path: Path, label: str, options: ColumnOptions | None = None) -> TableSchema:
    """The schema that standardises the rows of this table, to be shared with others.

    Values of a column that looks like an identifier are never in it, even if the column is declared a category.
    """
    table = read_table(path)
    said = options or ColumnOptions()
    classes = classes_of([table], label, said)
    if len(classes) > _FEW and 2 * len(classes) > len(table):
        raise DataError(
            f"{table.path}: column {label!r} has {len(classes)} classes in {len(table)} rows, so a class would tell "
            'whose row it is. Name another label, or set target = "number". A schema is sent to others.',
            field=label,
            value=len(classes),
        )
    made = fit_schema(table, label=label, classes=classes, options=said)
    for column in made.columns:
        if column.categories is None:
            continue
        values, words = parse_numbers(table, column.name, said.decimal)
        if problem := suspicion(table, column.name, values, len(words)):
            raise DataError(
                f"{table.path}: column {column.name!r} {problem} A schema is shared with others.",
                field=column.name,
            )
    return made


def fit_schema(
    table: RawTable,
    *,
    label: str,
    classes: tuple[str, ...],
    user: str | None = None,
    person: str | None = None,
    options: ColumnOptions | None = None,
) -> TableSchema:
    """The schema that standardises this table: mean 0 and std 1 in every numeric column that varies.

    Columns that look like identifiers, dates or free text are refused unless `options` declares their kind.
    """
    said = options or ColumnOptions()
    said.check(table)
    roles = ((label, "label"), (user, "user"), (person, "person"), (said.event, "event"))
    for name, role in roles:
        if name is not None:
            table.column(name, role)
    names = [name for name in table.columns if name not in (label, user, person, said.event, *said.drop)]
    if not names:
        raise DataError(
            f"{table.path}: there is no feature column besides the label. Add one.", field="columns"
        )
    if said.missing == "refuse":
        require_present(table, names, FILL_IN)
    if said.missing == "drop":
        table = complete_rows(table, names)
    columns = tuple(_fit_column(table, name, said) for name in names)
    number = said.target == "number"
    mean, std = _scale_of_numbers(target_numbers(label, table, said.decimal)) if number else (0.0, 1.0)
    return TableSchema(
        label,
        classes,
        columns,
        user,
        person,
        said.missing,
        said.decimal,
        said.limit,
        said.unit_norm,
        said.target,
        said.event,
        tuple(said.intervals),
        mean,
        std,
    )


def _scale_of_numbers(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    mean, std = float(values.mean()), float(values.std())
    return mean, std if std > 0 else 1.0


def _fit_column(table: RawTable, name: str, options: ColumnOptions) -> Column:
    if name in options.categorical:
        return _fit_categories(table, name, options.missing)
    values, words = parse_numbers(table, name, options.decimal)
    problem = None if name in options.numeric else suspicion(table, name, values, len(words))
    if problem is not None:
        raise DataError(f"{table.path}: column {name!r} {problem}", field=name)
    if len(words) and (name in options.numeric or 2 * len(words) < len(table)):
        raise DataError(
            f"{table.path}: {table.place(int(words[0]))}, column {name!r} is not a number, and most of the column "
            f"is. Fix it or drop the row; for codes such as 3A set categorical = [{name!r}].",
            field=name,
            value=int(words[0]),
        )
    if len(words):
        column = _fit_categories(table, name, options.missing)
        if _alike(column.categories or ()):
            raise DataError(
                f"{table.path}: column {name!r} has categories that differ in upper and lower case only. Write them "
                f"alike, or name the column in categorical = [{name!r}].",
                field=name,
            )
        return column
    return _fit_numbers(table, name, options)


def _fit_categories(table: RawTable, name: str, missing: Missing) -> Column:
    gone = table.missing(name)
    counts = pc.value_counts(table.column(name, "feature").filter(~gone)).to_pylist()
    categories = tuple(sorted(entry["values"] for entry in counts))
    if len(categories) > _MOST_CATEGORIES:
        raise DataError(
            f"{table.path}: column {name!r} has {len(categories)} different entries, too many to "
            "be a category. Drop it or make it a number.",
            field=name,
            value=len(categories),
        )
    if not categories:
        raise DataError(f"{table.path}: column {name!r} has no values. Drop it.", field=name)
    if missing == "category" and gone.any():
        return Column(name, (*categories, MISSING_CATEGORY), fill=float(len(categories)))
    if missing == "median":
        frequent = min(counts, key=lambda entry: (-entry["counts"], entry["values"]))["values"]
        return Column(name, categories, fill=float(categories.index(frequent)))
    return Column(name, categories)


def _fit_numbers(table: RawTable, name: str, options: ColumnOptions) -> Column:
    values = numbers(table, name, options.decimal)
    gone = np.isnan(values)
    present = values[~gone] if gone.any() else values
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = float(present.mean()), float(present.std())
    if not (math.isfinite(mean) and math.isfinite(std)):
        raise DataError(
            f"{table.path}: column {name!r} has numbers too large to standardise. Rescale or drop it.",
            field=name,
        )
    column = Column(name, None, mean, std if std > 0 else 1.0)
    if options.missing == "median":
        return replace(column, fill=float(np.median(present)))
    if options.missing == "category" and gone.any():
        return replace(column, fill=mean, indicator=True)
    return column


def with_schema(said: ColumnOptions, label: str, schema: TableSchema) -> ColumnOptions:
    """The options with the target of a given schema; refuses options that the schema contradicts and so ignores."""
    remedy = "Change the schema, or leave it out."
    if label != schema.label:
        raise InputError("label", label, f"the label of the schema is {schema.label!r}", "Name that column.")
    usual = ColumnOptions()
    for field in ("missing", "decimal", "limit", "unit_norm", "target", "event", "intervals"):
        given, own, default = (getattr(one, field) for one in (said, schema, usual))
        given = tuple(given) if field == "intervals" else given
        if given not in (own, default):
            raise InputError(field, given, f"the schema has {own!r}", remedy)
    categories = {column.name: column.categories is not None for column in schema.columns}
    against = {
        "categorical": [name for name in said.categorical if categories.get(name) is False],
        "numeric": [name for name in said.numeric if categories.get(name) is True],
        "drop": [name for name in said.drop if name in categories],
    }
    for field, names in against.items():
        if names:
            raise InputError(field, names[0], "the schema reads this column in another way", remedy)
    return replace(said, target=schema.target, event=schema.event, intervals=schema.intervals)


def strata_of(label: str, options: ColumnOptions) -> str | None:
    """The column for stratified splits: the classes, or the event indicator; None for numbers."""
    return {"classes": label, "survival": options.event, "number": None}[options.target]


def classes_of(tables: Sequence[RawTable], label: str, options: ColumnOptions) -> tuple[str, ...]:
    """The classes in these tables; none for regression and survival."""
    if options.target == "classes":
        return class_names(tables, label)
    events = False
    for table in tables:
        target_numbers(label, table, options.decimal)
        if options.event is not None:
            events |= bool((target_numbers(options.event, table, options.decimal) == 1).any())
    if options.event is not None and not events:
        problem = f"column {options.event!r} is 1 in no row, so there is no event to learn from"
        raise DataError(
            f"{tables[0].path}: {problem}. Name another column, or add rows.", field=options.event, value=0
        )
    return ()


def class_names(tables: Sequence[RawTable], label: str) -> tuple[str, ...]:
    """The labels in these tables in ascending order: as numbers if all are integers, else as names."""
    found: set[str] = set()
    for table in tables:
        found.update(map(class_of, table.labels(label)))
    if len(found) == 1:
        raise DataError(
            f"{tables[0].path}: every row has the label {next(iter(found))!r} in column {label!r}. "
            "Give another column, or add rows of other classes.",
            field=label,
        )
    if alike := sorted(_alike(sorted(found)), key=str.casefold):
        raise DataError(
            f"{tables[0].path}: classes {alike[0]!r} and {alike[1]!r} of column {label!r} differ in upper and lower "
            "case only. Write them alike, or rename one.",
            field=label,
            value=alike[0],
        )
    numeric = [cell for cell in found if _is_number(cell)]
    if len(numeric) == len(found):
        for cell in numeric:
            if not cell.strip().removeprefix("-").isdigit():
                raise DataError(
                    f"{tables[0].path}: label {cell!r} in column {label!r} is not a whole number. Use whole numbers "
                    'or names, or set target = "number".',
                    field=label,
                    value=cell,
                )
        return tuple(sorted(found, key=int))
    return tuple(sorted(found))


def _alike(names: Sequence[str]) -> list[str]:
    """Names that differ from another in upper and lower case only."""
    counts = Counter(name.casefold() for name in names)
    return [name for name in names if counts[name.casefold()] > 1]


def class_of(cell: str) -> str:
    """The class of a cell, without trailing decimals of integers: 1.0 and 1 are the same class."""
    whole, point, decimals = cell.strip().partition(".")
    written_out = point and decimals and not decimals.strip("0") and whole.removeprefix("-").isdigit()
    return whole if written_out else cell


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
