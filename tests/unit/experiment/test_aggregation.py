"""`[aggregation]` in a configuration: what it means, what is refused, and that plain runs stay what they were."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedveil.cli import main
from fedveil.errors import InputError
from fedveil.experiment.config import make_config
from fedveil.experiment.prepare import prepare
from fedveil.experiment.run import run_seed
from fedveil.methods.secure import SecurelyAggregated
from fedveil.methods.wrappers.wrapper import WrappedMethod
from fedveil.secure_sum.settings import SecureSum

PLAIN: dict[str, Any] = {
    "partition": {"clients": 10},
    "method": {"name": "udp-fedavg", "noise_multiplier": 4.0},
    "run": {"rounds": 2, "sampler": "all"},
}
SECURE: dict[str, Any] = PLAIN | {"aggregation": {"kind": "secure"}}
TOML = """
[task]
dataset = "emnist"
[partition]
clients = 100
[method]
name = "udp-fedavg"
noise_multiplier = 13.9
[run]
rounds = 100
sampler = "all"
"""


def test_a_plain_configuration_is_what_it_was() -> None:
    """Results recorded before the section existed are found again."""
    plain = make_config(PLAIN)
    assert "aggregation" not in plain.resolved()
    assert make_config(PLAIN | {"aggregation": {"kind": "plain"}}).identity() == plain.identity()
    assert make_config(SECURE).identity() != plain.identity()


def test_defaults_are_written_out() -> None:
    config = make_config(SECURE)
    assert "colluders = 1" in config.to_toml()
    explicit = make_config(PLAIN | {"aggregation": {"kind": "secure", "colluders": 1}})
    assert explicit.identity() == config.identity()
    again = make_config(PLAIN | {"aggregation": {"kind": "secure", "threshold": 9, "colluders": 2}})
    method = again.build_method()
    assert isinstance(method, SecurelyAggregated)
    assert method.settings == SecureSum(9, 2)


def test_post_processing_goes_around_the_secure_sum() -> None:
    method = make_config(SECURE | {"wrap": [{"name": "model-average"}]}).build_method()
    assert isinstance(method, WrappedMethod)
    assert isinstance(method.inner, SecurelyAggregated)
    assert method.discloses_sum


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"aggregation": {"kind": "masked"}}, "aggregation.kind"),
        ({"aggregation": {"threshold": 8}}, "aggregation.threshold"),
        ({"aggregation": {"kind": "plain", "colluders": 1}}, "aggregation.colluders"),
        ({"aggregation": {"kind": "secure", "threshold": 0}}, "aggregation.threshold"),
        ({"aggregation": {"kind": "secure", "colluders": -1}}, "aggregation.colluders"),
        ({"aggregation": {"kind": "secure", "nodes": 3}}, "aggregation.nodes"),
        ({"aggregation": {"kind": "secure"}, "method": {"name": "scaffold"}}, "aggregation.kind"),
        ({"aggregation": {"kind": "secure"}, "method": {"name": "fedlap-dp"}}, "aggregation.kind"),
        ({"aggregation": {"kind": "secure"}, "method": {"name": "ppsgd"}}, "aggregation.kind"),
        ({"aggregation": {"kind": "secure"}, "method": {"name": "fedceo"}}, "method.restart"),
        ({"aggregation": {"kind": "secure"}, "run": {"engine": "flower-simulation"}}, "aggregation.kind"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        make_config(PLAIN | changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (["run.sampler=poisson", "run.cohort=5"], "run.sampler"),
        (["run.sampler=fixed", "run.cohort=2"], "run.cohort"),
        (["partition.clients=2"], "partition.clients"),
        (["aggregation.threshold=6"], "aggregation.threshold"),
        (["aggregation.threshold=11"], "aggregation.threshold"),
        (["aggregation.threshold=7", "aggregation.colluders=4"], "aggregation.threshold"),
        (["aggregation.threshold=10", "aggregation.colluders=9"], "aggregation.colluders"),
        (["method.noise_multiplier=1e-8"], "method.noise_multiplier"),
    ],
)
def test_what_does_not_fit_the_plan_is_refused_before_anything_is_written(
    changes: list[str], field: str, tmp_path: Path
) -> None:
    config = make_config(SECURE, changes)
    with pytest.raises(InputError) as caught:
        run_seed(config, 0, experiment="secure", results=tmp_path)
    assert caught.value.field == field
    assert not list(tmp_path.iterdir())


def test_a_run_from_a_configuration(tmp_path: Path) -> None:
    found = run_seed(make_config(SECURE), 0, experiment="secure", results=tmp_path)
    assert found.summary["method"] == "udp-fedavg+secure"
    rows = {row["adversary"]: row for row in found.summary["privacy"]["proven"]}
    assert rows["server"]["epsilon"] == rows["observer"]["epsilon"] < rows["client"]["epsilon"]
    assert found.summary["bytes_up"] == 2 * 10 * 4 * found.summary["parameters"]
    again = run_seed(make_config(SECURE), 0, experiment="secure", results=tmp_path)
    assert again.summary == found.summary
    assert prepare(make_config(SECURE), 0).plan.clients == 10


@pytest.fixture
def ask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Any]:
    """The JSON that the command line prints."""
    (tmp_path / "plan.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["fedveil", *arguments, "--json"])
        with suppress(SystemExit):
            main()
        return json.loads(capsys.readouterr().out)

    return call


def test_account_shows_what_the_server_is_proven_to_learn(ask: Callable[..., Any]) -> None:
    account = ["account", "plan.toml", "--records-per-client", "60"]
    plain = ask(*account)
    secure = ask(*account, "--set", "aggregation.kind=secure")
    for answer in (plain, secure):
        assert all(isinstance(row["assumptions"], list) for row in answer["proven"])
    before, after = ({row["adversary"]: row for row in answer["proven"]} for answer in (plain, secure))
    assert after["server"]["epsilon"] == pytest.approx(3, rel=0.01)
    assert before["server"]["epsilon"] > 10 * after["server"]["epsilon"]
    assert all(row["assumptions"] for row in after.values())
    assert not before["server"]["assumptions"]


def test_calibration_is_that_of_the_secure_sum(ask: Callable[..., Any]) -> None:
    answer = ask(
        "account",
        "plan.toml",
        "--records-per-client",
        "60",
        "--set",
        "aggregation.kind=secure",
        "--target-epsilon",
        "8",
        "--adversary",
        "server",
        "--what-if",
        "6",
    )
    assert answer["calibrated"][0]["noise_multiplier"] == pytest.approx(6.0, abs=0.05)
    assert answer["what_if"][0]["server (client)"] == pytest.approx(8, rel=0.02)


def test_the_list_marks_methods_with_secure_aggregation(ask: Callable[..., Any]) -> None:
    rows = {row["name"]: row["secure_aggregation"] for row in ask("list", "methods")}
    assert rows["udp-fedavg"] is rows["fedceo"] is True
    assert rows["scaffold"] is rows["fedlap-dp"] is rows["ppsgd"] is False
