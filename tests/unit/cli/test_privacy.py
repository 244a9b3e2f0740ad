"""`fedveil account` and `fedveil audit` as a user meets them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedveil import METHODS
from fedveil.cli import main
from fedveil.experiment.target import _shown_above
from fedveil.privacy.statement import show
from tests.unit.audits.test_of_method import TenthOfTheNoise

ROW = ["unit", "adversary", "adjacency", "sampler", "epsilon", "delta", "theorem", "assumptions"]
CONFIG = """
[task]
dataset = "emnist"
model = "mlp-2"
[partition]
clients = 100
[method]
name = "udp-fedavg"
[run]
rounds = 300
cohort = 10
sampler = "poisson"
"""

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def fedveil(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """The command line in this process, in an empty folder, without a data folder: code, stdout, stderr."""
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(CONFIG)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedveil", *arguments])
        code: Any = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        text = capsys.readouterr()
        return int(code), text.out, text.err

    return call


def test_account_needs_no_data_with_given_sizes(fedveil: Call) -> None:
    code, out, _ = fedveil("account", "plan.toml", "--records-per-client", "60", "--json")
    answer = json.loads(out)
    assert code == 0
    assert list(answer) == ["paper_claim", "proven", "audit", "noise", "removable"]
    assert answer["audit"] is None
    assert [list(row) for row in answer["proven"]] == [ROW] * 3
    found = {row["adversary"]: row["epsilon"] for row in answer["proven"]}
    assert found["observer"] == pytest.approx(12.40, abs=5e-3)
    assert found["server"] == pytest.approx(349.96, abs=1e-2)
    code, out, err = fedveil("account", "plan.toml", "--json")
    assert code == 2
    assert out == ""
    assert "emnist" in err


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("method.noise_multiplier", "method.noise_multiplier=1e-200"),
        ("method.noise_multiplier", "method.noise_multiplier=1e200"),
        ("method.noise_multiplier", "method.noise_multiplier=-1"),
        ("method.noise_multiplier", "method.noise_multiplier=nan"),
        ("method.noise_multiplier", "method.noise_multiplier=inf"),
        ("run.rounds", "run.rounds=1000000000000"),
        ("partition.clients", "partition.clients=1000000000000000000"),
    ],
)
def test_account_refuses_extreme_numbers_by_name(fedveil: Call, field: str, change: str) -> None:
    code, out, err = fedveil("account", "plan.toml", "--records-per-client", "60", "--set", change)
    assert code == 2
    assert out == ""
    assert err.startswith(f"fedveil: {field} = ")
    assert "Traceback" not in err


def test_account_refuses_extreme_options_by_name(fedveil: Call) -> None:
    for options in (("--records-per-client", str(10**18)), ("--what-if", "1e-200"), ("--what-if", "1e200")):
        code, _, err = fedveil("account", "plan.toml", "--records-per-client", "60", *options)
        assert code == 2
        assert "Traceback" not in err
    code, out, _ = fedveil(
        "account", "plan.toml", "--records-per-client", "60", "--set", "run.rounds=1000000000", "--json"
    )
    assert code == 0
    assert json.loads(out)["proven"][1]["epsilon"] > 1e6


FEDERATION = """
[task]
dataset = "none"
model = "mlp-2"
input_shape = [1, 8, 8]
classes = 10
[run]
engine = "flower"
"""


@pytest.mark.parametrize(
    ("content", "arguments"),
    [("", []), (FEDERATION, ["--records-per-client", "60"])],
    ids=["with data", "of a federation"],
)
@pytest.mark.parametrize(
    ("method", "field"),
    [
        ('name = "dp-fedags"\nselections = 1e9', "method.selections"),
        ('name = "fedceo"\nlayers = ["fc9"]', "method.layers"),
        ('name = "centaur"\nhead = 9', "method.head"),
    ],
)
def test_account_refuses_fields_that_do_not_fit_the_model(
    fedveil: Call, tmp_path: Path, content: str, arguments: list[str], method: str, field: str
) -> None:
    (tmp_path / "bad.toml").write_text(f"{content}\n[partition]\nclients = 8\n[method]\n{method}\n")
    code, out, err = fedveil("account", "bad.toml", *arguments)
    assert (code, out) == (2, "")
    assert f"{field} = " in err
    assert "Use " in err


def test_account_shows_the_reason_where_nothing_is_proven(fedveil: Call) -> None:
    change = ("--set", "method.name=fedavg")
    code, out, _ = fedveil("account", "plan.toml", "--records-per-client", "60", "--json", *change)
    assert code == 0
    for row in json.loads(out)["proven"]:
        assert row["epsilon"] is None
        assert list(row) == [*ROW, "reason"]


@pytest.mark.parametrize("value", [0.0123449, 0.99991, 1.0934644, 9.9999, 19.52, 99.996, 100.01, 12345.67])
def test_a_calibrated_multiplier_is_shown_in_full_and_never_rounded_down(value: float) -> None:
    found = _shown_above(value)
    assert value <= found <= value * 1.001
    assert float(show(found)) == found


def test_the_multiplier_that_is_printed_meets_the_target(fedveil: Call) -> None:
    """1.09346... would be printed as 1.093, which gives 12.008."""
    sets = ("run.cohort=5", "run.rounds=60", "partition.clients=20")
    changes = [part for text in sets for part in ("--set", text)]
    asked = ("account", "plan.toml", "--records-per-client", "50", "--adversary", "observer", *changes)
    code, out, err = fedveil(*asked, "--target-epsilon", "12", "--json")
    assert code == 0, err
    (row,) = json.loads(out)["calibrated"]
    assert row["epsilon"] <= 12
    assert row["noise_multiplier"] == float(show(row["noise_multiplier"])) == 1.094


def test_account_calibrates_against_each_adversary(fedveil: Call) -> None:
    short = ("--set", "run.rounds=20", "--records-per-client", "60", "--json")
    code, out, _ = fedveil("account", "plan.toml", "--target-epsilon", "6", *short)
    answer = json.loads(out)
    assert code == 0
    assert answer["target_epsilon"] == 6
    assert [row["adversary"] for row in answer["calibrated"]] == ["server", "observer", "client"]
    for row in answer["calibrated"]:
        assert 0.99 * 6 <= row["epsilon"] <= 6
    code, _, err = fedveil("account", "plan.toml", "--target-epsilon", "-1", *short)
    assert code == 2
    assert "target" in err


def test_account_says_which_multiplier_the_target_of_the_configuration_takes(fedveil: Call) -> None:
    short = ("--set", "run.rounds=20", "--set", "privacy.target_epsilon=6", "--records-per-client", "60")
    _, out, _ = fedveil("account", "plan.toml", *short, "--json")
    chosen = json.loads(out)["target"]
    assert chosen["epsilon"] <= 6
    _, _, err = fedveil("account", "plan.toml", *short)
    assert f"noise multiplier {chosen['noise_multiplier']:g}" in err


@pytest.mark.parametrize("asked", [("--target-epsilon", "6"), ("--what-if", "1,2")])
def test_account_refuses_a_noise_multiplier_without_effect(
    fedveil: Call, tmp_path: Path, asked: tuple[str, str]
) -> None:
    sparse = 'name = "dp-fedags-proven"\nvariant = "sparse-vector"\nupload_epsilon = 1.0'
    (tmp_path / "sparse.toml").write_text(CONFIG.replace('name = "udp-fedavg"', sparse))
    code, _, err = fedveil("account", "sparse.toml", "--records-per-client", "60", *asked)
    assert code == 2
    assert "noise_multiplier" in err
    assert "upload_epsilon" in err


def test_account_compares_noise_levels_and_draws(fedveil: Call, tmp_path: Path) -> None:
    common = ("account", "plan.toml", "--records-per-client", "60", "--set", "run.rounds=20")
    code, out, _ = fedveil(*common, "--what-if", "1,2", "--plot", "curve.png", "--json")
    assert code == 0
    one, two = json.loads(out)["what_if"]
    assert (one["noise_multiplier"], two["noise_multiplier"]) == (1.0, 2.0)
    for key in ("server (client)", "observer (client)", "client (client)"):
        assert one[key] > two[key]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    code, out, err = fedveil(*common, "--what-if", "1,2")
    assert code == 0
    assert "What if" in out
    assert "Against the server" in err
    assert fedveil(*common, "--what-if", "1,x")[0] == 2


@pytest.mark.parametrize(
    "run",
    ['engine = "flower"', 'early_stopping = { dataset = "digits", patience = 100 }'],
    ids=["nodes", "stopping"],
)
def test_account_shows_no_number_that_the_run_would_not_prove(
    run: str, fedveil: Call, tmp_path: Path
) -> None:
    (tmp_path / "other.toml").write_text(f"{CONFIG.replace('poisson', 'fixed')}{run}\n")
    common = ("account", "other.toml", "--records-per-client", "60", "--set", "task.input_shape=[1,8,8]")
    code, out, _ = fedveil(*common, "--set", "task.classes=10", "--what-if", "1", "--json")
    assert code == 0
    answer = json.loads(out)
    stated = {f"{row['adversary']} ({row['unit']})": row["epsilon"] for row in answer["proven"]}
    assert answer["what_if"] == [{"noise_multiplier": 1.0} | stated]


SMALL = ("--set", 'task.dataset="digits"', "--set", "partition.clients=8", "--set", "run.cohort=4")
SAMPLES = ("--samples", "400")


def test_audit_of_a_sound_configuration(fedveil: Call) -> None:
    code, out, _ = fedveil("audit", "plan.toml", *SMALL, *SAMPLES, "--json")
    answer = json.loads(out)
    assert code == 0
    assert list(answer) == ["paper_claim", "proven", "audit", "noise", "removable"]
    assert {row["adversary"] for row in answer["audit"]["all"]} == {"server", "observer"}
    for row in answer["audit"]["all"]:
        assert row["lower_bound"] <= row["proven"]
        assert row["broken"] is False
        assert row.get("estimate_note") or row["kind"] == "reachable values"
    for adversary in ("server", "observer"):
        kinds = {row["kind"] for row in answer["audit"]["all"] if row["adversary"] == adversary}
        assert kinds == {"canary clients", "reachable values"}


def test_audit_reports_that_nothing_is_refuted(fedveil: Call) -> None:
    code, out, _ = fedveil("audit", "plan.toml", *SMALL, *SAMPLES)
    assert code == 0
    assert "nothing refuted" in out.splitlines()


def test_audit_of_a_broken_method_fails(fedveil: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "broken", TenthOfTheNoise)
    code, out, _ = fedveil("audit", "plan.toml", *SMALL, *SAMPLES, "--set", "method.name=broken")
    assert code == 1
    assert "BROKEN" in out


def test_audit_of_a_result_folder_is_kept_with_it(fedveil: Call, tmp_path: Path) -> None:
    code, out, _ = fedveil(
        "run", "plan.toml", *SMALL, "--set", "run.rounds=1", "--set", "run.workers=1", "--json"
    )
    assert code == 0
    folder = Path(json.loads(out)["result"])
    code, out, _ = fedveil("audit", str(folder), *SAMPLES)
    assert code == 0
    assert "proven for one participation" in out
    kept = json.loads((tmp_path / folder / "audits" / "audit.json").read_text())
    assert kept["audit"]["lower_bound"] >= 0


def test_audit_of_an_unprotected_method_and_of_nothing(fedveil: Call, tmp_path: Path) -> None:
    code, out, _ = fedveil("audit", "plan.toml", *SMALL, "--set", "method.name=fedavg")
    assert code == 0
    assert "nothing to audit" in out
    (tmp_path / "empty").mkdir()
    assert fedveil("audit", "empty")[0] == 2
    assert fedveil("audit", "plan.toml", "--confidence", "0.3")[0] == 2


@pytest.mark.parametrize("given", ["-1", "nan", "inf"])
def test_what_if_names_the_option_that_is_wrong(fedveil: Call, given: str) -> None:
    code, _, err = fedveil("account", "plan.toml", "--records-per-client", "60", "--what-if", f"1,{given}")
    assert (code, f"--what-if = '{given}': is not a noise multiplier" in err) == (2, True), err


def test_rounds_that_disclose_different_things_are_accounted_and_audited(fedveil: Call) -> None:
    changes = ["--set", "method.name=fedceo", "--set", "run.rounds=20"]
    code, out, err = fedveil("account", "plan.toml", "--records-per-client", "60", *changes)
    assert (code, "What one participation costs" in out) == (0, True), err
    code, out, err = fedveil(
        "audit", "plan.toml", "--set", "task.dataset=digits", "--samples", "200", *changes
    )
    assert (code, "against the observer" in out) == (0, True), err
