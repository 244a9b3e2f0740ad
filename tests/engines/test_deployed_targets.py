"""Numbers, survival times, class weights and people in a federation: as in the simulator, or refused by the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

pytest.importorskip("flwr")
from flwr.app import Context, RecordDict

from fedveil.data.columns import ColumnOptions, classes_of, fit_schema
from fedveil.data.raw_table import read_table
from fedveil.data.schema import read_schema, write_schema
from fedveil.engines.flower.wire import RefusalError
from fedveil.errors import FedveilError, InputError
from fedveil.experiment.config import Config, make_config
from fedveil.experiment.run import run_seed
from fedveil.federation.client_app import node_of
from fedveil.federation.launch import with_shape
from fedveil.federation.node import checked_node
from fedveil.federation.run_settings import RunSettings
from fedveil.methods import METHODS
from tests.contract.federation import distance
from tests.engines.test_deployed_nodes import deployed

HEAD = "hospital,patient,a,b,cost,days,died,ill"
PRIVATE = {"name": "dp-fedavg", "unit": "record", "clip": 1.0, "noise_multiplier": 1.0, "lr": 0.1}
PLAIN = {"name": "fedavg", "lr": 0.1, "batch_size": 16}
TARGETS: dict[str, dict[str, Any]] = {
    "squared": {"options": {"label": "cost", "target": "number"}},
    "huber": {"options": {"label": "cost", "target": "number"}, "loss": "huber"},
    "hazard": {
        "options": {"label": "days", "target": "survival", "event": "died", "intervals": [20, 60, 150]}
    },
    "cox": {"options": {"label": "days", "target": "survival", "event": "died"}},
    "weights": {"options": {"label": "ill"}, "class_weights": [1.0, 3.0]},
}


@pytest.fixture
def rows() -> list[str]:
    rng = np.random.default_rng(3)
    made = []
    for hospital in range(2):
        for patient in range(60 + 20 * hospital):
            a, b = rng.normal(size=2)
            time, end = rng.exponential(np.exp(-a)) * 100, rng.uniform(20, 300)
            said = f"{100 + 20 * a},{min(time, end)},{int(time <= end)},{['no', 'yes'][int(a + b > 0)]}"
            made.append(f"h{hospital},p{patient // 2},{a},{b},{said}")
    return made


def table(path: Path, rows: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([HEAD, *rows]) + "\n")
    return path


class Hospitals:
    """One table, its schema, and a node for each hospital that holds its own rows."""

    def __init__(
        self, place: Path, rows: list[str], said: Mapping[str, Any], data: Mapping[str, Any]
    ) -> None:
        self.place = place
        whole, test = table(place / "all.csv", rows), table(place / "test.csv", rows[:40])
        options = dict(said["options"])
        label, self.task = options.pop("label"), {k: v for k, v in said.items() if k != "options"}
        drop = [n for n in HEAD.split(",") if n not in ("a", "b", label, options.get("event"))]
        columns = ColumnOptions(drop=drop, **options)
        raw = read_table(whole)
        made = fit_schema(raw, label=label, classes=classes_of([raw], label, columns), options=columns)
        write_schema(made, place / "schema.toml")
        self.options = {
            "path": str(whole),
            "test_path": str(test),
            "label": label,
            "schema": str(place / "schema.toml"),
            "user": "hospital",
            "drop": [],
        }
        self.folders = [self._node(k, [r for r in rows if r.startswith(f"h{k},")], data) for k in range(2)]

    def _node(self, client: int, rows: list[str], data: Mapping[str, Any]) -> Path:
        folder = self.place / f"node-{client}"
        table(folder / "data.csv", rows)
        write_schema(read_schema(self.place / "schema.toml"), folder / "schema.toml")
        section = {"reader": "table", "path": "data.csv", "schema": "schema.toml", **data}
        node = {"name": f"node-{client}", "client": client, "data": section}
        (folder / "node.toml").write_text(tomli_w.dumps(node | {"testing": {"seeded_noise": True}}))
        policy = {"methods": sorted(METHODS), "minimum_cohort": 1}
        (folder / "policy.toml").write_text(tomli_w.dumps(policy))
        return folder

    def config(self, engine: str, method: Mapping[str, Any], **options: Any) -> Config:
        partition = {"kind": "user"} if engine == "simulation" else {"clients": 2}
        run = {"rounds": 3, "engine": engine, "execution": "one-by-one", "workers": 1, "noise": "seeded"}
        if engine == "flower":
            del run["noise"]
        return make_config(
            {
                "task": {
                    "dataset": "table",
                    "model": "logistic",
                    "data_options": self.options | options,
                    **self.task,
                },
                "partition": partition,
                "method": dict(method),
                "run": run,
            }
        )

    def join(self, config: Config, client: int = 0) -> None:
        """What the node does first when a server asks it."""
        given = RunSettings(config, 0, "test", self.place).to_run_config()
        node_of(Context(1, 1, {"fedveil-node": str(self.folders[client])}, RecordDict(), dict(given)))


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("method", [PLAIN, PRIVATE], ids=lambda method: method["name"])
def test_nodes_learn_every_target_as_the_simulator_does(
    name: str, method: dict[str, Any], tmp_path: Path, rows: list[str]
) -> None:
    hospitals = Hospitals(tmp_path, rows, TARGETS[name], {})
    if name == "cox" and method is PRIVATE:
        with pytest.raises(InputError) as refused:
            run_seed(hospitals.config("simulation", method), 0, experiment="t", results=tmp_path)
        assert refused.value.field == "task.data_options.intervals"
        with pytest.raises(FedveilError):
            deployed(hospitals.config("flower", method), hospitals.folders, tmp_path / "there")
        assert not any((folder / "state" / "ledger.jsonl").exists() for folder in hospitals.folders)
        return
    here = run_seed(hospitals.config("simulation", method), 0, experiment="t", results=tmp_path / "here")
    there = deployed(hospitals.config("flower", method), hospitals.folders, tmp_path / "there")
    assert distance(here.model, there.model) == 0
    assert there.summary["metrics"]["all"] == here.summary["metrics"]["all"]
    assert there.summary["privacy"]["proven"] == here.summary["privacy"]["proven"]
    assert there.summary["prediction"] == here.summary["prediction"]


def test_a_server_with_nothing_but_the_schema_can_submit(tmp_path: Path, rows: list[str]) -> None:
    hospitals = Hospitals(tmp_path, rows, TARGETS["squared"], {})
    task = {"dataset": "none", "model": "logistic", "data_options": {"schema": hospitals.options["schema"]}}
    given = {
        "task": task,
        "partition": {"clients": 2},
        "method": PLAIN,
        "run": {"rounds": 2, "engine": "flower"},
    }
    config = with_shape(make_config(given), None)
    assert (config.task.input_shape, config.task.classes, config.task.loss) == ([2], 1, "squared")
    found = deployed(make_config(given), hospitals.folders, tmp_path / "results")
    assert found.summary["prediction"]["outputs"] == 1
    assert found.summary["prediction"]["schema"]["label_std"] > 1
    assert found.summary["classes"] == []


@pytest.mark.parametrize(
    ("held", "change", "field"),
    [
        ("squared", {"loss": None, "classes": 2}, "task.classes"),  # the server would train classes
        ("squared", {"loss": "cox"}, "task.loss"),
        ("weights", {"loss": "squared", "class_weights": None}, "task.loss"),
        ("hazard", {"classes": 4}, "task.classes"),
        ("hazard", {"loss": "cox"}, "task.loss"),
        ("weights", {"class_weights": [1.0, 2.0, 3.0]}, "task.class_weights"),
    ],
)
def test_a_node_refuses_a_loss_that_its_schema_does_not_have(
    held: str, change: dict[str, Any], field: str, tmp_path: Path, rows: list[str]
) -> None:
    hospitals = Hospitals(tmp_path, rows, TARGETS[held], {})
    config = with_shape(hospitals.config("flower", PLAIN), None)
    hospitals.join(config)
    other = config.model_copy(update={"task": config.task.model_copy(update=change)})
    with pytest.raises(RefusalError) as refused:
        hospitals.join(other)
    assert (refused.value.reason, refused.value.field) == ("configuration", field)


def test_one_output_is_no_class_on_a_server_without_data() -> None:
    task = {"dataset": "none", "input_shape": [2], "classes": 1, "model": "logistic"}
    with pytest.raises(InputError) as refused:
        make_config({"task": task, "partition": {"clients": 2}, "run": {"engine": "flower"}})
    assert refused.value.field == "task.classes"


def test_nodes_bound_the_rows_of_a_person_and_the_statement_includes_the_bound(
    tmp_path: Path, rows: list[str]
) -> None:
    hospitals = Hospitals(tmp_path, rows, TARGETS["weights"], {"person": "patient", "rows_per_person": 1})
    assert [len(checked_node(folder).held) for folder in hospitals.folders] == [30, 40]
    config = hospitals.config("flower", PRIVATE, person="patient")
    found = deployed(config, hospitals.folders, tmp_path / "results")
    assert found.summary["plan"]["smallest_client"] == 30
    (row,) = [r for r in found.summary["privacy"]["proven"] if r["adversary"] == "server"]
    persons = found.summary["privacy"]["persons"]
    assert {r["adversary"]: r["epsilon"] for r in persons}["server"] == row["epsilon"]
    assert "column 'patient'" in found.summary["privacy_in_words"]


@pytest.mark.parametrize(
    ("data", "asked"),
    [
        ({}, {"person": "patient"}),  # this node declares no column of persons
        ({"person": "patient", "rows_per_person": 2}, {"person": "patient", "rows_per_person": 1}),
        ({"person": "patient"}, {"rows_per_person": 3}),  # of no column of persons
        ({"person": "patient"}, {"person": "patient", "rows_per_person": 0}),
        ({"person": "patient"}, {"person": "patient", "rows_per_person": "many"}),
    ],
)
def test_a_node_refuses_a_run_that_promises_people_more_than_it_keeps(
    data: dict[str, Any], asked: dict[str, Any], tmp_path: Path, rows: list[str]
) -> None:
    hospitals = Hospitals(tmp_path, rows, TARGETS["weights"], data)
    config = with_shape(hospitals.config("flower", PRIVATE), None)
    hospitals.join(config)
    options = config.task.data_options | asked
    other = config.model_copy(update={"task": config.task.model_copy(update={"data_options": options})})
    with pytest.raises(RefusalError) as refused:
        hospitals.join(other)
    assert refused.value.field == "task.data_options.rows_per_person"
