"""A table as in its file: columns of text cells. CSV with a header line, or Parquet."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from fedveil.data.csv_file import read_csv
from fedveil.data.missing import MISSING_MARKS, require_labels
from fedveil.data.schema import Decimal
from fedveil.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class RawTable:
    """Columns of cells as text, all of the same length.

    `rows` selects rows of the columns, None selects all; `sources` are the concatenated files with their numbers of
    rows.
    """

    path: Path
    columns: Mapping[str, Any]
    """Arrow arrays of strings without nulls."""
    rows: npt.NDArray[np.int64] | None = None
    sources: tuple[tuple[str, int], ...] = ()
    masks: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict, repr=False, compare=False)
    """The missing values of columns, for all rows, cached."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.rows is None else len(self.rows)

    def place(self, index: int) -> str:
        """The row at this index as the user counts it; row 1 is the first below the header."""
        row = index if self.rows is None else int(self.rows[index])
        for name, count in self.sources:
            if row < count:
                return f"{name}, row {row + 1}"
            row -= count
        return f"row {row + 1}"

    def column(self, name: str, role: str) -> Any:
        """The cells of this column, as an Arrow array of strings."""
        if not isinstance(name, str) or name not in self.columns:
            have = ", ".join(self.columns)
            raise DataError(
                f"{self.path}: there is no column {name!r} for the {role}. It has: {have}.",
                field=role,
                value=name,
            )
        found = self.columns[name]
        return found if self.rows is None else found.take(pa.array(self.rows))

    def texts(self, name: str, role: str) -> list[str]:
        """The cells of this column as a list."""
        cells: list[str] = self.column(name, role).to_pylist()
        return cells

    def labels(self, name: str) -> list[str]:
        """The column of labels; refuses missing labels."""
        cells = self.texts(name, "label")
        require_labels(self.path, f"column {name!r}", cells, self.place)
        return cells

    def take(self, index: Tensor | npt.NDArray[np.int64]) -> RawTable:
        """The table with these rows, in this order; cells are not copied."""
        picked = np.asarray(index, dtype=np.int64)
        rows = picked if self.rows is None else self.rows[picked]
        return RawTable(self.path, self.columns, rows, self.sources, self.masks)

    def missing(self, name: str) -> npt.NDArray[np.bool_]:
        """True where the column has no value."""
        if name not in self.columns:
            self.column(name, "feature")  # its error lists the columns
        if name not in self.masks:
            cells = pc.utf8_lower(pc.utf8_trim_whitespace(self.columns[name]))
            self.masks[name] = np.asarray(pc.is_in(cells, value_set=pa.array(MISSING_MARKS)))
        mask = self.masks[name]
        return mask if self.rows is None else mask[self.rows]


def joined(tables: Sequence[RawTable], path: Path) -> RawTable:
    """The rows of these tables, which have the same columns, one after the other."""
    columns = {
        name: pa.concat_arrays([_array(table.column(name, "feature")) for table in tables])
        for name in tables[0].columns
    }
    return RawTable(path, columns, None, tuple((table.path.name, len(table)) for table in tables))


def read_table(path: Path) -> RawTable:
    """A table as text cells: Parquet for `.parquet`, CSV otherwise (`.gz` and `.xz` are opened)."""
    columns = _read_parquet(path) if path.suffix.lower() == ".parquet" else read_csv(path)
    table = RawTable(path, {_composed(name): _cleaned(cells) for name, cells in columns.items()})
    if not table.columns or len(table) == 0:
        raise DataError(
            f"{path}: contains no rows. Give a header line and a row for each example.",
            field="rows",
            value=str(path),
        )
    return table


def parse_numbers(
    table: RawTable, name: str, decimal: Decimal = "."
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """A column as numbers, with NaN for missing cells and cells that are not numbers, and the rows of the latter."""
    missing = table.missing(name)
    cells = table.column(name, "feature")
    if decimal == ",":
        cells = pc.replace_substring(cells, ",", ".")
    if missing.any():
        cells = pc.if_else(pa.array(missing), pa.scalar(None, pa.string()), cells)
    try:
        parsed = pc.cast(cells, pa.float64())
    except pa.ArrowInvalid:  # Arrow's parser accepts neither blanks nor plus signs
        return _parse_one_by_one(cells.to_pylist())
    values = np.array(parsed.to_numpy(zero_copy_only=False), dtype=np.float64)
    return values, np.empty(0, dtype=np.int64)


def _parse_one_by_one(
    cells: Sequence[str | None],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    values = np.full(len(cells), np.nan)
    bad: list[int] = []
    for row, cell in enumerate(cells):
        if cell is None:
            continue
        try:
            values[row] = float(cell)
        except ValueError:
            bad.append(row)
    return values, np.array(bad, dtype=np.int64)


def numbers(table: RawTable, name: str, decimal: Decimal = ".") -> npt.NDArray[np.float64]:
    """A column as float64 numbers, with NaN for missing cells; refuses anything else, naming the row."""
    values, bad = parse_numbers(table, name, decimal)
    if len(bad):
        raise DataError(
            f"{table.path}: {table.place(int(bad[0]))}, column {name!r} is not a number. Fix it or drop the row.",
            field=name,
            value=int(bad[0]),
        )
    wrong = np.flatnonzero(np.abs(values) > _LARGEST)
    if len(wrong):
        raise DataError(
            f"{table.path}: {table.place(int(wrong[0]))}, column {name!r} is infinite or too large. "
            "Fix it or drop the row.",
            field=name,
            value=int(wrong[0]),
        )
    return values


def require_present(table: RawTable, names: Sequence[str], remedy: str) -> None:
    """Refuse missing values, giving their number in each of these columns."""
    found = []
    for name in names:
        rows = np.flatnonzero(table.missing(name))
        if len(rows):
            found.append(
                f"column {name!r}: {len(rows)} of {len(table)}, the first in {table.place(int(rows[0]))}"
            )
    if found:
        raise DataError(
            f"{table.path}: values are missing. {'; '.join(found)}. {remedy}", field="missing", value=found
        )


def _array(cells: Any) -> Any:
    return cells.combine_chunks() if isinstance(cells, pa.ChunkedArray) else cells


def _read_parquet(path: Path) -> dict[str, Any]:
    try:
        arrow = pyarrow.parquet.read_table(path)
        return {name: _as_text(arrow.column(name)) for name in arrow.column_names}
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path}: is not a readable Parquet table ({type(error).__name__}). Write it again.",
            field="parquet",
            value=str(path),
        ) from error


def _as_text(column: Any) -> Any:
    if pa.types.is_boolean(column.type):
        column = pc.cast(column, pa.int8())
    return pc.fill_null(pc.cast(column, pa.string()), "")


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _cleaned(cells: Any) -> Any:
    """One spelling of what looks alike: without blanks around it, letters and their accents as one character."""
    cells = pc.utf8_trim_whitespace(_array(cells))
    ascii_only = pc.all(pc.string_is_ascii(cells)).as_py()
    return cells if ascii_only is not False else pc.utf8_normalize(cells, form="NFC")


_MONTH = r"[-/. ]+[^\W\d_]{3,10}\.?[-/., ]+"
_DATE = re.compile(
    r"\d{4}[-/.] ?\d{1,2}[-/.] ?\d{1,2}\.?([T ].*)?|\d{1,2}[-/.] ?\d{1,2}[-/.] ?(\d{4}|\d{2})([T ].*)?"
    rf"|\d{{1,2}}:\d{{2}}(:\d{{2}})?|\d{{1,2}}{_MONTH}\d{{2,4}}([T ].*)?|\d{{4}}{_MONTH}\d{{1,2}}"
    r"|[^\W\d_]{3,10}\.? \d{1,2},? \d{4}"
)
_COMMA = re.compile(r"[-+]?\d+,\d+")
_WHOLE_OR_COMMA = re.compile(r"[-+]?\d+(,\d+)?")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(([.' ]\d{3})+(,\d+)?|([,' ]\d{3})+\.\d+|([,.]\d{3}){2,})")
_UNIT = re.compile(r"[-+]?\d+(?:[.,]\d+)?(\s*[^\d\s.,+-]\D{0,9})")
_ADDRESS = re.compile(r"\S+@\S+\.\w+")
_IDENTIFIER = re.compile(
    r"(?i)(^|.*[_\-. ])(id|ids|mrn|ssn|uuid|guid|nr|no|number|identifier)$|.*[a-z]I[dD]$"
)
_NAMES_SOMEBODY = re.compile(r"(?i)(^|.*[_\-. ])(id|ids|mrn|ssn|uuid|guid|identifier)$|.*[a-z]I[dD]$")
_FEW = 20  # below so many rows nothing can be said about how often values repeat,
_FEWEST = 8  # but where none does


def suspicion(table: RawTable, name: str, values: npt.NDArray[np.float64], words: int) -> str | None:
    """Why a column is no feature, with the remedy; None for an ordinary one. No value of it is shown.

    Whole numbers count as identifiers if they are all different and are named like one or count the rows; other
    numbers are measurements. Words are suspicious if they are dates, have decimal commas, or differ in most rows. Of a
    person's several rows the identifier repeats, so a column named for one needs many values only.

    Args:
        values: The column's numbers, NaN where there is none.
        words: How many cells are no numbers. Where they are few, each is a mistake, not the column.
    """
    cells = table.column(name, "feature").filter(pa.array(~table.missing(name)))
    if not words:
        return _suspicious_numbers(name, values[~np.isnan(values)], cells)
    distinct = pc.unique(cells).to_pylist()
    if _most(_THOUSANDS, distinct):
        return "has marks between thousands. Remove them from the numbers."
    if _most(_WHOLE_OR_COMMA, distinct) and any(map(_COMMA.fullmatch, distinct)):
        return 'has decimal commas. Set decimal = ",".'
    if _most(_DATE, distinct):
        return f"holds dates or times. Name it in drop = [{name!r}], or make it a number such as an age."
    if _have_a_unit(distinct):
        return (
            "has the same unit after each number. Remove it from the numbers, "
            f"or name the column in categorical = [{name!r}]."
        )
    if 2 * words < len(table):
        return None
    if _most(_ADDRESS, distinct):
        return f"holds addresses. Name it in drop = [{name!r}]."
    nearly = len(distinct) > _FEW and 2 * len(distinct) > len(cells)
    if nearly or len(distinct) == len(cells) >= _FEWEST:
        several = sum(len(cell.split()) for cell in distinct) > 3 * len(distinct)
        what = "free text" if several else "an identifier"
        return (
            f"looks like {what}: {len(distinct)} different values in {len(cells)} rows. "
            f"Name it in drop = [{name!r}], or in categorical if it is a category."
        )
    if len(distinct) > _FEW and _NAMES_SOMEBODY.fullmatch(name):
        return _repeated_identifier(name, len(distinct), len(cells), "categorical if it is a category")
    return None


def _repeated_identifier(name: str, distinct: int, rows: int, else_in: str) -> str:
    return (
        f"looks like an identifier by its name: {distinct} different values in {rows} rows. "
        f"Name it in drop = [{name!r}], or in {else_in}; as person = {name!r} it bounds a person's rows."
    )


def _have_a_unit(distinct: Sequence[str]) -> bool:
    units = [_UNIT.fullmatch(cell) for cell in distinct]
    return len(units) > 2 and all(units) and len({unit[1].strip() for unit in units if unit}) == 1


def _suspicious_numbers(name: str, values: npt.NDArray[np.float64], cells: Any) -> str | None:
    if not len(values):
        return f"has no value at all. Name it in drop = [{name!r}]."
    if len(values) < _FEW or bool((values != np.round(values)).any()):
        return None
    if _are_codes(cells):
        return (
            f"holds codes with leading zeros. Name it in drop = [{name!r}] or in categorical, "
            "or in numeric if it is a measurement."
        )
    ordered = np.unique(values)
    if _are_days(ordered):
        return f"holds dates, written as numbers. Name it in drop = [{name!r}], or in numeric if it is a measurement."
    if len(ordered) < len(values):
        if len(ordered) > _FEW and _NAMES_SOMEBODY.fullmatch(name):
            return _repeated_identifier(name, len(ordered), len(values), "numeric if it is a measurement")
        return None
    # Row numbers, a fifth of which may be in another split.
    counts = 0 <= ordered[0] <= 5 and ordered[-1] - ordered[0] < 1.5 * len(ordered)
    if not counts and not _IDENTIFIER.fullmatch(name):
        return None
    return (
        "looks like an identifier: a different whole number in every row. "
        f"Name it in drop = [{name!r}], or in numeric if it is a measurement."
    )


def _are_codes(cells: Any) -> bool:
    """Whether whole numbers are filled up with zeros: some to the width of all the others, or most."""
    padded = int(pc.sum(pc.match_substring_regex(cells, "^0[0-9]")).as_py() or 0)
    widths = pc.min_max(pc.utf8_length(cells)).as_py()
    return padded > 0 and (widths["min"] == widths["max"] or 2 * padded > len(cells))


def _are_days(ordered: npt.NDArray[np.float64]) -> bool:
    """Whether numbers such as 20241231 are days of the calendar, all of them."""
    if not 18_500_000 < ordered[0] <= ordered[-1] < 21_500_000:
        return False
    month, day = ordered // 100 % 100, ordered % 100
    return bool(((month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)).all())


def _most(pattern: re.Pattern[str], cells: Sequence[str]) -> bool:
    return sum(pattern.fullmatch(cell) is not None for cell in cells) > 0.9 * len(cells)
