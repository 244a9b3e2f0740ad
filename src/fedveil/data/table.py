"""Tables of numbers and categories: CSV with a header line, or Parquet.

Numeric columns are standardised and categories become one-hot columns. The means, deviations and categories
(the `TableSchema`) come from the training split alone, or are given: clients that each prepare their own table
must agree on one schema, and a schema computed from private rows discloses something about them.
"""

from __future__ import annotations

import csv
import importlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedveil.data.dataset import Dataset, Examples, check_fraction, stratified_split
from fedveil.data.files import given_file, read_text
from fedveil.data.schema import UNKNOWN, Column, TableFeatures, TableSchema, read_schema
from fedveil.errors import DataError, InputError, install

_MOST_CATEGORIES = 1000


@dataclass(frozen=True)
class RawTable:
    """Columns of cells as text, all of the same length.

    `places` says where in the user's files each row stands, for rows that were picked or put together.
    """

    path: Path
    columns: dict[str, list[str]]
    places: tuple[str, ...] | None = None

    def place(self, index: int) -> str:
        """The row at this index in the user's words; row 1 is the first below the header."""
        return f"row {index + 1}" if self.places is None else self.places[index]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def column(self, name: str, role: str) -> list[str]:
        if not isinstance(name, str) or name not in self.columns:
            have = ", ".join(self.columns)
            only = next(iter(self.columns)) if len(self.columns) == 1 else ""
            other = next((mark for mark in ";\t|" if mark in only), None)
            remedy = "" if other is None else f" Its cells are separated by {other!r}: save it with commas."
            raise DataError(
                f"{self.path}: there is no column {name!r} for the {role}. It has: {have}.{remedy}"
            )
        return self.columns[name]


def table_examples(schema: TableSchema, table: RawTable, users: dict[str, int] | None = None) -> Examples:
    """The table's rows as examples. A category that the schema does not know gives zeros in its place.

    `users` gives the users seen so far their ids, and is extended by new ones.
    """
    x = TableFeatures(schema)(torch.from_numpy(encode_cells(schema, table)))
    return Examples(x, _labels(schema, table), _users(schema, table, users))


def encode_cells(schema: TableSchema, table: RawTable, *, refuse_unknown: bool = False) -> np.ndarray:
    """The cells `[n, columns]` that `TableFeatures` reads; -1 stands for a category that the schema does not know.

    Args:
        refuse_unknown: Raise a DataError that names the row and the column of an unknown category instead.
    """
    cells = np.empty((len(table), len(schema.columns)))
    for k, column in enumerate(schema.columns):
        found = table.column(column.name, "feature")
        if column.categories is None:
            cells[:, k] = numbers(table, column.name)
            continue
        _require_cells(table, column.name)
        place = {category: float(index) for index, category in enumerate(column.categories)}
        cells[:, k] = [place.get(cell, UNKNOWN) for cell in found]
        unknown = np.flatnonzero(cells[:, k] == UNKNOWN)
        if refuse_unknown and len(unknown):
            raise DataError(
                f"{table.path}: {table.place(int(unknown[0]))}, column {column.name!r} holds a category that the "
                f"model was not trained with ({len(unknown)} rows). Known: {_shown(column.categories)}."
            )
    return cells


def _shown(names: Sequence[str], most: int = 10) -> str:
    listed = ", ".join(map(repr, names[:most]))
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"


def _labels(schema: TableSchema, table: RawTable) -> Tensor:
    place = {name: k for k, name in enumerate(schema.classes)}
    labels: list[int] = []
    for row, cell in enumerate(map(_label, table.column(schema.label, "label"))):
        if cell not in place:
            raise DataError(f"{table.path}: {table.place(row)} has a label that is not one of the classes.")
        labels.append(place[cell])
    return torch.tensor(labels, dtype=torch.int64)


def _users(schema: TableSchema, table: RawTable, users: dict[str, int] | None) -> Tensor | None:
    if schema.user is None:
        return None
    cells = table.column(schema.user, "user")
    _require_cells(table, schema.user)  # rows of nobody would be one client of many people
    ids = {} if users is None else users
    return torch.tensor([ids.setdefault(cell, len(ids)) for cell in cells], dtype=torch.int64)


def load_table(
    *,
    path: str | Path,
    label: str,
    data_dir: Path | None = None,
    test_path: str | Path | None = None,
    user: str | None = None,
    categorical: Sequence[str] = (),
    drop: Sequence[str] = (),
    schema: TableSchema | str | Path | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """A CSV or Parquet table as a dataset.

    `label` names the column to predict, `user` the one that tells whose row it is; `categorical` columns are
    one-hot even if they look like numbers. Without `test_path` the rows are split here, stratified and fixed
    by the seed. `schema` may be the path of a schema file. Without it, standardisation uses the training
    split's mean and std (a constant column becomes zeros) and classes are those of the whole table.
    """
    source = given_file("path", path, data_dir)
    check_fraction("test_fraction", test_fraction)
    table = read_table(source)
    if test_path is not None:
        train_table, test_table = table, read_table(given_file("test_path", test_path, data_dir))
    else:
        y = np.unique(np.array(table.column(label, "label")), return_inverse=True)[1]
        train, test = stratified_split(y, test_fraction, seed, "table")
        train_table, test_table = rows_of(table, train), rows_of(table, test)
    if isinstance(schema, (str, Path)):
        schema = replace(read_schema(given_file("schema", schema, data_dir)), user=user)
    if schema is None:
        schema = fit_schema(
            train_table,
            label=label,
            user=user,
            categorical=categorical,
            drop=drop,
            classes=class_names([train_table, test_table], label),
        )
    users: dict[str, int] = {}
    examples = table_examples(schema, train_table, users)
    summary = f"{source.name}: {len(examples)} training rows, {examples.x.shape[1]} features"
    test_examples = table_examples(schema, test_table, users)
    return Dataset(
        f"table:{source.stem}",
        examples,
        test_examples,
        schema.classes,
        schema.mean,
        schema.std,
        summary,
        user_names=tuple(users),
        schema=schema,
    )


def schema_of(
    path: Path, label: str, *, categorical: Sequence[str] = (), drop: Sequence[str] = ()
) -> TableSchema:
    """The schema that standardises the rows of this table."""
    table = read_table(path)
    classes = class_names([table], label)
    return fit_schema(table, label=label, classes=classes, categorical=categorical, drop=drop)


def fit_schema(
    table: RawTable,
    *,
    label: str,
    classes: tuple[str, ...],
    user: str | None = None,
    categorical: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> TableSchema:
    """The schema that standardises this table: mean 0 and std 1 in every numeric column that varies."""
    for field, names in (("categorical", categorical), ("drop", drop)):
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise InputError(field, names, "not a list of columns", "Give a list of column names.")
        for name in names:
            table.column(name, field)
    table.column(label, "label")
    if user is not None:
        table.column(user, "user")
    columns: list[Column] = []
    for name, cells in table.columns.items():
        if name in (label, user) or name in drop:
            continue
        words = [row for row, cell in enumerate(cells) if cell.strip() and not _is_number(cell)]
        if name in categorical or words:
            _require_cells(table, name)
            if name not in categorical and 2 * len(words) < len(cells):
                raise DataError(
                    f"{table.path}: {table.place(words[0])}, column {name!r} is not a number, and most of the column "
                    f"is. Mend it or drop the row; codes such as 3A go into categorical = [{name!r}]."
                )
            categories = tuple(sorted(set(cells)))
            if len(categories) > _MOST_CATEGORIES:
                raise DataError(
                    f"{table.path}: column {name!r} has {len(categories)} different entries, too many to "
                    "be a category. Drop it or make it a number."
                )
            columns.append(Column(name, categories))
            continue
        values = numbers(table, name)
        with np.errstate(over="ignore", invalid="ignore"):
            mean, std = float(values.mean()), float(values.std())
        if not (math.isfinite(mean) and math.isfinite(std)):
            raise DataError(f"{table.path}: column {name!r} holds numbers too large to standardise.")
        columns.append(Column(name, None, mean, std if std > 0 else 1.0))
    if not columns:
        raise DataError(f"{table.path}: beside the label there is no column to learn from.")
    return TableSchema(label, classes, tuple(columns), user)


def class_names(tables: Sequence[RawTable], label: str) -> tuple[str, ...]:
    """The labels in these tables in rising order: as numbers if all are whole numbers, else as names."""
    found: set[str] = set()
    for table in tables:
        _require_cells(table, label)
        found.update(map(_label, table.column(label, "label")))
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


def read_table(path: Path) -> RawTable:
    """A table as text cells: Parquet for `.parquet`, CSV otherwise (`.gz` and `.xz` are opened)."""
    table = _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_csv(path)
    if not table.columns or len(table) == 0:
        raise DataError(f"{path}: there are no rows in it. Give a header line and a row for each example.")
    return table


def rows_of(table: RawTable, index: Tensor) -> RawTable:
    """The table with these rows, in this order."""
    positions = index.tolist()
    return RawTable(
        table.path,
        {name: [cells[i] for i in positions] for name, cells in table.columns.items()},
        tuple(map(table.place, positions)),
    )


def numbers(table: RawTable, name: str) -> np.ndarray:
    """A column as finite float64 numbers."""
    _require_cells(table, name)
    values = np.empty(len(table))
    for row, cell in enumerate(table.columns[name]):
        if not _is_number(cell):
            raise DataError(f"{table.path}: {table.place(row)}, column {name!r} is not a number.")
        values[row] = float(cell)
        if not math.isfinite(values[row]) or abs(values[row]) > np.finfo(np.float32).max:
            raise DataError(
                f"{table.path}: {table.place(row)}, column {name!r} is NaN, infinite or too large. "
                "Mend it or drop the row."
            )
    return values


def _read_csv(path: Path) -> RawTable:
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header = next(reader, [])
        if not header:
            raise DataError(f"{path}: the header line is empty. Name the columns in it.")
        if twice := [name for name in header if header.count(name) > 1]:
            raise DataError(f"{path}: the header line names a column twice: {twice[0]!r}. Rename one.")
        rows: list[list[str]] = []
        for row in reader:
            if not row:
                continue  # an empty line at the end
            if len(row) != len(header):
                raise DataError(
                    f"{path}: line {reader.line_num} has {len(row)} cells where the header has {len(header)}. "
                    "Mend the line."
                )
            rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num} is not CSV ({error}).") from error
    return RawTable(path, {name: [row[k] for row in rows] for k, name in enumerate(header)})


def _read_parquet(path: Path) -> RawTable:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
        arrow_error = importlib.import_module("pyarrow.lib").ArrowException
    except ImportError as error:
        raise DataError(
            f"{path}: Parquet needs pyarrow, which is not installed. {install('parquet')}"
        ) from error
    try:
        arrow = parquet.read_table(path)
        columns = {name: arrow.column(name).to_pylist() for name in arrow.column_names}
    except (arrow_error, OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: not a Parquet table that can be read ({type(error).__name__}).") from error
    return RawTable(path, {name: [_as_cell(v) for v in values] for name, values in columns.items()})


def _as_cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return value if isinstance(value, str) else repr(value)


def _require_cells(table: RawTable, name: str) -> None:
    """A missing value is the user's to fill in: a guess would be learnt from."""
    for row, cell in enumerate(table.column(name, "feature")):
        if not cell.strip():
            raise DataError(
                f"{table.path}: {table.place(row)}, column {name!r} is empty. Fill it in or drop the row."
            )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
