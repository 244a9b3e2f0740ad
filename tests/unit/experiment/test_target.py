"""A target in place of a noise multiplier: what is chosen, what is refused, and where it is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedveil.cli import app
from fedveil.errors import InputError
from fedveil.experiment.advice import suggestions
from fedveil.experiment.config import Config, make_config
from fedveil.experiment.prepare import prepare
from fedveil.experiment.run import run_seed
from fedveil.experiment.target import method_of, with_noise, with_target_noise
from fedveil.privacy.accounting import epsilon_of
from fedveil.privacy.releases import Adversary, Plan, Unit

PLAN = Plan(20, 5, "poisson", 30, 50, 50)


def config(method: dict[str, Any] | None = None, **privacy: Any) -> Config:
    return make_config(
        {
            "task": {"dataset": "digits", "model": "logistic"},
            "partition": {"clients": 20},
            "method": method or {"name": "udp-fedavg"},
            "run": {"rounds": 30, "cohort": 5, "sampler": "poisson"},
            "privacy": {"target_epsilon": 4.0, "target_adversary": "observer"} | privacy,
        }
    )


@pytest.mark.parametrize("adversary", ["observer", "server", "client"])
def test_the_noise_meets_the_target(adversary: str) -> None:
    asked = config(target_adversary=adversary)
    method, found = method_of(asked, PLAN)
    assert found is not None
    assert found.noise_multiplier == method.noise_multiplier  # type: ignore[attr-defined]
    reached = epsilon_of(method.releases(PLAN), PLAN, 1e-5, found.adversary, "client")
    assert reached is not None
    assert 0.98 * 4.0 <= reached <= 4.0


def test_without_a_target_the_files_multiplier_is_used() -> None:
    method, found = method_of(
        config({"name": "udp-fedavg", "noise_multiplier": 0.7}, target_epsilon=None), PLAN
    )
    assert found is None
    assert method.noise_multiplier == 0.7  # type: ignore[attr-defined]


def test_the_multiplier_in_the_file_is_without_effect() -> None:
    some, other = (config({"name": "udp-fedavg", "noise_multiplier": sigma}) for sigma in (0.5, 3.0))
    assert some.identity() == other.identity()
    assert method_of(some, PLAN)[0] == method_of(other, PLAN)[0]
    assert some.identity() != config(target_epsilon=5.0).identity()


@pytest.mark.parametrize(
    ("method", "privacy", "field"),
    [
        ({"name": "fedavg"}, {}, "method.name"),
        ({"name": "dp-fedavg"}, {"target_adversary": "server"}, "privacy.target_epsilon"),
        ({"name": "udp-fedavg"}, {"target_unit": "record"}, "privacy.target_epsilon"),
        ({"name": "udp-fedavg"}, {"target_epsilon": 0.0}, "privacy.target_epsilon"),
        ({"name": "udp-fedavg"}, {"target_adversary": "nobody"}, "privacy.target_adversary"),
    ],
)
def test_what_cannot_be_reached_is_refused(
    method: dict[str, Any], privacy: dict[str, Any], field: str
) -> None:
    with pytest.raises(InputError) as refusal:
        prepare(config(method, **privacy), 0)
    assert refusal.value.field == field


def test_nodes_get_the_calibrated_multiplier() -> None:
    told = with_target_noise(config(), PLAN)
    assert told.privacy.target_epsilon is None
    assert told.build_method() == method_of(config(), PLAN)[0]
    assert with_target_noise(told, PLAN) is told


def test_a_target_that_needs_the_nodes_sizes_is_refused() -> None:
    with pytest.raises(InputError) as refusal:
        with_target_noise(config({"name": "dp-fedprox"}, target_unit="record"), PLAN)
    assert refusal.value.field == "privacy.target_epsilon"


def test_wrappers_are_kept() -> None:
    wrapped = config().model_copy(update={"wrap": [{"name": "model-average"}]})
    assert with_noise(wrapped, 1.0) != with_noise(config(), 1.0)


def test_a_run_records_its_resources(tmp_path: Path) -> None:
    asked = config().model_copy(update={"run": config().run.model_copy(update={"rounds": 2})})
    result = run_seed(asked, 0, experiment="target", results=tmp_path)
    target = result.summary["target"]
    assert target["adversary"] == "observer"
    assert target["noise_multiplier"] > 0
    observed = next(row for row in result.summary["privacy"]["proven"] if row["adversary"] == "observer")
    assert observed["epsilon"] == pytest.approx(target["epsilon"], rel=1e-3)
    assert run_seed(asked, 0, experiment="target", results=tmp_path).summary == result.summary


def advise(path: Path, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["advise", str(path), "--json", *options])
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_advice_reads_no_data(tmp_path: Path) -> None:
    path = tmp_path / "silos.toml"
    path.write_text(
        '[task]\ndataset = "mnist"\nmodel = "logistic"\nfeatures = "scattering"\n'
        "[partition]\nclients = 5\n"
        '[method]\nname = "dp-fedsgd"\n'
        '[run]\nrounds = 100\nsampler = "all"\n'
    )
    answer = advise(path, "--records-per-client", "12000")
    assert answer["parameters"] == 3969 * 10 + 10
    rows = {(row["adversary"], row["epsilon"]): row for row in answer["noise"]}
    assert len(rows) == 9
    assert rows["server", 1.0]["noise_multiplier"] > rows["server", 8.0]["noise_multiplier"] > 0
    assert rows["server", 8.0]["signal_to_noise"] > rows["server", 1.0]["signal_to_noise"] > 0
    assert answer["suggested"][0]["method"] == "dp-fedsgd"
    assert advise(path)["noise"][0]["signal_to_noise"] is None  # sizes are not declared


def test_advice_names_what_is_not_protected(tmp_path: Path) -> None:
    path = tmp_path / "users.toml"
    path.write_text(
        '[partition]\nclients = 100\n[method]\nname = "dp-fedavg"\n[run]\nrounds = 20\ncohort = 10\n'
    )
    answer = advise(path)
    rows = {(row["adversary"], row["epsilon"]): row for row in answer["noise"]}
    assert rows["server", 3.0]["noise_multiplier"] is None
    assert rows["server", 3.0]["why"]
    assert rows["observer", 3.0]["noise_multiplier"] > 0
    assert {found["method"] for found in answer["suggested"]} == {"udp-fedavg"}


@pytest.mark.parametrize(
    ("clients", "records"), [(1, 20), (5, None), (5, 3), (5, 12000), (100, 600), (1000, None)]
)
def test_what_advice_suggests_can_be_configured(clients: int, records: int | None) -> None:
    found = suggestions(Plan(clients, clients, "all", 10), None, records)
    assert found
    for one in found:
        start = dict(one.start)
        run = {key: start.pop(key) for key in ("rounds", "cohort", "sampler")}
        if run["sampler"] == "all":
            assert run.pop("cohort") == clients
        secure = {"aggregation": {"kind": "secure"}} if one.aggregation.startswith("secure") else {}
        method = {"name": one.method} | start
        sized = method | ({"records": records} if one.method == "dp-fedsgd" and records else {})
        raw = {"method": sized, "partition": {"clients": clients}, "run": run} | secure
        made = make_config({"task": {"dataset": "digits", "model": "logistic"}} | raw)
        plan = Plan(
            clients, made.run.cohort or clients, made.run.sampler, made.run.rounds, records or 1, records or 1
        )
        unit: Unit = "record" if one.method == "dp-fedsgd" else "client"
        adversary: Adversary = "server" if secure or unit == "record" else "observer"
        assert epsilon_of(made.build_method().releases(plan), plan, 1e-5, adversary, unit) is not None


def test_advice_names_features_for_images_only(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    for dataset, named in (("mnist", True), ("heart-disease", False)):
        path.write_text(f'task.dataset = "{dataset}"\npartition.clients = 4\nmethod.name = "dp-fedsgd"\n')
        assert all(("features" in one["why"]) == named for one in advise(path)["suggested"][:1])


def test_advice_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "users.toml"
    path.write_text(
        '[partition]\nclients = 100\n[method]\nname = "udp-fedavg"\n[run]\nrounds = 2\ncohort = 10\n'
    )
    result = CliRunner().invoke(app, ["advise", str(path)])
    assert result.exit_code == 0
    assert "normalise = true" in result.stdout
