"""Columns of real tables: missing cells, identifiers, dates, decimal commas, people with several rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedveil.data.columns import ColumnOptions, schema_of
from fedveil.data.notes import AGREED_NOTE, PRIVATE_NOTE
from fedveil.data.own import clients_from_folder
from fedveil.data.persons import limit_rows, people_of, same_person
from fedveil.data.raw_table import RawTable, read_table
from fedveil.data.schema import MISSING_CATEGORY, Column, TableSchema, read_schema, write_schema
from fedveil.data.table import load_table, table_examples
from fedveil.errors import DataError, InputError
from fedveil.experiment.config import make_config
from fedveil.experiment.run import run_seed
from tests.refusals import refuses

# Of 40 rows, every eighth lacks a number, every tenth a word.
ROWS = [
    (
        ("?", "NA", "", "NaN")[k // 8 % 4] if k % 8 == 0 else str(k % 7),
        "" if k % 10 == 0 else "ab"[k % 2],
        k % 2,
    )
    for k in range(40)
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    path.write_text("a,b,y\n" + "".join(f"{a},{b},{y}\n" for a, b, y in ROWS))
    return path


def test_missing_cells_are_refused_with_their_number_in_every_column(table: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_table(path=table, label="y", test_fraction=0.0)
    for part in (str(table), "column 'a': 5 of 40", "column 'b': 4 of 40"):
        assert part in str(caught.value)


def test_rows_with_missing_cells_are_dropped_and_counted(table: Path) -> None:
    dataset = load_table(path=table, label="y", missing="drop")
    gone = sum(k % 8 == 0 or k % 10 == 0 for k in range(40))
    assert len(dataset.train) + len(dataset.test) == 40 - gone
    assert f"{gone} rows" in dataset.summary


def test_a_missing_number_counts_as_the_median_and_a_word_as_the_most_frequent(table: Path) -> None:
    dataset = load_table(path=table, label="y", missing="median", test_fraction=0.0)
    schema = dataset.schema
    assert schema is not None
    present = torch.tensor([float(a) for a, _, _ in ROWS if a.isdigit()])
    assert schema.columns[0].fill == float(present.quantile(0.5))
    assert schema.columns[1].categories == ("a", "b")
    assert schema.columns[1].fill == 1.0  # only a's are missing
    assert torch.equal(dataset.train.x[:, 1] + dataset.train.x[:, 2], torch.ones(40))
    assert bool(torch.isfinite(dataset.train.x).all())


def test_missing_cells_can_be_a_category_of_their_own(table: Path) -> None:
    dataset = load_table(path=table, label="y", missing="category", test_fraction=0.0)
    schema = dataset.schema
    assert schema is not None
    assert schema.columns[1].categories == ("a", "b", MISSING_CATEGORY)
    assert dataset.input_shape == (5,)  # a, whether a is missing, and three categories
    assert dataset.train.x[:, 1].sum() == 5
    assert torch.equal(dataset.train.x[:, 0][dataset.train.x[:, 1] == 1], torch.zeros(5))
    assert dataset.train.x[:, 4].sum() == 4
    assert len(dataset.mean) == len(dataset.std) == 5


@pytest.mark.parametrize("missing", ["refuse", "drop", "median", "category"])
def test_a_schema_file_prepares_rows_as_the_schema_does(table: Path, tmp_path: Path, missing: Any) -> None:
    if missing == "refuse":
        table.write_text("a,b,y\n1,a,0\n2,b,1\n4,b,1\n")
    schema = schema_of(table, "y", ColumnOptions(missing=missing))
    write_schema(schema, tmp_path / "schema.toml")
    read = read_schema(tmp_path / "schema.toml")
    raw = read_table(table)
    assert read == schema
    assert torch.equal(table_examples(read, raw).x, table_examples(schema, raw).x)


def write_column(path: Path, cells: list[str]) -> Path:
    path.write_text("a,c,y\n" + "".join(f'{k % 5},"{cell}",{k % 2}\n' for k, cell in enumerate(cells)))
    return path


SUSPICIOUS = {
    "names": [f"Person{k:03d} X" for k in range(40)],
    "codes": [f"MRN-{k * 7919 % 1000:04d}" for k in range(40)],
    "dates": [f"2024-{k % 12 + 1:02d}-{k % 28 + 1:02d}" for k in range(40)],
    "german dates": [f"{k % 28 + 1}.{k % 12 + 1}.2024" for k in range(40)],
    "texts": [f"patient number {k} was seen twice" for k in range(40)],
    "commas": [f"{k},5" for k in range(40)],
    "row numbers": [str(k + 1) for k in range(40)],
}


@pytest.mark.parametrize("cells", SUSPICIOUS.values(), ids=SUSPICIOUS)
def test_columns_that_are_no_features_are_refused_without_telling_their_values(
    tmp_path: Path, cells: list[str]
) -> None:
    path = write_column(tmp_path / "t.csv", cells)
    for make in (
        lambda: load_table(path=path, label="y"),
        lambda: schema_of(path, "y"),
        lambda: schema_of(path, "y", ColumnOptions(categorical=["c"])),
    ):
        with pytest.raises(DataError) as caught:
            make()
        assert "column 'c'" in str(caught.value).replace(str(tmp_path), "")
        assert cells[17] not in str(caught.value).replace(str(tmp_path), "")
    assert load_table(path=path, label="y", drop=["c"]).input_shape == (1,)


def test_the_remedies_work(tmp_path: Path) -> None:
    path = write_column(tmp_path / "t.csv", SUSPICIOUS["commas"])
    assert load_table(path=path, label="y", decimal=",").input_shape == (2,)
    write_column(path, SUSPICIOUS["row numbers"])
    assert load_table(path=path, label="y", numeric=["c"]).input_shape == (2,)
    write_column(path, SUSPICIOUS["codes"])
    assert load_table(path=path, label="y", categorical=["c"], test_fraction=0.0).input_shape == (41,)


def test_a_numeric_identifier_is_known_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [(k * 7919 % 100003, k % 5, k % 2) for k in range(40)]
    path.write_text("patient_id,a,y\n" + "".join(f"{i},{a},{y}\n" for i, a, y in rows))
    with refuses("patient_id", DataError):
        load_table(path=path, label="y")
    path.write_text(path.read_text().replace("patient_id", "platelets"))
    assert load_table(path=path, label="y").input_shape == (2,)


@pytest.mark.parametrize(
    "option, value",
    [("missing", "guess"), ("decimal", ";"), ("statistics", "secret"), ("drop", "a"), ("rows_per_person", 2)],
)
def test_unknown_choices_are_refused(table: Path, option: str, value: object) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(InputError) as caught:
        load_table(path=table, label="y", **options)
    assert caught.value.field == option


def write_visits(path: Path) -> None:
    """30 people with one to five visits each."""
    rows = [(f"p{who}", who * 10 + visit, who % 2) for who in range(30) for visit in range(who % 5 + 1)]
    path.write_text("who,a,y\n" + "".join(f"{who},{a},{y}\n" for who, a, y in rows))


@pytest.mark.parametrize("most", [1, 2, 9])
def test_no_person_has_more_training_rows_than_allowed_or_is_in_both_splits(
    tmp_path: Path, most: int
) -> None:
    path = tmp_path / "visits.csv"
    write_visits(path)
    dataset = load_table(path=path, label="y", person="who", rows_per_person=most)
    assert dataset.input_shape == (1,)  # people are no feature

    def people(x: torch.Tensor) -> list[int]:
        return ((x[:, 0].double() * dataset.std[0] + dataset.mean[0]).round().long() // 10).tolist()

    train, test = people(dataset.train.x), people(dataset.test.x)
    assert not set(train) & set(test)
    assert set(train) | set(test) == set(range(30))
    assert {who: min(most, who % 5 + 1) for who in set(train)} == {
        who: train.count(who) for who in set(train)
    }
    again = load_table(path=path, label="y", person="who", rows_per_person=most)
    assert torch.equal(again.train.x, dataset.train.x)
    assert dataset.rows_per_person == most


def test_the_data_notes_the_source_of_its_statistics(table: Path, tmp_path: Path) -> None:
    write_schema(schema_of(table, "y", ColumnOptions(missing="median")), tmp_path / "schema.toml")
    found = {
        load_table(path=table, label="y", missing="median").notes[0],
        load_table(path=table, label="y", missing="median", statistics="public").notes[0],
        load_table(path=table, label="y", schema=tmp_path / "schema.toml").notes[0],
    }
    assert len(found) == 3


def test_rows_of_clients_put_together_are_named_by_their_file(tmp_path: Path) -> None:
    (tmp_path / "north.csv").write_text("a,y\n1,0\n2,1\n")
    (tmp_path / "south.csv").write_text("a,y\n1,0\n?,1\n")
    with refuses("missing", DataError):
        clients_from_folder(tmp_path, label="y")
    assert clients_from_folder(tmp_path, label="y", missing="median").clients.sizes == [2, 2]


SPELLED = {"a": "a", "A": "a", "b": "b", "c ": "c", "1": "1", "1.0": "1"}  # the person of each spelling


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    people=st.lists(st.sampled_from([*SPELLED, " "]), min_size=1, max_size=60),
    most=st.integers(1, 4),
    seed=st.integers(0, 3),
)
def test_no_person_has_more_rows_than_allowed_in_any_file(people: list[str], most: int, seed: int) -> None:
    table = RawTable(
        Path("t.csv"), {"who": pa.array(people), "row": pa.array(list(map(str, range(len(people)))))}
    )
    if any(not who.strip() for who in people):
        with pytest.raises(DataError):  # rows without a person cannot be bounded
            limit_rows(table, "who", most, seed)
        return
    kept = limit_rows(table, "who", most, seed)
    counted = Counter(map(SPELLED.__getitem__, kept.texts("who", "person")))
    held = Counter(SPELLED[who] for who in people)
    assert counted == {who: min(most, count) for who, count in held.items()}
    assert len(set(kept.texts("row", "row"))) == len(kept)


def test_another_person_changes_none_of_the_rows_that_are_kept() -> None:
    people = ["a", "b", "c", "a", "b", "c", "b", "a", "c", "b", "c", "d"] * 5
    rows = {"who": pa.array(people), "row": pa.array(list(map(str, range(len(people)))))}
    table = RawTable(Path("t.csv"), rows)
    without = table.take(np.flatnonzero(np.array(people) != "a"))
    kept = limit_rows(table, "who", 2, 0)
    others = [
        row for who, row in zip(kept.texts("who", "w"), kept.texts("row", "r"), strict=True) if who != "a"
    ]
    assert others == list(limit_rows(without, "who", 2, 0).texts("row", "r"))


@pytest.mark.parametrize("column", ["mrn", "name"])
def test_a_schema_to_be_sent_holds_no_value_of_an_identifier(tmp_path: Path, column: str) -> None:
    path = tmp_path / "t.csv"
    values = [f"P{k:05d}" if column == "mrn" else f"Anna Nr{k} Muster" for k in range(60)]
    path.write_text(f"{column},a,y\n" + "".join(f"{v},{k % 7}.5,{k % 2}\n" for k, v in enumerate(values)))
    for options in (ColumnOptions(), ColumnOptions(categorical=[column])):
        with pytest.raises(DataError) as caught:
            schema_of(path, "y", options)
        assert not any(value in str(caught.value) for value in values)
    made = schema_of(path, "y", ColumnOptions(drop=[column]))
    assert not any(value in str(made.to_json()) for value in values)


@pytest.mark.parametrize("missing", ["median", "category"])
def test_with_a_schema_no_row_changes_how_cells_are_filled_or_scaled(tmp_path: Path, missing: Any) -> None:
    """Constants that are said to be public depend on no private row."""
    schema = TableSchema("y", ("0", "1"), (Column("a", None, 5.0, 2.0, fill=4.0),), missing=missing)
    made = []
    for outlier in ("1", "100000"):
        path = tmp_path / f"{outlier}.csv"
        path.write_text("a,y\n" + f"{outlier},0\n" + "?,1\n3,0\n" * 10)
        made.append(load_table(path=path, label="y", schema=schema, test_fraction=0.0).train.x)
    assert int((made[0] != made[1]).any(1).sum()) == 1  # all rows but the one that differs
    dataset = load_table(path=path, label="y", schema=schema, test_fraction=0.0)
    assert "this run read no row" in dataset.notes[0]


def test_a_schema_that_was_written_from_private_rows_is_not_said_to_be_free_of_them(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,y\n" + "1.5,0\n2.5,1\n3.5,0\n" * 10)
    schema = schema_of(path, "y")  # `fedveil deploy schema` reads any table
    note = load_table(path=path, label="y", schema=schema).notes[0]
    for said in (note, AGREED_NOTE, PRIVATE_NOTE):
        assert "If private rows were read to write it, the guarantee does not cover that." in said
        assert "no private row" not in said


def test_statistics_of_rows_are_noted_as_unprotected(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,y\n" + "1.5,0\n?,1\n3.5,0\n" * 10)
    made = load_table(path=path, label="y", missing="median")
    assert "without protection" in made.notes[0]


SPELLINGS = ("12", " 12", "12 ", "012", "12.0", "12,0", "1.2e1", "\uff11\uff12", "+12")


def test_no_spelling_gives_a_person_more_rows(tmp_path: Path) -> None:
    rows = [f'"{who}",{20 + k},{k % 2}' for k, who in enumerate(SPELLINGS * 3)]
    rows += [f'"  Anna  Maria",{50 + k},1\n"anna maria",{60 + k},0' for k in range(4)]
    rows += [f"other{k},{k},{k % 2}" for k in range(30)]
    path = tmp_path / "visits.csv"
    path.write_text("\n".join(["who,age,ill", *rows]) + "\n")
    dataset = load_table(path=path, label="ill", person="who", rows_per_person=2, test_fraction=0.2)
    assert len(dataset.train) <= 2 + 2 + 30
    table = read_table(path)
    assert len(set(people_of(table, "who").tolist())) == 32
    assert len(limit_rows(table, "who", 2, 0)) == 2 + 2 + 30


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("P-1", "P\u20101"),
        ("P-1", "P\u20131"),
        ("anna", "an\u200bna"),
        ("anna", "\ufeffanna"),
        ("12", "1\u00ad2"),
    ],
)
def test_marks_that_look_alike_or_not_at_all_make_no_second_person(one: str, other: str) -> None:
    assert same_person(one) == same_person(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("12", "13"), ("a", "b"), ("1" * 60, "1" * 59 + "2"), ("nan", "inf"), ("1e999999999", "2e999999999")],
)
def test_different_people_stay_apart(one: str, other: str) -> None:
    assert same_person(one) != same_person(other)


def test_a_client_has_all_rows_of_its_user_whatever_the_spelling(tmp_path: Path) -> None:
    names = ["North", " north", "North ", "7", "7.0"]
    rows = [f"{names[k % 5]},{20 + k % 31},{k % 2}" for k in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["hospital,age,ill", *rows]) + "\n")
    dataset = load_table(path=tmp_path / "t.csv", label="ill", user="hospital")
    assert len(dataset.user_names) == 2
    assert dataset.train.users is not None
    assert set(dataset.train.users.tolist()) == {0, 1}


@pytest.mark.parametrize("cell", ["{}", "P-{}"])
@pytest.mark.parametrize("name", ["patient_id", "mrn", "PatientID"])
def test_an_identifier_that_repeats_is_refused_and_never_sent(name: str, cell: str, tmp_path: Path) -> None:
    """Several visits of each person, so no value is unique."""
    rows = [f"{cell.format(1000 + 7 * (k // 3))},{20 + k % 31},{k % 2}" for k in range(120)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join([f"{name},age,ill", *rows]) + "\n")
    for read in (
        lambda: load_table(path=path, label="ill"),
        lambda: schema_of(path, "ill"),
        lambda: schema_of(path, "ill", ColumnOptions(categorical=[name])),
    ):
        with refuses(name, DataError) as refused:
            read()
        assert cell.format(1007) not in str(refused.value)
    assert load_table(path=path, label="ill", drop=[name]).train.x.shape[1] == 1
    assert load_table(path=path, label="ill", person=name, rows_per_person=1).train.x.shape[1] == 1


def test_a_schema_to_be_sent_names_no_rows_by_their_classes(tmp_path: Path) -> None:
    rows = [f"name{k},{20 + k % 31}" for k in range(60)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["who,age", *rows]) + "\n")
    with refuses("who", DataError) as refused:
        schema_of(path, "who")
    assert "name7" not in str(refused.value)


def test_the_person_column_is_in_no_schema_and_no_result(tmp_path: Path) -> None:
    rows = [f"secret-{k // 2},{20 + k % 31},{k % 2}" for k in range(80)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["patient,age,ill", *rows]) + "\n")
    options = {"path": str(path), "label": "ill", "person": "patient", "rows_per_person": 2}
    content: dict[str, Any] = {
        "task": {"dataset": "table", "model": "logistic", "data_options": options},
        "partition": {"kind": "iid", "clients": 2},
        "run": {"rounds": 1, "workers": 1, "transcript": [1]},
    }
    run_seed(make_config(content), 0, experiment="t", results=tmp_path / "results")
    for file in (tmp_path / "results").rglob("*"):
        assert not file.is_file() or b"secret-" not in file.read_bytes(), file
