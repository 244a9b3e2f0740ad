"""Tables as spreadsheets and other programs write them: read alike, or refused with their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.data.csv_file import read_csv
from fedveil.data.raw_table import read_table
from fedveil.data.table import load_table
from fedveil.errors import DataError
from tests.refusals import refuses

PLAIN = "ward,age,note,ill\nKöln,36.5,a,yes\nUlm,40,b,no\n"
GERMAN = PLAIN.replace(",", ";").replace(".", ",")


def cells_of(path: Path) -> dict[str, list[str]]:
    table = read_table(path)
    return {name: table.texts(name, "feature") for name in table.columns}


@pytest.mark.parametrize(
    "content",
    [
        PLAIN,
        "\ufeff" + PLAIN,
        PLAIN.replace("\n", "\r\n"),
        PLAIN.replace(",", ";"),
        PLAIN.replace(",", "\t"),
        "sep=;\r\n" + PLAIN.replace(",", ";").replace("\n", "\r\n"),
        "\ufeffsep=|\n" + PLAIN.replace(",", "|"),
        PLAIN.replace(",", " , "),
        PLAIN.replace("ward", '"ward"').replace("Köln", '"Köln "'),
        PLAIN.replace("ö", "o\u0308"),  # the letter and its dots as two characters
    ],
)
def test_what_looks_alike_is_read_alike(content: str, tmp_path: Path) -> None:
    (tmp_path / "plain.csv").write_bytes(PLAIN.encode())
    (tmp_path / "other.csv").write_bytes(content.encode())
    assert cells_of(tmp_path / "other.csv") == cells_of(tmp_path / "plain.csv")


def test_a_separator_within_a_quoted_name_is_none(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('"a;b;c",d\n1,2\n')
    assert cells_of(tmp_path / "t.csv") == {"a;b;c": ["1"], "d": ["2"]}


def test_decimal_commas_between_semicolons_are_numbers(tmp_path: Path) -> None:
    rows = "".join(f"{30 + k % 40},{k % 10};{k % 2}\n" for k in range(60))
    (tmp_path / "t.csv").write_text("age;ill\n" + rows)
    with refuses("age", DataError):
        load_table(path=tmp_path / "t.csv", label="ill")
    made = load_table(path=tmp_path / "t.csv", label="ill", decimal=",")
    assert made.schema is not None
    assert made.schema.columns[0].categories is None


@pytest.mark.parametrize(
    ("content", "field", "value"),
    [
        (PLAIN.encode("utf-16"), "csv", ...),
        (b"PK\x03\x04" + bytes(200), "csv", ...),
        (b"\xd0\xcf\x11\xe0" + bytes(200), "csv", ...),
        (PLAIN.encode("latin-1"), "line", 2),
        (PLAIN.encode("utf-16-le"), "line", 2),
        (PLAIN.replace("a,yes", "a\0,yes").encode(), "line", 2),
        (PLAIN.replace("age", " ").encode(), "header", 2),  # data frames write their index so
        (PLAIN.replace("\n", ",\n").encode(), "header", 5),
        (PLAIN.replace("age", "ward ").encode(), "header", "ward"),
        (PLAIN.replace("ward,age", "a\u0308,\u00e4").encode(), "header", "\u00e4"),
        (("A report of May\n" + PLAIN).encode(), "csv", ...),
        (PLAIN.replace("no\n", "no,1\n").encode(), "csv", ...),
    ],
)
def test_what_is_no_table_is_refused(content: bytes, field: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with refuses(field, DataError, value=str(path) if value is ... else value) as refused:
        read_csv(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    "cells",
    [
        [f"{k % 7 * 1234:05d}" for k in range(60)],  # postcodes
        [f"{k % 12 + 1:02d}" for k in range(60)],
        [f"{k % 40} mg" for k in range(60)],
        [f"{k % 40}%" for k in range(60)],
        ["True", "TRUE", "false"] * 20,
    ],
)
def test_codes_units_and_spellings_are_no_features_unless_they_are_named(
    cells: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    rows = (f"{20 + k % 31}.5,{cell},{k % 2}\n" for k, cell in enumerate(cells))
    path.write_text("age,x,ill\n" + "".join(rows))
    with refuses("x", DataError) as refused:
        load_table(path=path, label="ill")
    assert cells[5] not in str(refused.value).replace(str(tmp_path), "")
    load_table(path=path, label="ill", drop=["x"])
    load_table(path=path, label="ill", categorical=["x"])


@pytest.mark.parametrize(
    "cells",
    [
        ["10", "20", "30"],
        ["0", "1", "2"],
        ["0.5", "0.25", "3"],
        ["10 mg", "20 ml", "5 mg"],
        ["12", "07", "8", "9"],  # one slip
    ],
)
def test_numbers_and_doses_pass(cells: list[str], tmp_path: Path) -> None:
    rows = "".join(f"{20 + k % 31}.5,{cells[k % len(cells)]},{k % 2}\n" for k in range(60))
    (tmp_path / "t.csv").write_text("age,x,ill\n" + rows)
    load_table(path=tmp_path / "t.csv", label="ill")


@pytest.mark.parametrize("spellings", [("Yes", "yes"), ("NO", "no")])
def test_classes_that_differ_in_case_only_are_refused(spellings: tuple[str, str], tmp_path: Path) -> None:
    cells = [*spellings, "other"] * 20
    rows = "".join(f"{20 + k % 31}.5,{cell}\n" for k, cell in enumerate(cells))
    (tmp_path / "t.csv").write_text("age,ill\n" + rows)
    with refuses("ill", DataError, value=spellings[0]):
        load_table(path=tmp_path / "t.csv", label="ill")
