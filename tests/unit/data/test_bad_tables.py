"""Tables that do not fit their schema: every refusal names the file, the column and the row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedveil.data.raw_table import read_table
from fedveil.data.schema import read_schema
from fedveil.data.table import load_table, table_examples
from fedveil.errors import DataError
from fedveil.evaluation.metrics import ONE_CLASS
from fedveil.experiment.config import make_config
from fedveil.experiment.run import run_seed
from fedveil.federation.config import DataSection
from fedveil.federation.node import read_held

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
    found = table_examples(read_schema(tmp_path / "schema.toml"), read_table(tmp_path / "data.csv"))
    assert found.x.tolist() == [[0.0, 0.0, 0.0]]


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
