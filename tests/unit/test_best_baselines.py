"""experiments/best/baselines.py: the other methods get the recommended one's federation, and a tuning that is fair."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from fedveil.experiment.config import Config, load_config, make_config
from fedveil.experiment.target import method_of
from fedveil.privacy.releases import Plan
from tests.refusals import refuses
from tests.scripts import load_script

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "best"


@pytest.fixture(scope="module")
def baselines() -> ModuleType:
    return load_script("experiments/best/baselines.py")


def test_every_method_has_eight_trials_of_runnable_settings(baselines: ModuleType) -> None:
    for one in baselines.read_baselines():
        assert one.trials() == 8
        assert len(one.recommended) == len(one.epsilons)
        for stage in one.stages:
            for name, options in stage.items():
                for option in options:
                    one.config({**one.start, name: option}, one.epsilons[0], held_out=True).build_method()


def test_federation_and_guarantee_are_those_of_the_recommended_method(baselines: ModuleType) -> None:
    for one in baselines.read_baselines():
        theirs, ours = one.config(one.start, 1.5, held_out=False), load_config(FOLDER / one.file)
        assert theirs.partition == ours.partition
        assert theirs.aggregation == ours.aggregation
        assert theirs.privacy == ours.privacy.model_copy(update={"target_epsilon": 1.5})
        assert (theirs.run.sampler, theirs.run.cohort) == (ours.run.sampler, ours.run.cohort)
        assert theirs.task.dataset == ours.task.dataset


def test_trials_hold_images_out_and_tests_do_not(baselines: ModuleType) -> None:
    for one in baselines.read_baselines():
        trial = one.config(one.start, 1.0, held_out=True).partition.holdout
        assert trial * baselines.IMAGES[one.data] == pytest.approx(baselines.HELD_OUT)
        assert one.config(one.start, 1.0, held_out=False).partition.holdout == 0


def test_every_epsilon_is_that_of_the_row_it_is_compared_with(baselines: ModuleType) -> None:
    records = {path.stem: json.loads(path.read_text()) for path in (FOLDER / "records").glob("*.json")}
    for one in baselines.read_baselines():
        for epsilon, row in zip(one.epsilons, one.recommended, strict=True):
            assert records[row]["epsilon"] == pytest.approx(epsilon, rel=0.01)


def test_records_are_of_the_present_grids_and_of_the_best_trial(baselines: ModuleType) -> None:
    known = {one.key: one for one in baselines.read_baselines()}
    for path in baselines.RECORDS.glob("*.json"):
        record = json.loads(path.read_text())
        one = known[record["baseline"]]
        assert path == one.record
        assert record["command"] == one.command
        assert len(record["trials"]) == 8
        assert record["trials"][0]["values"] == one.start
        best = max(record["trials"], key=lambda trial: float(trial["held_out"]))
        assert record["chosen"] == best["values"]
        assert [test["asked"] for test in record["tests"]] == list(one.epsilons)
        ours = load_config(FOLDER / one.file).privacy
        for test in record["tests"]:
            assert test["config"] == one.config(record["chosen"], test["asked"], held_out=False).identity()
            assert 0.98 * test["asked"] <= test["epsilon"] <= test["asked"]
            assert (test["unit"], test["adversary"]) == (ours.target_unit, ours.target_adversary)
            assert test["delta"] == ours.delta


def test_a_stage_keeps_what_was_best_before_it(baselines: ModuleType, tmp_path: Path) -> None:
    digits = replace(
        next(one for one in baselines.read_baselines() if one.key == "server/mnist/udp-fedavg"),
        file=str(_small_federation(tmp_path)),
        task={"dataset": "digits", "model": "logistic"},
        epsilons=(50.0, 20.0),
        recommended=("a", "b"),
        start={"lr": 1e-6, "clip": 1.0, "batch_size": 100, "rounds": 1},
        stages=[{"lr": [1.0]}, {"rounds": [2]}],
    )
    record = baselines.measure(digits, tmp_path, [0, 1])
    first, second, third = record["trials"]
    assert second["held_out"] > first["held_out"], "a step size of almost zero learns nothing"
    assert third["values"] == {**second["values"], "rounds": 2}
    assert record["chosen"]["lr"] == 1.0
    assert [len(test["runs"]) for test in record["tests"]] == [2, 2]
    assert all(test["epsilon"] <= test["asked"] for test in record["tests"])
    written = sorted(path.stat().st_mtime_ns for path in tmp_path.glob("**/summary.json"))
    assert baselines.measure(digits, tmp_path, [0, 1]) == record
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.glob("**/summary.json")) == written


def _small_federation(folder: Path) -> Path:
    path = folder / "federation.toml"
    path.write_text(
        """
        partition = { clients = 10 }
        method = { name = "fedavg" }
        run = { rounds = 3, sampler = "all", workers = 1 }
        privacy = { delta = 1e-3, target_epsilon = 1.0, target_adversary = "observer", target_unit = "client" }
        """
    )
    return path


def test_what_the_page_says_is_refused_is_refused(baselines: ModuleType) -> None:
    """docs/best.md names the reasons for which a published form is absent."""
    records = {"name": "udp-fedavg", "noise_scope": "local"}
    with refuses("privacy.target_epsilon", value=2.38):
        _calibrated(_with_method(baselines, "record-mnist.toml", records))
    with refuses("method.restart", value="slot"):
        _with_method(baselines, "server-mnist.toml", {"name": "fedceo"})
    slot, mean = (
        _calibrated(_with_method(baselines, "user-mnist.toml", {"name": "fedceo", "restart": restart}))
        for restart in ("slot", "mean")
    )
    assert slot / mean == pytest.approx(4.2, abs=0.1)


def _with_method(baselines: ModuleType, file: str, method: dict[str, str]) -> Config:
    return make_config(
        baselines.tomllib.loads((FOLDER / file).read_text())
        | {"task": {"dataset": "mnist", "model": "mlp-2"}, "method": method}
    )


def _calibrated(config: Config) -> float:
    clients = config.partition.clients
    assert clients is not None
    cohort, share = config.run.cohort or clients, 60000 // clients
    _, found = method_of(config, Plan(clients, cohort, config.run.sampler, config.run.rounds, share, share))
    assert found is not None
    return found.noise_multiplier
