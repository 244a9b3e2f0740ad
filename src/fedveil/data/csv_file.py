"""A CSV file as columns of text, with a header line.

Spreadsheets write commas, semicolons or tabs between cells, depending on the country. The header line shows which.
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from fedveil.data.files import read_bytes
from fedveil.errors import DataError

_MOST_BYTES = 1 << 31
_HEADER_BYTES = 1 << 20
_SEPARATORS = ",;\t"  # of equally frequent ones the first
_STATED = re.compile(r"sep=([,;\t|])\r?\n")  # spreadsheets write and read this first line
_QUOTED = re.compile(r'"(?:[^"]|"")*"')
_SAVE = "Save it as CSV in UTF-8."
_FORMATS = {
    b"PK\x03\x04": "is a spreadsheet or another zip file, not CSV",
    b"\xd0\xcf\x11\xe0": "is a spreadsheet, not CSV",
    b"\xff\xfe": "is UTF-16, not UTF-8",
    b"\xfe\xff": "is UTF-16, not UTF-8",
}
"""What the first bytes of a file say."""


def read_csv(path: Path) -> dict[str, Any]:
    """The columns of a CSV file (`.gz` and `.xz` are opened) as Arrow arrays of text."""
    content = read_bytes(path, most=_MOST_BYTES)
    _require_text(content, path)
    start = bytes(content[:_HEADER_BYTES]).decode("utf-8", errors="ignore").removeprefix("\ufeff")
    stated = _STATED.match(start)
    header = start[stated.end() :] if stated else start
    separator = stated[1] if stated else _separator(header)
    names = _header_names(header, separator, path)
    ragged: list[str] = []

    def refuse_row(row: Any) -> str:
        where = "a row" if row.number is None else f"line {row.number}"
        alone = "Remove what stands above the line of column names, or f" if len(names) == 1 else "F"
        ragged.append(
            f"{path}: {where} has {row.actual_columns} cells where the header has {row.expected_columns}. "
            f"{alone}ix the line."
        )
        return "error"

    try:
        arrow = pyarrow.csv.read_csv(
            pa.BufferReader(content),
            read_options=pyarrow.csv.ReadOptions(
                use_threads=False, block_size=1 << 22, skip_rows=int(stated is not None)
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=separator, newlines_in_values=True, invalid_row_handler=refuse_row
            ),
            convert_options=pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
    except pa.ArrowException as error:
        problem = ragged[0] if ragged else f"{path}: is not readable CSV. Fix the file."
        raise DataError(problem, field="csv", value=str(path)) from error
    return {name.strip(): arrow.column(name) for name in arrow.column_names}


def _separator(header: str) -> str:
    line = _QUOTED.sub("", header).partition("\n")[0]
    return max(_SEPARATORS, key=line.count)


def _header_names(header: str, separator: str, path: Path) -> list[str]:
    """The names in the header line; refuses empty names, and names that differ in blanks at most."""
    names = next(csv.reader(io.StringIO(header, newline=""), delimiter=separator), [])
    if not names:
        raise DataError(f"{path}: the header line is empty. Name the columns in it.", field="header")
    bare = [unicodedata.normalize("NFC", name.strip()) for name in names]
    if "" in bare:
        place = bare.index("") + 1
        raise DataError(
            f"{path}: column {place} of {len(bare)} has no name in the header line. Name it, or remove the column.",
            field="header",
            value=place,
        )
    if twice := [name for name in bare if bare.count(name) > 1]:
        raise DataError(
            f"{path}: the header line names a column twice: {twice[0]!r}. Rename one.",
            field="header",
            value=twice[0],
        )
    return names


def _require_text(content: bytearray, path: Path) -> None:
    for first, what in _FORMATS.items():
        if content.startswith(first):
            raise DataError(f"{path}: {what}. {_SAVE}", field="csv", value=str(path))
    problem, wrong = "is not UTF-8", None
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = error.start
    if wrong is None and b"\0" in content:
        problem, wrong = "holds a NUL byte, which is no text", content.index(b"\0")
    if wrong is not None:
        line = content.count(b"\n", 0, wrong) + 1
        raise DataError(f"{path}: line {line} {problem}. {_SAVE}", field="line", value=line)
