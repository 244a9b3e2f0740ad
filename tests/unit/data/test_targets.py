from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedveil.cli import app
from fedveil.data.schema import read_schema, write_schema
from fedveil.data.table import load_table
from fedveil.errors import DataError, InputError
from fedveil.experiment.config import make_config
from fedveil.experiment.run import run_seed
from fedveil.session.results import Result
from tests.refusals import refuses


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def numbers(tmp_path: Path, rng: np.random.Generator) -> Path:
    x = rng.normal(size=(300, 2))
    y = 100 + 20 * x[:, 0] - 10 * x[:, 1] + rng.normal(size=300)
    path = tmp_path / "numbers.csv"
    path.write_text("a,b,y\n" + "".join(f"{a},{b},{c}\n" for (a, b), c in zip(x, y, strict=True)))
    return path


@pytest.fixture
def times(tmp_path: Path, rng: np.random.Generator) -> Path:
    x = rng.normal(size=(300, 2))
    time = rng.exponential(np.exp(-x[:, 0])) * 100
    end = rng.uniform(20, 400, 300)
    rows = [f"{a},{b},{min(t, c)},{int(t <= c)}\n" for (a, b), t, c in zip(x, time, end, strict=True)]
    path = tmp_path / "times.csv"
    path.write_text("a,b,days,died\n" + "".join(rows))
    return path


def trained(path: Path, tmp_path: Path, method: dict[str, Any] | None = None, **task: Any) -> Result:
    options = {"path": str(path), **task.pop("options")}
    config = make_config(
        {
            "task": {"dataset": "table", "model": "logistic", "data_options": options, **task},
            "partition": {"clients": 3},
            "method": method or {"name": "fedavg", "lr": 0.1, "batch_size": 16},
            "run": {"rounds": 15},
        }
    )
    return run_seed(config, 0, experiment="t", results=tmp_path / "results")


@pytest.mark.parametrize("loss", [None, "huber"])
def test_a_number_is_learned_and_predicted_in_its_units(
    numbers: Path, tmp_path: Path, loss: str | None
) -> None:
    found = trained(numbers, tmp_path, options={"label": "y", "target": "number"}, loss=loss)
    assert found.summary["accuracy"] is None
    assert found.summary["rmse"] < 2.0
    assert found.summary["r2"] > 0.95
    assert found.summary["metrics"]["all"]["rmse"]["value"] == pytest.approx(found.summary["rmse"])
    assert found.folder is not None
    new = tmp_path / "new.csv"
    new.write_text("a,b\n0,0\n1,0\n")
    answer = CliRunner().invoke(
        app, ["predict", str(found.folder), str(new), "-o", str(tmp_path / "out.csv")]
    )
    assert answer.exit_code == 0, answer.output
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert float(rows[0]["y"]) == pytest.approx(100, abs=3)
    assert float(rows[1]["y"]) == pytest.approx(120, abs=3)


@pytest.mark.parametrize("intervals", [[25, 50, 100, 200], []])
def test_survival_times_are_learned(times: Path, tmp_path: Path, intervals: list[float]) -> None:
    options = {"label": "days", "event": "died", "target": "survival", "intervals": intervals}
    found = trained(times, tmp_path, options=options)
    assert found.summary["concordance"] > 0.65
    assert found.folder is not None
    out = tmp_path / "out.csv"
    answer = CliRunner().invoke(app, ["predict", str(found.folder), str(times), "-o", str(out)])
    assert answer.exit_code == 0, answer.output
    first = next(iter(csv.DictReader(io.StringIO(out.read_text()))))
    if intervals:
        shown = [float(value) for value in first.values()]
        assert next(iter(first)) == "no event until 25"
        assert shown == sorted(shown, reverse=True)
    else:
        assert list(first) == ["risk"]


def test_hazards_work_with_record_level_privacy_and_cox_is_refused(times: Path, tmp_path: Path) -> None:
    method = {"name": "dp-fedsgd", "record_rate": 0.5, "noise_multiplier": 1.0}
    options = {"label": "days", "event": "died", "target": "survival", "intervals": [50, 100]}
    found = trained(times, tmp_path, method, options=options)
    assert any(row["unit"] == "record" and row["epsilon"] for row in found.summary["privacy"]["proven"])
    with pytest.raises(InputError) as caught:
        trained(times, tmp_path, method, options={k: v for k, v in options.items() if k != "intervals"})
    assert caught.value.field == "task.data_options.intervals"


def test_class_weights_favour_the_rare_class(tmp_path: Path, rng: np.random.Generator) -> None:
    y = (rng.uniform(size=400) < 0.1).astype(int)
    x = rng.normal(size=400) + y
    path = tmp_path / "rare.csv"
    path.write_text("a,y\n" + "".join(f"{a},{b}\n" for a, b in zip(x, y, strict=True)))
    plain = trained(path, tmp_path, options={"label": "y"})
    weighted = trained(path, tmp_path, options={"label": "y"}, class_weights=[1.0, 9.0])
    recall = [run.summary["per_class"][1] for run in (plain, weighted)]
    assert recall[0] < 0.3 < 0.5 < recall[1]
    with pytest.raises(InputError) as caught:
        trained(path, tmp_path, options={"label": "y"}, class_weights=[1.0])
    assert caught.value.field == "task.class_weights"


@pytest.mark.parametrize(
    ("content", "options", "field"),
    [
        ("a,y\n1,2\n2,tall\n", {"label": "y", "target": "number"}, "y"),
        ("a,y\n1,2\n2,\n", {"label": "y", "target": "number"}, "missing"),
        ("a,t,e\n1,-2,1\n2,3,0\n", {}, "t"),
        ("a,t,e\n1,2,1\n2,3,2\n", {}, "e"),
        ("a,t,e\n1,2,1\n2,soon,0\n", {}, "t"),
    ],
)
def test_wrong_targets_name_file_row_and_column(
    tmp_path: Path, content: str, options: dict[str, Any], field: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(content)
    said = options or {"label": "t", "target": "survival", "event": "e", "intervals": [1, 5]}
    with refuses(field, DataError):
        load_table(path=path, test_fraction=0.0, **said)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"target": "rank"}, "target"),
        ({"target": "survival"}, "event"),
        ({"target": "survival", "event": "b", "intervals": [3, 2]}, "intervals"),
        ({"target": "number", "intervals": [3]}, "intervals"),
    ],
)
def test_keys_that_do_not_fit_the_target_are_refused(
    numbers: Path, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InputError) as caught:
        load_table(path=numbers, label="y", **options)
    assert caught.value.field == field


def test_a_schema_keeps_its_target(times: Path, tmp_path: Path) -> None:
    made = load_table(path=times, label="days", target="survival", event="died", intervals=[10, 20])
    assert made.schema is not None
    write_schema(made.schema, tmp_path / "schema.toml")
    read = read_schema(tmp_path / "schema.toml")
    assert (read.target, read.event, read.intervals) == ("survival", "died", (10.0, 20.0))


def test_methods_that_make_examples_of_classes_refuse_numbers(numbers: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        trained(numbers, tmp_path, {"name": "feddm"}, options={"label": "y", "target": "number"})
    assert caught.value.field == "method.name"
