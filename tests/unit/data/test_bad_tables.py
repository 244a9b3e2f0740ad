"""Tables that do not fit their schema: every refusal names the file, the column and the row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedveil.data.raw_table import read_table
from fedveil.data.schema import read_schema
from fedveil.data.table import load_table, table_examples, unknown_categories
from fedveil.errors import DataError, InputError
from fedveil.evaluation.metrics import ONE_CLASS
from fedveil.experiment.config import make_config
from fedveil.experiment.run import run_seed
from fedveil.federation.config import DataSection
from fedveil.federation.node import read_held
from tests.refusals import refuses

SCHEMA = """
label = "{label}"
{more}
[[column]]
name = "age"
mean = 60
std = 10
[[column]]
name = "sex"
categories = ["f", "m"]
"""
CLASSES = ("ill", 'classes = ["no", "yes"]')
NUMBER = ("cost", 'target = "number"')
SURVIVAL = ("days", 'target = "survival"\nevent = "died"\nintervals = [30, 90]')
BAD = [
    (CLASSES, "age,sex,ill\n50,f,no\n60,m,maybe\n", ["row 2", "'ill'"]),  # an unknown class
    (CLASSES, "age,sex,ill\n50,f,no\n60,m,\n", ["row 2", "'ill'"]),
    (CLASSES, "age,ill\n50,no\n", ["'sex'"]),  # a column is missing
    (CLASSES, "age,sex\n50,f\n", ["'ill'"]),
    (CLASSES, "age,sex,ill\n50,f,no\nold,m,yes\n", ["row 2", "'age'"]),  # another type
    (CLASSES, "age,sex,ill\n50,f,no\n,m,yes\n", ["row 2", "'age'"]),
    (NUMBER, "age,sex,cost\n50,f,100\n60,m,much\n", ["row 2", "'cost'"]),
    (NUMBER, "age,sex,cost\n50,f,100\n60,m,\n", ["row 2", "'cost'"]),
    (SURVIVAL, "age,sex,days,died\n50,f,3,1\n60,m,-4,0\n", ["row 2", "'days'"]),  # a negative time
    (SURVIVAL, "age,sex,days,died\n50,f,3,1\n60,m,4,2\n", ["row 2", "'died'"]),
    (SURVIVAL, "age,sex,days\n50,f,3\n", ["'died'"]),
]


@pytest.mark.parametrize(("schema", "table", "named"), BAD)
def test_a_table_that_differs_from_its_schema_is_refused_with_its_place(
    schema: tuple[str, str], table: str, named: list[str], tmp_path: Path
) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA.format(label=schema[0], more=schema[1]))
    path = tmp_path / "data.csv"
    path.write_text(table)
    made = read_schema(tmp_path / "schema.toml")
    section = DataSection.model_validate({"reader": "table", "path": "data.csv", "schema": "schema.toml"})

    def in_a_run() -> object:
        return load_table(
            path=path,
            test_path=path,
            label=made.label,
            schema=tmp_path / "schema.toml",
            target=made.target,
            event=made.event,
            intervals=made.intervals,
        )

    for read in (
        lambda: table_examples(made, read_table(path)),
        lambda: read_held(section, tmp_path),
        in_a_run,
    ):
        with pytest.raises(DataError) as refused:
            read()
        for part in ["data.csv", *named]:
            assert part in str(refused.value), str(refused.value)


def test_an_unknown_category_gives_zeros_in_training(tmp_path: Path) -> None:
    """A node that refused would tell the server about its rows; prediction refuses, see its tests."""
    (tmp_path / "schema.toml").write_text(SCHEMA.format(label="ill", more=CLASSES[1]))
    (tmp_path / "data.csv").write_text("age,sex,ill\n60,x,no\n")
    schema, table = read_schema(tmp_path / "schema.toml"), read_table(tmp_path / "data.csv")
    assert table_examples(schema, table).x.tolist() == [[0.0, 0.0, 0.0]]
    assert unknown_categories(schema, table) == {"sex": 1}  # its operator is told
    with refuses("sex", DataError, value=0):  # a simulation tells nobody else
        table_examples(schema, table, refuse_unknown=True)


def test_the_auc_of_a_hospital_with_one_class_is_undefined(tmp_path: Path) -> None:
    rows = [f"h{k % 2},{40 + k % 40},{['no', 'yes'][k % 4 == 0]}" for k in range(80)]
    (tmp_path / "data.csv").write_text("\n".join(["hospital,age,ill", *rows]) + "\n")
    options = {"path": str(tmp_path / "data.csv"), "label": "ill", "user": "hospital"}
    content: dict[str, Any] = {
        "task": {"dataset": "table", "model": "logistic", "data_options": options},
        "partition": {"kind": "user"},
        "run": {"rounds": 1, "workers": 1},
    }
    found = run_seed(make_config(content), 0, experiment="t", results=tmp_path / "results")
    clients = found.summary["metrics"]["clients"]
    assert clients["h1"]["auc"] == {"value": None, "why": ONE_CLASS}
    assert clients["h0"]["auc"]["value"] is not None


def _column(cells: list[str], label: str = "ill") -> str:
    rows = [f'{20 + k % 31}.5,"{cell}",{k % 2}' for k, cell in enumerate(cells)]
    return "\n".join([f"age,x,{label}", *rows]) + "\n"


NO_FEATURES = {
    "days with blanks": [f"1{k % 9}. 0{k % 9 + 1}. 2024" for k in range(60)],
    "days with months": [f"1{k % 9} Jan 2024" for k in range(60)],
    "months first": [f"March {k % 28 + 1}, 2021" for k in range(60)],
    "days as numbers": [f"2024{k % 12 + 1:02}{k % 28 + 1:02}" for k in range(60)],
    "commas among whole numbers": [f"{k % 9}{',5' if k % 2 else ''}" for k in range(60)],
    "thousands": [f"1.{k % 9}00,5" for k in range(60)],
    "thousands and points": [f"1,{k % 9}00.5" for k in range(60)],
    "addresses": [f"a{k // 3}@b.ch" for k in range(60)],
    "a small hospital's names": [f"Name{k}" for k in range(14)],
    "few words among numbers": ["<5" if k % 9 == 0 else str(k % 50) for k in range(60)],
    "infinite": ["inf" if k == 9 else str(k % 50) for k in range(60)],
}


@pytest.mark.parametrize("kind", NO_FEATURES)
def test_what_is_no_feature_is_refused_by_its_column(kind: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(_column(NO_FEATURES[kind]))
    with pytest.raises(DataError) as refused:
        load_table(path=tmp_path / "t.csv", label="ill")
    assert refused.value.field == "x"
    assert "t.csv" in str(refused.value)
    assert load_table(path=tmp_path / "t.csv", label="ill", drop=["x"]).train.x.shape[1] == 1


@pytest.mark.parametrize(
    "cells",
    [
        ["3A", "4B", "5C"] * 20,  # codes
        ["I", "II", "III"] * 20,
        [str(k % 50 + 100) for k in range(60)],
        [str(20_000 + k % 50) for k in range(60)],
        [f"{k % 9}.25" for k in range(60)],
        ["May", "June", "July"] * 20,
    ],
)
def test_ordinary_columns_pass(cells: list[str], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(_column(cells))
    load_table(path=tmp_path / "t.csv", label="ill")


def test_blanks_around_names_in_the_header_mean_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(_column(["a", "b"] * 30).replace("age,x,ill", "age , x, ill"))
    found = load_table(path=tmp_path / "t.csv", label="ill").schema
    assert found is not None
    assert [column.name for column in found.columns] == ["age", "x"]
    (tmp_path / "t.csv").write_text(_column(["a", "b"] * 30).replace("age,x,ill", "age, age,ill"))
    with pytest.raises(DataError) as refused:
        load_table(path=tmp_path / "t.csv", label="ill")
    assert (refused.value.field, refused.value.value) == ("header", "age")


@pytest.mark.parametrize(
    ("label", "more", "cells", "field"),
    [
        ("ill", {}, ["0.5", "1.5"] * 30, "ill"),
        ("ill", {}, ["no"] * 60, "ill"),
        ("ill", {}, ["no", "?"] * 30, "labels"),
        ("cost", {"target": "number"}, ["1", "much"] * 30, "cost"),
        ("cost", {"target": "number"}, ["1", ""] * 30, "missing"),
        ("days", {"target": "survival", "event": "x"}, ["5", "-3"] * 30, "days"),
    ],
)
def test_a_wrong_target_is_refused_by_its_column(
    label: str, more: dict[str, Any], cells: list[str], field: str, tmp_path: Path
) -> None:
    rows = [f"{20 + k % 31}.5,{k % 2},{cell}" for k, cell in enumerate(cells)]
    (tmp_path / "t.csv").write_text("\n".join([f"age,x,{label}", *rows]) + "\n")
    with pytest.raises(DataError) as refused:
        load_table(path=tmp_path / "t.csv", label=label, **more)
    assert refused.value.field == field


def test_survival_without_an_event_is_refused(tmp_path: Path) -> None:
    rows = [f"{20 + k % 31}.5,0,{k}" for k in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["age,died,days", *rows]) + "\n")
    with pytest.raises(DataError) as refused:
        load_table(path=tmp_path / "t.csv", label="days", target="survival", event="died")
    assert refused.value.field == "died"


def test_the_column_that_leaves_no_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(_column([""] * 60))
    with pytest.raises(DataError) as refused:
        load_table(path=tmp_path / "t.csv", label="ill", missing="drop")
    assert refused.value.field == "missing"
    assert "'x'" in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("label", "sex"),
        ("categorical", ["age"]),
        ("numeric", ["sex"]),
        ("drop", ["age"]),
        ("missing", "drop"),
        ("decimal", ","),
        ("limit", 1.0),
        ("unit_norm", True),
        ("target", "number"),
        ("statistics", "public"),
    ],
)
def test_options_that_a_given_schema_contradicts_are_refused(
    field: str, value: object, tmp_path: Path
) -> None:
    """They would be ignored silently: the schema says how each column is read."""
    (tmp_path / "schema.toml").write_text(SCHEMA.format(label="ill", more='classes = ["no", "yes"]'))
    (tmp_path / "data.csv").write_text("age,sex,ill,note\n" + "50,f,no,x\n60,m,yes,y\n" * 10)
    options: dict[str, Any] = {
        "path": tmp_path / "data.csv",
        "label": "ill",
        "schema": tmp_path / "schema.toml",
    }
    assert len(load_table(**options, drop=["note"], categorical=["sex"], numeric=["age"]).train) == 16
    with pytest.raises(InputError) as refused:
        load_table(**options | {field: value})
    assert refused.value.field == field


def test_the_target_is_that_of_the_schema(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA.format(label="days", more='classes = []\ntarget = "number"'))
    rows = "".join(f"{50 + k},f,{k}.5\n" for k in range(20))
    (tmp_path / "data.csv").write_text("age,sex,days\n" + rows)
    made = load_table(path=tmp_path / "data.csv", label="days", schema=tmp_path / "schema.toml")
    assert made.train.y.dtype.is_floating_point
    assert len(made.test) == 4
