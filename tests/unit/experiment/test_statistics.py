"""Private statistics of a table: charged before they are computed, once, and composed with the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.errors import InputError, LedgerError, ResultError
from fedveil.experiment import statistics
from fedveil.experiment.compare import Cell
from fedveil.experiment.config import Config, make_config
from fedveil.experiment.prepare import prepare, result_folder
from fedveil.experiment.run import run_seed
from fedveil.experiment.selection import SelectionSettings, plan_selection
from fedveil.privacy.accounting import account
from fedveil.privacy.bounded_moments import BoundedMoments
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.releases import Plan
from fedveil.session.results import Result
from fedveil.session.statement_file import STATISTICS, verify

SCHEMA = """
label = "ill"
classes = ["no", "yes"]
missing = "{missing}"
[[column]]
name = "age"
low = 0
high = 120
[[column]]
name = "chol"
low = 100
high = 600
[[column]]
name = "sex"
categories = ["f", "m"]
"""
METHOD = {"name": "dp-fedavg", "unit": "record", "noise_multiplier": 2.0, "clip": 1.0, "lr": 0.1}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rng = np.random.default_rng(5)
    rows = []
    for k in range(600):
        ill = ["no", "yes"][int(rng.random() > 0.5)]
        rows.append(f"h{k % 3},{rng.normal(60, 8):.1f},{rng.normal(240, 40):.0f},{'fm'[k % 2]},{ill}")
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["hospital,age,chol,sex,ill", *rows]) + "\n")
    (tmp_path / "schema.toml").write_text(SCHEMA.format(missing="refuse"))
    return path


def config(table: Path, method: dict[str, Any] | None = None, **sections: Any) -> Config:
    options = {
        "path": str(table),
        "label": "ill",
        "user": "hospital",
        "schema": str(table.parent / "schema.toml"),
        "statistics": "private",
        "statistics_noise": 4.0,
    } | sections.pop("options", {})
    run = {"rounds": 3, "noise": "seeded", "workers": 1} | sections.pop("run", {})
    task = {"dataset": "table", "model": "logistic", "data_options": options}
    return make_config(
        {"task": task, "partition": {"kind": "user"}, "method": method or METHOD, "run": run, **sections}
    )


def run(made: Config, tmp_path: Path) -> Result:
    return run_seed(made, 0, experiment="t", results=tmp_path / "results")


def test_scales_are_computed_with_noise_and_the_statement_covers_them(table: Path, tmp_path: Path) -> None:
    found = run(config(table), tmp_path)
    assert found.folder is not None
    told = json.loads((found.folder / STATISTICS).read_text())["columns"]
    assert set(told) == {"age", "chol"}
    assert told["age"]["mean"] == pytest.approx(60, abs=6)
    assert told["age"]["mean"] != pytest.approx(60, abs=1e-6)
    columns = {c["name"]: c for c in found.summary["prediction"]["schema"]["column"]}
    assert columns["age"]["mean"] == told["age"]["mean"]
    # the same run with constants proves less epsilon, by exactly the statistics' release
    made = config(table)
    prepared = prepare(made, 0)
    rows = account(prepared.method.releases(prepared.plan), prepared.plan, 1e-5)
    server = next(row for row in rows if row.adversary == "server")
    stated = {r["adversary"]: r["epsilon"] for r in found.summary["privacy"]["proven"]}
    assert stated["server"] == pytest.approx(server.epsilon)
    plain = run(config(table, options={"statistics": "rows", "statistics_noise": None}), tmp_path / "plain")
    assert {r["adversary"]: r["epsilon"] for r in plain.summary["privacy"]["proven"]}["server"] < stated[
        "server"
    ]
    assert "with privacy noise" in found.summary["privacy_in_words"]
    assert "constants of the given schema" in plain.summary["privacy_in_words"]
    assert all(check.passed for check in verify(found.folder)), verify(found.folder)


def test_a_seeded_run_repeats_and_another_seed_draws_other_noise(table: Path, tmp_path: Path) -> None:
    made = config(table)
    first, again = (run(made, tmp_path / place) for place in "ab")
    assert all(torch.equal(first.model[name], again.model[name]) for name in first.model)
    other = run_seed(made, 1, experiment="t", results=tmp_path / "c")
    assert first.summary["prediction"]["schema"] == again.summary["prediction"]["schema"]
    assert first.summary["prediction"]["schema"] != other.summary["prediction"]["schema"]


def entries(folder: Path) -> list[tuple[int, int]]:
    return [(entry.round, entry.attempt) for entry in Ledger(folder / "ledger.jsonl").entries]


@pytest.mark.parametrize("noise", ["seeded", "entropy"])
def test_a_resumed_run_charges_statistics_once(table: Path, tmp_path: Path, noise: str) -> None:
    made = config(table, run={"noise": noise})
    folder = result_folder(made, 0, "t", tmp_path / "results")
    first = prepare(made, 0, folder=folder)
    assert entries(folder) == [(0, 0)]
    again = prepare(made, 0, folder=folder)
    assert entries(folder) == [(0, 0)]
    assert torch.equal(first.dataset.train.x, again.dataset.train.x)
    found = run(made, tmp_path)
    assert [place for place in entries(folder) if place[0] == 0] == [(0, 0)]
    assert found.summary["rounds"] == 3


@pytest.mark.parametrize(("noise", "charged"), [("seeded", 1), ("entropy", 2)])
def test_a_crash_after_the_charge_never_loses_it(
    table: Path, tmp_path: Path, noise: str, charged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh noise is another release, so it is charged again; the same noise is not."""
    made = config(table, run={"noise": noise})
    folder = result_folder(made, 0, "t", tmp_path / "results")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(statistics, "write_atomically", crash)
        with pytest.raises(KeyboardInterrupt):
            prepare(made, 0, folder=folder)
    assert entries(folder) == [(0, 0)]
    assert not (folder / STATISTICS).exists()
    found = run(made, tmp_path)
    assert sum(place[0] == 0 for place in entries(folder)) == charged
    rows = {r["adversary"]: r["epsilon"] for r in found.summary["privacy"]["proven"]}
    assert all(check.passed for check in verify(folder)), verify(folder)
    once = run(config(table, run={"noise": "seeded"}), tmp_path / "once").summary["privacy"]["proven"]
    single = {r["adversary"]: r["epsilon"] for r in once}
    assert (rows["server"] > single["server"]) == (charged == 2)


def test_a_release_is_charged_before_it_is_computed(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(table)
    folder = result_folder(made, 0, "t", tmp_path / "results")
    seen: list[list[tuple[int, int]]] = []
    real = BoundedMoments.noisy_sums

    def watched(self: Any, values: Any, stream: Any) -> Any:
        seen.append(entries(folder))
        return real(self, values, stream)

    monkeypatch.setattr(BoundedMoments, "noisy_sums", watched)
    prepare(made, 0, folder=folder)
    assert seen == [[(0, 0)]] * 3


def test_a_ledger_that_lost_the_statistics_is_refused(table: Path, tmp_path: Path) -> None:
    made = config(table, run={"checkpoint_every": 1})
    folder = result_folder(made, 0, "t", tmp_path / "results")
    run(made, tmp_path)
    (folder / "summary.json").unlink()
    for name in ("ledger.jsonl", "ledger.jsonl.head"):
        (folder / name).unlink()
    with pytest.raises(LedgerError):
        run(made, tmp_path)


def test_statistics_of_a_run_that_has_not_trained_yet_stay_on_its_ledger(table: Path, tmp_path: Path) -> None:
    """The statement of an entropy run is made from the ledger: without the entry it would leave the release out."""
    made = config(table, run={"noise": "entropy"})
    folder = result_folder(made, 0, "t", tmp_path / "results")
    prepare(made, 0, folder=folder)
    for name in ("ledger.jsonl", "ledger.jsonl.head"):
        (folder / name).unlink()
    with pytest.raises(LedgerError):
        run(made, tmp_path)


def test_a_finished_folder_without_its_statistics_is_refused_and_charges_nothing(
    table: Path, tmp_path: Path
) -> None:
    made = config(table)
    folder = run(made, tmp_path).folder
    assert folder is not None
    before = entries(folder)
    (folder / STATISTICS).unlink()
    with pytest.raises(ResultError):
        run(made, tmp_path)
    assert entries(folder) == before


def test_a_budget_that_statistics_exceed_is_refused_before_they_are_computed(
    table: Path, tmp_path: Path
) -> None:
    made = config(table, privacy={"budget": 0.05, "budget_adversary": "server"})
    folder = result_folder(made, 0, "t", tmp_path / "results")
    with pytest.raises(InputError) as refused:
        run(made, tmp_path)
    assert refused.value.field == "privacy.budget"
    assert not (folder / STATISTICS).exists()
    assert entries(folder) == []


@pytest.mark.parametrize("noise", ["seeded", "entropy"])
def test_a_run_without_a_round_states_its_statistics(table: Path, tmp_path: Path, noise: str) -> None:
    (row, *_) = account([BoundedMoments(((-1.0, 1.0),), 4.0).release()], Plan(3, 3, "all", 0), 1e-5)
    alone = row.epsilon
    assert alone is not None
    budget = {"budget": 1.01 * alone, "budget_adversary": "server"}
    made = config(table, run={"noise": noise}, privacy=budget)
    found = run(made, tmp_path)
    assert found.summary["rounds"] == 0
    assert found.folder is not None
    assert {row["adversary"]: row["epsilon"] for row in found.privacy["proven"]}["observer"] == pytest.approx(
        alone
    )
    assert all(check.passed for check in verify(found.folder))


def test_a_target_epsilon_leaves_room_for_the_statistics(table: Path, tmp_path: Path) -> None:
    method = {key: value for key, value in METHOD.items() if key != "noise_multiplier"}
    found = run(config(table, method, privacy={"target_epsilon": 3.0}), tmp_path)
    assert {r["adversary"]: r["epsilon"] for r in found.summary["privacy"]["proven"]}["server"] <= 3.0


def test_a_private_selection_refuses_private_statistics(table: Path) -> None:
    """Its trials would be scaled by the bounds, while the statement speaks of scales with noise."""
    cells = [Cell("t", config(table, METHOD | {"clip": clip}), 0) for clip in (0.5, 1.0)]
    with pytest.raises(InputError) as refused:
        plan_selection(cells, SelectionSettings("public"), None)
    assert refused.value.field == "task.data_options.statistics"


def test_missing_cells_take_the_private_mean(table: Path, tmp_path: Path) -> None:
    rows = table.read_text().splitlines()
    rows[3] = rows[3].replace(rows[3].split(",")[1], "?", 1)
    table.write_text("\n".join(rows) + "\n")
    (tmp_path / "schema.toml").write_text(SCHEMA.format(missing="median"))
    found = run(config(table), tmp_path)
    columns = {c["name"]: c for c in found.summary["prediction"]["schema"]["column"]}
    assert columns["age"]["fill"] == columns["age"]["mean"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"options": {"statistics_noise": None}}, "task.data_options.statistics_noise"),
        ({"options": {"statistics_noise": -1.0}}, "task.data_options.statistics_noise"),
        ({"options": {"statistics_noise": float("nan")}}, "task.data_options.statistics_noise"),
        ({"run": {"engine": "flower-simulation"}}, "task.data_options.statistics"),
        ({"method": {"name": "fedavg"}}, "task.data_options.statistics"),
        ({"method": {"name": "udp-fedavg"}}, "task.data_options.statistics"),
        ({"method": METHOD | {"noise_multiplier": 0.0}}, "task.data_options.statistics"),
    ],
)
def test_private_statistics_are_refused_where_nothing_covers_them(
    change: dict[str, Any], field: str, table: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as refused:
        run(config(table, **change), tmp_path)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("low = 0\nhigh = 120", "low = 0", "high"),
        ("low = 0\nhigh = 120", "low = 5\nhigh = 5", "high"),
        ('categories = ["f", "m"]', 'categories = ["f", "m"]\nlow = 0\nhigh = 1', "high"),
    ],
)
def test_bounds_that_are_none_are_refused(
    old: str, new: str, field: str, table: Path, tmp_path: Path
) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA.format(missing="refuse").replace(old, new))
    with pytest.raises(InputError) as refused:
        run(config(table), tmp_path)
    assert refused.value.field.endswith(field)


def test_private_statistics_without_bounds_are_refused(table: Path, tmp_path: Path) -> None:
    text = (
        SCHEMA.format(missing="refuse")
        .replace("low = 0\nhigh = 120", "")
        .replace("low = 100\nhigh = 600", "")
    )
    (tmp_path / "schema.toml").write_text(text)
    with pytest.raises(InputError) as refused:
        run(config(table), tmp_path)
    assert refused.value.field == "task.data_options.statistics"
