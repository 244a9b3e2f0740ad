"""Tables of numbers and categories as examples.

Numeric columns are standardised and categories become one-hot columns. The means, deviations and categories
(the `TableSchema`) come from the training split alone, or are given: clients that each prepare their own table
must agree on one schema, and a schema computed from private rows discloses something about them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from fedveil.data.dataset import Dataset, Examples, check_fraction, stratified_split
from fedveil.data.files import given_file
from fedveil.data.notes import Statistics, person_note, statistics_note
from fedveil.data.persons import check_persons, limit_rows, split_by_person
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
    UNKNOWN,
    Column,
    Decimal,
    Missing,
    TableSchema,
    check_target,
    read_schema,
)
from fedveil.data.targets import survival_labels, target_numbers
from fedveil.errors import DataError, InputError
from fedveil.lazy_torch import torch
from fedveil.losses import Target

if TYPE_CHECKING:
    from torch import Tensor

_MOST_CATEGORIES = 1000
_ROWS_AT_ONCE = 1 << 14
_FILL_IN = 'Fill them in, drop the columns, or set missing = "drop", "median" or "category".'


@dataclass(frozen=True)
class ColumnOptions:
    """What the user says about columns.

    Attributes:
        categorical: Columns that are categories even if they look like numbers or identifiers.
        numeric: Columns that are measurements even if they look like identifiers.
        drop: Columns that are left out.
        missing: "refuse" missing cells, "drop" their rows, take the "median" (of categories the most frequent), or make
            them a "category" of their own (of numbers, a feature that says so).
        decimal: The decimal mark.
        limit: Where standardised numbers are cut off; None: nowhere.
        unit_norm: Scale the features of every row to length 1.
        target: What is predicted: "classes", a "number", or "survival" (the label is a time).
        event: For survival, the column that is 1 where the time is that of an event, 0 where it is censored.
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
        """Refuse columns that the table does not have, and choices that there are not."""
        check_target(self.target, self.event, self.intervals)
        if self.event is not None:
            table.column(self.event, "event")
        for field in ("categorical", "numeric", "drop"):
            names = getattr(self, field)
            if isinstance(names, str) or not isinstance(names, Sequence):
                raise InputError(field, names, "not a list of columns", "Give a list of column names.")
            for name in names:
                table.column(name, field)
        for field, choices in (("missing", Missing), ("decimal", Decimal)):
            if getattr(self, field) not in get_args(choices):
                known = ", ".join(f'"{choice}"' for choice in get_args(choices))
                raise InputError(field, getattr(self, field), "is none of the choices", f"Use {known}.")
        if self.limit is not None and not (isinstance(self.limit, (int, float)) and self.limit > 0):
            raise InputError("limit", self.limit, "is no positive number", "Use one such as 3.")
        if not isinstance(self.unit_norm, bool):
            raise InputError("unit_norm", self.unit_norm, "is neither true nor false", "Use true or false.")


def table_examples(schema: TableSchema, table: RawTable, users: dict[str, int] | None = None) -> Examples:
    """The table's rows as examples. A category that the schema does not know gives zeros in its place.

    `users` gives the users seen so far their ids, and is extended by new ones.
    """
    from fedveil.data.table_features import TableFeatures

    if schema.missing == "drop":
        table = complete_rows(table, [column.name for column in schema.columns])
    cells = torch.from_numpy(encode_cells(schema, table))
    features = TableFeatures(schema)
    x = torch.empty(len(cells), sum(column.width for column in schema.columns))
    for start in range(0, len(cells), _ROWS_AT_ONCE):
        x[start : start + _ROWS_AT_ONCE] = features(cells[start : start + _ROWS_AT_ONCE])
    return Examples(x, _labels(schema, table), _users(schema, table, users))


def encode_cells(
    schema: TableSchema, table: RawTable, *, refuse_unknown: bool = False
) -> npt.NDArray[np.float64]:
    """The cells `[n, columns]` that `TableFeatures` reads; -1 stands for a category that the schema does not know.

    Args:
        refuse_unknown: Raise a DataError that names the row and the column of an unknown category instead.
    """
    require_present(table, [c.name for c in schema.columns if c.fill is None], _FILL_IN)
    cells = np.empty((len(table), len(schema.columns)))
    for k, column in enumerate(schema.columns):
        if column.categories is None:
            cells[:, k] = numbers(table, column.name, schema.decimal)
            continue
        cells[:, k] = _category_index(table, column)
        unknown = np.flatnonzero(cells[:, k] == UNKNOWN)
        if refuse_unknown and len(unknown):
            raise DataError(
                f"{table.path}: {table.place(int(unknown[0]))}, column {column.name!r} holds a category that the "
                f"model was not trained with ({len(unknown)} rows). Known: {_shown(column.categories)}."
            )
    return cells


def _category_index(table: RawTable, column: Column) -> npt.NDArray[np.float64]:
    assert column.categories is not None
    place = {category: float(index) for index, category in enumerate(column.categories)}
    if column.reference is not None:
        place[column.reference] = float(len(column.categories))
    encoded = pc.dictionary_encode(table.column(column.name, "feature"))
    known = np.array([place.get(cell, UNKNOWN) for cell in encoded.dictionary.to_pylist()])
    found: npt.NDArray[np.float64] = known[np.asarray(encoded.indices)]
    if column.fill is not None:
        found[table.missing(column.name)] = np.nan
    return found


def complete_rows(table: RawTable, names: Sequence[str]) -> RawTable:
    """The rows that have a value in each of these columns."""
    gone = np.zeros(len(table), dtype=bool)
    for name in names:
        gone |= table.missing(name)
    if not gone.any():
        return table
    if gone.all():
        raise DataError(f'{table.path}: every row misses a value, so missing = "drop" leaves none.')
    return table.take(np.flatnonzero(~gone))


def _shown(names: Sequence[str], most: int = 10) -> str:
    listed = ", ".join(map(repr, names[:most]))
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"


def _labels(schema: TableSchema, table: RawTable) -> Tensor:
    if schema.target == "number":
        values = target_numbers(schema.label, table, schema.decimal)
        return torch.from_numpy(((values - schema.label_mean) / schema.label_std).astype(np.float32))
    if schema.target == "survival":
        return survival_labels(schema, table)
    place = {name: k for k, name in enumerate(schema.classes)}
    labels: list[int] = []
    for row, cell in enumerate(map(_label, table.texts(schema.label, "label"))):
        if cell not in place:
            raise DataError(f"{table.path}: {table.place(row)} has a label that is not one of the classes.")
        labels.append(place[cell])
    return torch.tensor(labels, dtype=torch.int64)


def _users(schema: TableSchema, table: RawTable, users: dict[str, int] | None) -> Tensor | None:
    if schema.user is None:
        return None
    # Rows of nobody would be one client of many people.
    require_present(table, [schema.user], "Fill them in or drop these rows.")
    ids = {} if users is None else users
    cells = table.texts(schema.user, "user")
    return torch.tensor([ids.setdefault(cell, len(ids)) for cell in cells], dtype=torch.int64)


def load_table(
    *,
    path: str | Path,
    label: str,
    data_dir: Path | None = None,
    test_path: str | Path | None = None,
    user: str | None = None,
    person: str | None = None,
    rows_per_person: int | None = None,
    categorical: Sequence[str] = (),
    numeric: Sequence[str] = (),
    drop: Sequence[str] = (),
    missing: Missing = "refuse",
    decimal: Decimal = ".",
    limit: float | None = None,
    unit_norm: bool = False,
    target: Target = "classes",
    event: str | None = None,
    intervals: Sequence[float] = (),
    statistics: Statistics = "rows",
    schema: TableSchema | str | Path | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """A CSV or Parquet table as a dataset.

    `label` names the column to predict, `user` the one that tells whose row it is; `ColumnOptions` has what can be
    said about the others. Without `test_path` the rows are split here, stratified and fixed by the seed. `person`
    names the column of the people: nobody is then in both splits, or has more than `rows_per_person` training rows.
    `schema` may be the path of a schema file. Without it, standardisation uses the training split's mean and std (a
    constant column becomes zeros), which `statistics = "public"` declares to be public, and classes are those of
    the whole table.
    """
    source = given_file("path", path, data_dir)
    check_fraction("test_fraction", test_fraction)
    most = check_persons(person, rows_per_person)
    if statistics not in get_args(Statistics):
        raise InputError("statistics", statistics, "is none of the choices", 'Use "rows" or "public".')
    said = (categorical, numeric, drop, missing, decimal, limit, unit_norm, target, event, intervals)
    options = ColumnOptions(*said)
    other = None if test_path is None else read_table(given_file("test_path", test_path, data_dir))
    table = read_table(source)
    options.check(table)
    if schema is None:  # missing values are counted before the rows are split
        classes_of([table], label, options)
        if missing == "refuse":
            not_features = (label, user, person, event, *drop)
            require_present(table, [n for n in table.columns if n not in not_features], _FILL_IN)
    train, test = _split(table, other, strata_of(label, options), person, test_fraction, seed)
    if person is not None and most is not None:
        train = limit_rows(train, person, most, seed)
    given = schema is not None
    if isinstance(schema, (str, Path)):
        schema = read_schema(given_file("schema", schema, data_dir))
    if schema is None:
        classes = classes_of([train, test], label, options)
        schema = fit_schema(train, label=label, classes=classes, user=user, person=person, options=options)
    notes = (statistics_note(given, statistics), person_note(person, most))
    made = _dataset(source, replace(schema, user=user, person=person), train, test)
    return replace(made, notes=notes, rows_per_person=most)


def _dataset(source: Path, schema: TableSchema, train: RawTable, test: RawTable) -> Dataset:
    users: dict[str, int] = {}
    examples, test_examples = table_examples(schema, train, users), table_examples(schema, test, users)
    left_out = len(train) + len(test) - len(examples) - len(test_examples)
    summary = f"{source.name}: {len(examples)} training rows, {examples.x.shape[1]} features"
    return Dataset(
        f"table:{source.stem}",
        examples,
        test_examples,
        schema.classes,
        schema.mean,
        schema.std,
        summary + (f", {left_out} rows with missing values left out" if left_out else ""),
        user_names=tuple(users),
        schema=schema,
    )


def _split(
    table: RawTable,
    test: RawTable | None,
    strata: str | None,
    person: str | None,
    test_fraction: float,
    seed: int,
) -> tuple[RawTable, RawTable]:
    """The training rows and the test rows; values of the column `strata` are in both in the same proportion."""
    if test is not None:
        return table, test
    y = np.zeros(len(table), dtype=np.int64)
    if strata is not None:
        y = np.unique(np.array(table.texts(strata, "label")), return_inverse=True)[1]
    if person is not None:
        kept, held = split_by_person(table, person, y, test_fraction, seed)
    else:
        kept, held = stratified_split(y, test_fraction, seed, "table")
    return table.take(kept), table.take(held)


def schema_of(path: Path, label: str, options: ColumnOptions | None = None) -> TableSchema:
    """The schema that standardises the rows of this table, to be sent to others.

    Values of a column that looks like an identifier are never in it, even if the column is said to be a category.
    """
    table = read_table(path)
    said = options or ColumnOptions()
    made = fit_schema(table, label=label, classes=classes_of([table], label, said), options=said)
    for column in made.columns:
        if column.categories is None:
            continue
        values, words = parse_numbers(table, column.name, said.decimal)
        if problem := suspicion(table, column.name, values, len(words) > 0):
            raise DataError(f"{table.path}: column {column.name!r} {problem} A schema is sent to others.")
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

    Columns that look like identifiers, dates or free text are refused unless `options` says what they are.
    """
    said = options or ColumnOptions()
    said.check(table)
    roles = ((label, "label"), (user, "user"), (person, "person"), (said.event, "event"))
    for name, role in roles:
        if name is not None:
            table.column(name, role)
    names = [name for name in table.columns if name not in (label, user, person, said.event, *said.drop)]
    if not names:
        raise DataError(f"{table.path}: beside the label there is no column to learn from.")
    if said.missing == "refuse":
        require_present(table, names, _FILL_IN)
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
    problem = None if name in options.numeric else suspicion(table, name, values, len(words) > 0)
    if problem is not None:
        raise DataError(f"{table.path}: column {name!r} {problem}")
    if len(words) and (name in options.numeric or 2 * len(words) < len(table)):
        raise DataError(
            f"{table.path}: {table.place(int(words[0]))}, column {name!r} is not a number, and most of the column "
            f"is. Fix it or drop the row; codes such as 3A go into categorical = [{name!r}]."
        )
    if len(words):
        return _fit_categories(table, name, options.missing)
    return _fit_numbers(table, name, options)


def _fit_categories(table: RawTable, name: str, missing: Missing) -> Column:
    gone = table.missing(name)
    counts = pc.value_counts(table.column(name, "feature").filter(~gone)).to_pylist()
    categories = tuple(sorted(entry["values"] for entry in counts))
    if len(categories) > _MOST_CATEGORIES:
        raise DataError(
            f"{table.path}: column {name!r} has {len(categories)} different entries, too many to "
            "be a category. Drop it or make it a number."
        )
    if not categories:
        raise DataError(f"{table.path}: column {name!r} has no value at all. Drop it.")
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
        raise DataError(f"{table.path}: column {name!r} holds numbers too large to standardise.")
    column = Column(name, None, mean, std if std > 0 else 1.0)
    if options.missing == "median":
        return replace(column, fill=float(np.median(present)))
    if options.missing == "category" and gone.any():
        return replace(column, fill=mean, indicator=True)
    return column


def strata_of(label: str, options: ColumnOptions) -> str | None:
    """The column by which rows are split alike: the classes, or whether there was an event."""
    return {"classes": label, "survival": options.event, "number": None}[options.target]


def classes_of(tables: Sequence[RawTable], label: str, options: ColumnOptions) -> tuple[str, ...]:
    """The classes in these tables; none where numbers or times are predicted."""
    if options.target == "classes":
        return class_names(tables, label)
    for table in tables:
        for name in (label, options.event):
            if name is not None:
                target_numbers(name, table, options.decimal)
    return ()


def class_names(tables: Sequence[RawTable], label: str) -> tuple[str, ...]:
    """The labels in these tables in rising order: as numbers if all are whole numbers, else as names."""
    found: set[str] = set()
    for table in tables:
        found.update(map(_label, table.labels(label)))
    if len(found) == 1:
        raise DataError(
            f"{tables[0].path}: every row has the label {next(iter(found))!r} in column {label!r}. "
            "Name another column, or add rows of other classes."
        )
    numeric = [cell for cell in found if _is_number(cell)]
    if len(numeric) == len(found):
        for cell in numeric:
            if not cell.strip().removeprefix("-").isdigit():
                raise DataError(
                    f"{tables[0].path}: label {cell!r} is not a whole number. Use whole numbers or names."
                )
        return tuple(sorted(found, key=int))
    return tuple(sorted(found))


def _label(cell: str) -> str:
    """The cell, without the decimals that other tools write behind whole numbers: 1.0 and 1 are one class."""
    whole, point, decimals = cell.strip().partition(".")
    written_out = point and decimals and not decimals.strip("0") and whole.removeprefix("-").isdigit()
    return whole if written_out else cell


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
