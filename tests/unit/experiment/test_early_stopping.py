"""Early stopping on public examples: only rounds that ran are charged, and private records never decide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedveil
from fedveil.data.notes import STOPPING_NOTE
from fedveil.data.registry import load_dataset
from fedveil.data.shared_records import shared_records
from fedveil.errors import InputError
from fedveil.experiment.compare import compositions
from fedveil.experiment.config import Config, build_method, make_config
from fedveil.experiment.run import run_seed
from fedveil.privacy.accounting import account
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.releases import Plan
from fedveil.session.loop import Callback, RoundEnd
from fedveil.session.options import EarlyStopping
from fedveil.session.results import Result
from fedveil.session.statement_file import verify

METHOD = {"name": "dp-fedsgd", "lr": 4.0, "noise_multiplier": 3.0, "record_rate": 1.0}


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    for name, rows in (("private", 300), ("public", 60)):
        x = rng.normal(size=(rows, 3))
        y = np.where(x[:, 0] + 0.3 * rng.normal(size=rows) > 0, "yes", "no")
        lines = [
            f"{k % 3},{a},{b},{c},{label}" for k, ((a, b, c), label) in enumerate(zip(x, y, strict=True))
        ]
        text = "\n".join(["site,a,b,c,ill", *lines]) + "\n"
        (tmp_path / f"{name}.csv").write_text(
            text if name == "private" else text.replace("site,", "other,", 1)
        )
    return tmp_path


def config(place: Path, stop: dict[str, Any] | None = None, **run: Any) -> Config:
    options = {"path": str(place / "private.csv"), "label": "ill", "user": "site"}
    section = {"public": str(place / "public.csv"), "metric": "accuracy", "patience": 3} | (stop or {})
    section = {key: value for key, value in section.items() if value is not None}
    return make_config(
        {
            "task": {"dataset": "table", "model": "logistic", "data_options": options},
            "partition": {"kind": "user"},
            "method": METHOD,
            "run": {"rounds": 40, "noise": "seeded", "workers": 1, "early_stopping": section} | run,
        }
    )


def planned(made: Config, delta: float) -> Config:
    """The configuration without early stopping, with this delta."""
    updates = {"run": {"early_stopping": None}, "privacy": {"delta": delta}}
    parts = {name: getattr(made, name).model_copy(update=update) for name, update in updates.items()}
    return made.model_copy(update=parts)


def run(made: Config, place: Path, *callbacks: Callback) -> Result:
    return run_seed(made, 0, experiment="t", results=place / "results", callbacks_for=lambda _: callbacks)


def server(found: Result) -> float:
    return float({r["adversary"]: r["epsilon"] for r in found.summary["privacy"]["proven"]}["server"])


def test_only_rounds_that_ran_are_charged_and_stated(tables: Path) -> None:
    found = run(config(tables), tables)
    rounds = found.summary["rounds"]
    assert 4 <= rounds < 40
    assert "public" in found.summary["stopped"]
    assert found.folder is not None
    charged = {entry.round for entry in Ledger(found.folder / "ledger.jsonl").entries}
    assert charged == set(range(1, rounds + 1))
    rows = found.summary["privacy"]["proven"]
    assert {row["ends"] for row in rows} == {37}, "after round 4 to 40"
    assert f"{rows[0]['delta']:g}, divided among the 37 rounds" in found.summary["privacy_in_words"]
    whole = run(planned(config(tables, rounds=rounds), delta=1e-5 / 37), tables / "whole")
    assert server(found) == pytest.approx(server(whole))
    assert all(check.passed for check in verify(found.folder))
    scores = [line["public_accuracy"] for line in found.history]
    assert max(scores[-3:]) <= max(scores[:-3])
    assert EarlyStopping("accuracy", 3).reason(scores[:-1]) is None, "it stopped at the first reason"


def test_a_target_is_met_whichever_round_is_the_last(tables: Path) -> None:
    made = config(tables, {"patience": 10}, rounds=12)
    target = {"target_epsilon": 3.0, "target_adversary": "server"}
    found = run(made.model_copy(update={"privacy": made.privacy.model_copy(update=target)}), tables)
    assert found.summary["rounds"] == 12
    assert 2.9 < server(found) <= 3.0


def test_runs_that_ended_early_are_composed_as_planned(tables: Path) -> None:
    stopped = [run_seed(config(tables), seed, experiment="t", results=tables / "results") for seed in (0, 1)]
    folders = [found.folder for found in stopped if found.folder is not None]
    (together,) = compositions(folders)
    assert all(found.summary["rounds"] < 40 for found in stopped)
    method = build_method(METHOD)
    expected = account(method.releases(Plan(3, 3, "fixed", 1)), Plan(3, 3, "fixed", 80), 1e-5)
    assert [row.epsilon for row in together.composed] == pytest.approx([row.epsilon for row in expected])


class Crash(Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def round_ends(self, end: RoundEnd) -> None:
        if end.at.round == self.after:
            raise KeyboardInterrupt


def test_a_resumed_run_stops_at_the_same_round(tables: Path) -> None:
    made = config(tables, checkpoint_every=1)
    whole = run(made, tables / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(made, tables, Crash(whole.summary["rounds"] - 1))
    again = run(made, tables)
    assert again.summary["rounds"] == whole.summary["rounds"]
    assert all(torch.equal(again.model[name], whole.model[name]) for name in whole.model)


@pytest.mark.parametrize("kept", [300, 50])
def test_a_copy_of_private_rows_is_not_public(kept: int, tables: Path) -> None:
    lines = (tables / "private.csv").read_text().splitlines()
    (tables / "copy.csv").write_text("\n".join([lines[0], *lines[1 : 1 + kept]]) + "\n")
    require_refused(config(tables, {"public": str(tables / "copy.csv")}), "run.early_stopping.public", tables)


def test_private_records_never_decide_when_training_stops(tables: Path) -> None:
    own = config(tables).task.data_options
    by_path = config(tables, {"public": own["path"]})
    by_name = config(tables, {"public": None, "dataset": "table", "data_options": own})
    require_refused(by_path, "run.early_stopping.public", tables)
    require_refused(by_name, "run.early_stopping.dataset", tables)


def require_refused(made: Config, field: str, place: Path) -> None:
    with pytest.raises(InputError) as refused:
        run(made, place)
    assert refused.value.field == field
    assert not list((place / "results").rglob("ledger.jsonl"))


@pytest.mark.parametrize(
    ("stop", "field"),
    [
        ({"public": None}, "run.early_stopping.public"),
        ({"dataset": "digits"}, "run.early_stopping.public"),
        ({"data_options": {"max_train": 5}}, "run.early_stopping.data_options"),
        ({"metric": "beauty"}, "run.early_stopping.metric"),
        ({"metric": "rmse"}, "run.early_stopping.metric"),
        ({"patience": 0}, "run.early_stopping.patience"),
    ],
)
def test_what_cannot_stop_a_run_is_refused(stop: dict[str, Any], field: str, tables: Path) -> None:
    with pytest.raises(InputError) as refused:
        run(config(tables, stop), tables)
    assert refused.value.field == field


def test_a_public_data_set_by_name(tables: Path) -> None:
    options = {"path": str(tables / "public.csv"), "label": "ill", "user": "other"}
    made = config(tables, {"public": None, "dataset": "table", "data_options": options}, rounds=3)
    assert "public_accuracy" in run(made, tables).history[0]


def test_another_draw_of_the_data_set_shares_records(tmp_path: Path) -> None:
    made = make_config(
        {
            "task": {"dataset": "digits", "model": "logistic", "data_options": {"max_train": 200}},
            "partition": {"clients": 4},
            "method": METHOD,
            "run": {"early_stopping": {"dataset": "digits", "data_options": {"seed": 5}}},
        }
    )
    require_refused(made, "run.early_stopping.dataset", tmp_path)


@pytest.mark.parametrize("copied", [1, 30, 300])
def test_a_copy_of_private_rows_beside_other_rows_is_refused(copied: int, tables: Path) -> None:
    private, public = ((tables / f"{name}.csv").read_text().splitlines() for name in ("private", "public"))
    rows = [*private[1 : 1 + copied], *public[1:]]
    relabelled = [row.replace("yes", "no") if k % 2 else row for k, row in enumerate(rows)]
    (tables / "mixed.csv").write_text("\n".join([private[0], *relabelled]) + "\n")
    require_refused(
        config(tables, {"public": str(tables / "mixed.csv")}), "run.early_stopping.public", tables
    )


def of_categories(count: int, columns: int, seed: int) -> torch.Tensor:
    """Records of independent answers, yes or no."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 2, (count, columns))).float()


@pytest.mark.parametrize("columns", [3, 6, 9, 12])
def test_coincidences_of_few_categories_are_accepted(columns: int) -> None:
    train, test = of_categories(450, columns, 1).split([400, 50])
    assert all(shared_records(of_categories(100, columns, 10 + k), train, test) is None for k in range(20))


@pytest.mark.parametrize("columns", [9, 12])
def test_more_than_coincidences_are_refused(columns: int) -> None:
    rows = of_categories(450, columns, 1)
    mixed = torch.cat([rows[:80], of_categories(20, columns, 2)])
    assert shared_records(mixed, rows) is not None


def test_all_records_in_another_order_are_refused_whatever_they_are() -> None:
    rows = of_categories(450, 3, 1)
    assert shared_records(rows[:-50].flip(0), *rows.split([400, 50])) is not None


def test_python_refuses_the_clients_records_as_public_ones() -> None:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    task = fedveil.Task(lambda: fedveil.make_model("logistic", (4,), 2))
    clients = [(x[k::3], y[k::3]) for k in range(3)]
    stop = fedveil.EarlyStopping("accuracy", patience=2)
    with pytest.raises(InputError) as refused:
        fedveil.run(
            task,
            clients,
            build_method({"name": "fedavg"}),
            rounds=2,
            early_stopping=stop,
            public=(torch.cat([x[:1], x[:20] + 1.0]), torch.cat([y[:1], y[:20]])),
        )
    assert refused.value.field == "public"


def test_the_statement_says_who_declares_the_examples_public(tables: Path) -> None:
    found = run(config(tables, rounds=2), tables)
    assert STOPPING_NOTE in found.summary["privacy"]["data"]
    assert STOPPING_NOTE in found.summary["privacy_in_words"].replace("\n", " ")


def test_python_takes_public_examples_too() -> None:
    data = load_dataset("digits", max_train=300, max_test=50)
    assert hasattr(data, "input_shape")
    task = fedveil.Task(lambda: fedveil.make_model("logistic", (1, 8, 8), 10))
    clients = [(data.train.x[k::3], data.train.y[k::3]) for k in range(3)]  # type: ignore[union-attr]
    found = fedveil.run(
        task,
        clients,
        build_method({"name": "fedavg", "lr": 5.0}),
        rounds=50,
        early_stopping=fedveil.EarlyStopping("accuracy", patience=2),
        public=data.test,  # type: ignore[arg-type]
    )
    assert found.summary["rounds"] < 50


def test_a_score_counts_as_better_only_beyond_min_delta() -> None:
    rule = EarlyStopping("loss", patience=2, min_delta=0.1)
    assert rule.reason([1.0, 0.95]) is None
    assert rule.reason([1.0, 0.95, 0.92]) is not None
    assert rule.reason([1.0, 0.95, 0.85]) is None
    assert EarlyStopping("r2", patience=1).reason([0.5, 0.6]) is None
    assert EarlyStopping("r2", patience=1).reason([0.5, 0.5]) is not None
