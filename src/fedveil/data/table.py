"""Tables of numbers and categories as examples.

Numeric columns are standardised and categories become one-hot columns. The means, deviations and categories
(the `TableSchema`) come from the training split alone, or are given: clients that each prepare their own table
must agree on one schema, and a schema computed from private rows discloses something about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from fedveil.data.columns import (
    FILL_IN,
    ColumnOptions,
    class_of,
    classes_of,
    complete_rows,
    fit_schema,
    strata_of,
    with_schema,
)
from fedveil.data.dataset import Dataset, Examples, check_fraction, refuse_split, stratified_split
from fedveil.data.files import given_file
from fedveil.data.notes import (
    PRIVATE_NOTE,
    Statistics,
    check_statistics,
    person_note,
    statistics_note,
)
from fedveil.data.persons import check_persons, limit_rows, same_person, split_by_person
from fedveil.data.raw_table import (
    RawTable,
    numbers,
    read_table,
    require_present,
)
from fedveil.data.schema import (
    UNKNOWN,
    Column,
    Decimal,
    Missing,
    TableSchema,
    read_schema,
)
from fedveil.data.targets import survival_labels, target_numbers
from fedveil.errors import DataError, InputError
from fedveil.lazy_torch import torch
from fedveil.losses import Target

if TYPE_CHECKING:
    from torch import Tensor

_ROWS_AT_ONCE = 1 << 14


def table_examples(
    schema: TableSchema,
    table: RawTable,
    users: dict[str, int] | None = None,
    *,
    refuse_unknown: bool = False,
) -> Examples:
    """The table's rows as examples.

    Args:
        users: The ids of known users; extended by new ones.
        refuse_unknown: Refuse a category that the schema does not contain; else it becomes zeros.
    """
    if schema.missing == "drop":
        table = complete_rows(table, [column.name for column in schema.columns])
    cells = encode_cells(schema, table, refuse_unknown=refuse_unknown)
    x = _features_of(schema, torch.from_numpy(cells))
    return Examples(x, _labels(schema, table), _users(schema, table, users))


def _features_of(schema: TableSchema, cells: Tensor) -> Tensor:
    from fedveil.data.table_features import TableFeatures

    features = TableFeatures(schema)
    x = torch.empty(len(cells), sum(column.width for column in schema.columns))
    for start in range(0, len(cells), _ROWS_AT_ONCE):
        x[start : start + _ROWS_AT_ONCE] = features(cells[start : start + _ROWS_AT_ONCE])
    return x


def rescaled(dataset: Dataset, schema: TableSchema) -> Dataset:
    """The same rows with the scales and replacements of this schema, for a dataset with its original cells."""
    assert dataset.cells is not None
    train, test = (_features_of(schema, cells) for cells in dataset.cells)
    return replace(
        dataset,
        train=replace(dataset.train, x=train),
        test=replace(dataset.test, x=test),
        mean=schema.mean,
        std=schema.std,
        schema=schema,
        notes=(PRIVATE_NOTE, *dataset.notes[1:]),
        cells=None,
    )


def encode_cells(
    schema: TableSchema, table: RawTable, *, refuse_unknown: bool = False, gaps: str = FILL_IN
) -> npt.NDArray[np.float64]:
    """The cells `[n, columns]` that `TableFeatures` reads; -1 is a category that the schema does not contain.

    Args:
        refuse_unknown: Raise a DataError that names the row and the column of an unknown category instead.
        gaps: The remedy for missing cells.
    """
    needed = [column.name for column in schema.columns if column.fill is None]
    require_present(table, needed, gaps)
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
                f"schema does not have ({len(unknown)} rows). Known: {_shown(column.categories)}.",
                field=column.name,
                value=int(unknown[0]),
            )
    return cells


def unknown_categories(schema: TableSchema, table: RawTable) -> dict[str, int]:
    """The number of rows with a category that the schema does not contain, by column; columns without are left out."""
    columns = [column for column in schema.columns if column.categories is not None]
    counts = {c.name: int((_category_index(table, c) == UNKNOWN).sum()) for c in columns}
    return {name: count for name, count in counts.items() if count}


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
    for row, cell in enumerate(map(class_of, table.texts(schema.label, "label"))):
        if cell not in place:
            raise DataError(
                f"{table.path}: {table.place(row)}, column {schema.label!r} holds a class that the schema does not "
                f"know. Known: {_shown(schema.classes)}. Fix or drop the row.",
                field=schema.label,
                value=row,
            )
        labels.append(place[cell])
    return torch.tensor(labels, dtype=torch.int64)


def _users(schema: TableSchema, table: RawTable, users: dict[str, int] | None) -> Tensor | None:
    if schema.user is None:
        return None
    # Rows without a user would become one client of many persons.
    require_present(table, [schema.user], "Fill them in or drop these rows.")
    ids = {} if users is None else users
    known = {same_person(name): place for name, place in ids.items()}  # spellings of one user are one client
    places = []
    for cell in table.texts(schema.user, "user"):
        user = same_person(cell)
        if user not in known:
            known[user] = ids[cell.strip()] = len(known)
        places.append(known[user])
    return torch.tensor(places, dtype=torch.int64)


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
    statistics_noise: float | None = None,
    schema: TableSchema | str | Path | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """A CSV or Parquet table as a dataset.

    `label` names the column to predict, `user` the one that tells whose row it is; `ColumnOptions` has what can be
    said about the others. Without `test_path` the rows are split here, stratified and fixed by the seed. `person`
    names the column of the people: nobody is then in both splits, or has more than `rows_per_person` training rows.
    `schema` may be the path of a schema file; options that it contradicts are refused. Without it, standardisation uses
    the training split's mean and std (a constant column becomes zeros), which `statistics = "public"` declares to be
    public, and classes are those of the whole table. `statistics = "private"` needs a schema with bounds and
    `statistics_noise`: a run then computes the scales of the bounded columns with Gaussian noise of so many times their
    sensitivity.
    """
    source = given_file("path", path, data_dir)
    check_fraction("test_fraction", test_fraction)
    most = check_persons(person, rows_per_person)
    check_statistics(statistics, statistics_noise, schema is not None)
    said = (categorical, numeric, drop, missing, decimal, limit, unit_norm, target, event, intervals)
    options = ColumnOptions(*said)
    other = None if test_path is None else read_table(given_file("test_path", test_path, data_dir))
    if other is not None:  # the seed also draws the rows of a person
        refuse_split(test_fraction, 0 if most else seed, "the test rows are those of test_path")
    table = read_table(source)
    options.check(table)
    if schema is None:  # count missing values before the rows are split
        classes_of([table], label, options)
        if missing == "refuse":
            not_features = (label, user, person, event, *drop)
            require_present(table, [n for n in table.columns if n not in not_features], FILL_IN)
    given = schema is not None
    if isinstance(schema, (str, Path)):
        schema = read_schema(given_file("schema", schema, data_dir))
    if schema is not None:
        options = with_schema(options, label, schema)
    train, test = _split(table, other, strata_of(label, options), person, test_fraction, seed)
    if person is not None and most is not None:
        train = limit_rows(train, person, most, seed)
    if schema is None:
        classes = classes_of([train, test], label, options)
        schema = fit_schema(train, label=label, classes=classes, user=user, person=person, options=options)
    notes = (statistics_note(given, statistics), person_note(person, most))
    schema = replace(schema, user=user, person=person)
    made = replace(_dataset(source, schema, train, test, given=given), notes=notes, rows_per_person=most)
    return replace(made, cells=_kept_cells(schema, train, test)) if statistics == "private" else made


def _kept_cells(schema: TableSchema, train: RawTable, test: RawTable) -> tuple[Tensor, Tensor]:
    """The cells from which scales of bounded columns are computed after the partition."""
    if not any(column.bounds for column in schema.columns):
        remedy = "Give low and high of the columns in the schema, or leave statistics out."
        raise InputError("statistics", "private", "no column of the schema has bounds", remedy)
    if schema.missing == "drop":
        names = [column.name for column in schema.columns]
        train, test = complete_rows(train, names), complete_rows(test, names)
    kept, held = (torch.from_numpy(encode_cells(schema, table)) for table in (train, test))
    return kept, held


def _dataset(source: Path, schema: TableSchema, train: RawTable, test: RawTable, *, given: bool) -> Dataset:
    users: dict[str, int] = {}
    # A schema made of the training rows cannot have every category of the others.
    examples, test_examples = (
        table_examples(schema, table, users, refuse_unknown=given) for table in (train, test)
    )
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
    """The training rows and the test rows, stratified by the column `strata`."""
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
