"""Attacks on finished runs, through files and the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedveil.attack_runs.membership import Target, attack_result
from fedveil.attacks.membership.threat_model import MembershipView, Recipe
from fedveil.attacks.membership.thresholds import LossThreshold
from fedveil.errors import InputError, ResultError
from fedveil.experiment.config import make_config
from fedveil.experiment.run import run_seed
from fedveil.privacy.releases import Plan

PLAN = Plan(100, 10, "fixed", 200, 600, 600)


def finished(
    folder: Path,
    *,
    transcript: bool = True,
    rounds: int = 2,
    model: str = "logistic",
    wrap: Sequence[dict[str, Any]] = (),
    **method: Any,
) -> Path:
    config = make_config(
        {
            "task": {"dataset": "digits", "model": model},
            "wrap": list(wrap),
            "partition": {"kind": "iid", "clients": 40},
            "method": {"name": "dp-fedags", "lr": 0.5, "batch_size": 64} | method,
            "run": {"rounds": rounds, "cohort": 4, "transcript": transcript, "workers": 1},
        }
    )
    result = run_seed(config, 0, experiment="attacked", results=folder)
    assert result.folder is not None
    return result.folder


def test_one_who_drops_the_noised_coordinates_reads_the_gradient(tmp_path: Path) -> None:
    """It recognises nearly all of the client's examples; one who does not know the method recognises none."""
    folder = finished(tmp_path, epsilon=0.1)
    naive = attack_result(folder, "gradient-alignment", target="upload", round=1, examples=36)
    knowing = attack_result(
        folder, "gradient-alignment", settings={"trust_below": 0.1}, target="upload", round=1, examples=36
    )
    assert naive.auc.low < 0.55
    assert knowing.auc.low > max(0.75, naive.auc.high)
    written = [json.loads(path.read_text()) for path in (folder / "attacks").glob("*/finding.json")]
    known = {found["settings"]["trust_below"]: found["auc"]["value"] for found in written}
    assert known == {None: naive.auc.value, 0.1: knowing.auc.value}  # neither has replaced the other


def test_the_attack_is_written_beside_the_run(tmp_path: Path) -> None:
    folder = finished(tmp_path, name="fedavg")
    found = attack_result(folder, "loss-threshold", examples=100)
    written = json.loads((folder / "attacks" / "loss-threshold" / "finding.json").read_text())
    assert written["auc"]["value"] == found.auc.value
    assert "2 models before it" in found.target
    assert attack_result(folder, "loss-threshold", examples=100).auc == found.auc


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedavg"},
        {"name": "dp-fedags-proven"},
        {"name": "dp-fedags-proven", "variant": "top-k"},
        {"name": "dp-fedavg"},
        {"name": "dp-fedsnlc"},
        {"name": "cpsgd", "epsilon": 50.0},
        {"name": "cpsgd", "epsilon": 50.0, "wrap": [{"name": "server-momentum"}]},
        {"name": "fedsgd", "batch_size": None},
        {"name": "fedem", "batch_size": 16},
        {"name": "scaffold"},
    ],
)
def test_uploads_of_every_form_can_be_attacked(tmp_path: Path, method: dict[str, Any]) -> None:
    folder = finished(tmp_path, rounds=1, **method)
    found = attack_result(folder, "loss-threshold", target="upload", examples=36)
    assert 0 <= found.auc.value <= 1
    assert "upload of client" in found.target


@pytest.mark.parametrize("name", ["fedsgd", "fedem"])
def test_members_of_a_batch_are_the_examples_in_it(tmp_path: Path, name: str) -> None:
    """A gradient of 12 examples names them; the client's others, which are in later batches, are no members of it."""
    method: dict[str, Any] = {"name": name, "batch_size": 12} | (
        {"perturbation_steps": 1} if name == "fedem" else {}
    )
    folder = finished(tmp_path, rounds=1, model="mlp-2", **method)
    for exchange in (0, 1):
        found = attack_result(folder, "gradient-alignment", target="upload", exchange=exchange)
        assert found.members <= 12
        assert found.auc.value > 0.95
    assert "exchange 1" in found.target


def test_a_change_of_the_model_is_no_model(tmp_path: Path) -> None:
    """Scaffold's first round is FedAvg's, and so is what its uploads disclose."""
    aucs = [
        attack_result(
            finished(tmp_path / name, rounds=1, name=name), "gradient-alignment", target="upload", examples=36
        ).auc.value
        for name in ("fedavg", "scaffold")
    ]
    assert aucs[1] == pytest.approx(aucs[0], abs=0.02)


def test_examples_of_clients_that_never_took_part_are_no_members(tmp_path: Path) -> None:
    found = attack_result(finished(tmp_path, rounds=1, name="fedavg"), "loss-threshold", examples=500)
    assert found.members <= 4 * 36


def test_shadows_train_as_the_method_inside_its_wrappers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of all clients whose models are averaged: 4 of 20, which 16 and a short remainder make."""
    recipes: list[Recipe] = []

    def seen(_self: LossThreshold, view: MembershipView, _rng: np.random.Generator) -> Tensor:
        recipes.append(view.recipe)
        return torch.arange(len(view.asked)).double()

    monkeypatch.setattr(LossThreshold, "__call__", seen)
    fields: dict[str, Any] = {"name": "fedavg", "epochs": 3, "batch_size": 16, "momentum": 0.5}
    for place, wrap in (("plain", ()), ("wrapped", [{"name": "model-average"}])):
        folder = finished(tmp_path / place, wrap=wrap, **fields)
        attack_result(folder, "loss-threshold", examples=36)
        attack_result(folder, "loss-threshold", examples=36, target="upload")
    model, upload = recipes[:2]
    assert recipes[2:] == [model, upload]
    assert (model.lr, model.batch_size, model.epochs, model.momentum) == (0.5, 80, 3, 0.5)
    assert (upload.batch_size, upload.epochs) == (20, 3)


def test_an_upload_that_is_no_whole_model_is_refused(tmp_path: Path) -> None:
    folder = finished(tmp_path, rounds=1, name="centaur", model="mlp-2")
    with pytest.raises(InputError) as error:
        attack_result(folder, "loss-threshold", target="upload")
    assert error.value.field == "method"


def test_what_is_not_there_cannot_be_attacked(tmp_path: Path) -> None:
    folder = finished(tmp_path, transcript=False, rounds=1, name="fedavg")
    with pytest.raises(ResultError):
        attack_result(folder, "loss-threshold", target="upload")
    with pytest.raises(ResultError):
        attack_result(tmp_path, "loss-threshold")
    with pytest.raises(InputError) as error:
        attack_result(folder, "loss-threshold", examples=2)
    assert error.value.field == "examples"


def test_a_client_that_did_not_take_part_is_refused(tmp_path: Path) -> None:
    folder = finished(tmp_path, rounds=1, name="fedavg")
    cohort = json.loads((folder / "transcript/round-000001/exchange-0000/clients.json").read_text())
    absent = next(k for k in range(40) if k not in cohort)
    with pytest.raises(InputError) as error:
        attack_result(folder, "loss-threshold", target="upload", client=absent)
    assert error.value.field == "client"


@pytest.mark.parametrize(
    ("target", "name"),
    [("model", "down.bin"), ("upload", "down.bin"), ("upload", "up.bin"), ("upload", "clients.json")],
)
def test_a_damaged_transcript_is_refused(tmp_path: Path, target: Target, name: str) -> None:
    folder = finished(tmp_path, rounds=1, name="fedavg")
    file = folder / "transcript/round-000001/exchange-0000" / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ResultError):
        attack_result(folder, "loss-threshold", target=target)


def test_the_command_writes_and_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedveil.cli import main

    folder = finished(tmp_path, rounds=1, name="fedavg")
    above = str(folder.parent)  # with only one run in it
    arguments = ["fedveil", "attack", above, "--attack", "loss-threshold", "--examples", "80", "--json"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    printed = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert printed["attack"] == "loss-threshold"
    assert (folder / "attacks" / "loss-threshold" / "roc.png").exists()
    monkeypatch.setattr("sys.argv", ["fedveil", "attack", str(folder), "--attack", "lirra"])
    with pytest.raises(SystemExit):  # a misspelt name comes before a transcript that is not there
        main()
    assert "--attack = 'lirra': no such attack. Did you mean lira" in capsys.readouterr().err
