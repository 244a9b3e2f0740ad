"""From a run's folder to a finding: attacks, their scores and what is written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedveil.cli.attack
from fedveil.attack_runs.inversion import LabelMode, Scored, attack_exchange, labels_right
from fedveil.attack_runs.transcript import StoredRun, open_run, read_exchange, server_view, truth
from fedveil.attack_runs.verdict import attack_verdict
from fedveil.attacks.inversion.labels import infer_labels
from fedveil.attacks.registry import make_attack
from fedveil.cli import app
from fedveil.data.dataset import Dataset
from fedveil.data.registry import load_dataset
from fedveil.errors import InputError
from fedveil.streams import named_stream
from tests.unit.attack_runs.finished import finished

QUICK = {"steps": 3}


def test_finding_is_written_with_scores_against_both(fedem: StoredRun) -> None:
    client = read_exchange(fedem, 1).clients[0]
    assert fedveil.cli.attack.attack_command is not None
    arguments = ["attack", str(fedem.folder), "--attack", "inverting-gradients", "--client", str(client)]
    result = CliRunner().invoke(app, [*arguments, "--set", "steps=3", "--json"], catch_exceptions=False)
    content = json.loads(result.stdout)
    assert content["method"] == "fedem"
    assert content["against_x"]["mean"]["psnr"] != content["against_trained_on"]["mean"]["psnr"]
    assert content["against_x"]["mean"]["lpips"] is None
    # |delta| <= 0.5 over 64 pixels of std 0.376: the inputs themselves are this close to the data
    assert content["distortion_psnr"] >= 10 * math.log10(64 / (0.5 * 0.376) ** 2) - 1e-3
    assert "unavailable" in content["against_x"]["lpips_note"]
    folder = Path(content["finding"])
    assert json.loads((folder / "finding.json").read_text())["clients"] == [client]
    assert (folder / "picture.png").stat().st_size > 5000
    shown = CliRunner().invoke(app, [*arguments, "--set", "steps=3"], catch_exceptions=False)
    assert "trained on" in shown.stdout


@pytest.mark.parametrize("labels", ["known", "inferred"])
def test_another_number_of_examples_than_was_sent_is_refused_before_the_attack(
    fedem: StoredRun, labels: LabelMode
) -> None:
    with pytest.raises(InputError) as error:
        attack_exchange(
            fedem,
            make_attack("inverting-gradients", QUICK),
            round=1,
            clients=read_exchange(fedem, 1).clients[:1],
            labels=labels,
            examples=3,
        )
    assert error.value.field == "examples"


def test_a_trained_model_is_attacked_through_its_local_steps(tmp_path: Path) -> None:
    folder = finished(tmp_path, {"name": "fedavg", "epochs": 2, "batch_size": 2, "lr": 0.1})
    run = open_run(folder)
    exchange = read_exchange(run, 1)
    client = exchange.clients[0]
    held = truth(run, exchange, [client])
    view = server_view(run, exchange, [client], labels=held.y)
    assert view.local is not None
    assert view.local.epochs == 2
    assert view.examples == len(run.prepared.clients.load([client]).y[0])
    _, scored = attack_exchange(run, make_attack("inverting-gradients", QUICK), round=1, clients=[client])
    assert isinstance(scored, Scored)
    assert len(scored.against_x.psnr) == view.examples


def test_an_upload_that_does_not_disclose_its_size_needs_it(tmp_path: Path) -> None:
    folder = finished(
        tmp_path,
        {"name": "udp-fedavg", "batch_size": 2},
        task={"data_options": {"max_train": 8}},
        partition={"kind": "iid", "clients": 2},
        run={"rounds": 1, "sampler": "all", "cohort": None},
    )
    run = open_run(folder)
    exchange = read_exchange(run, 1)
    with pytest.raises(InputError) as error:
        server_view(run, exchange, exchange.clients[:1])
    assert error.value.field == "examples"
    view = server_view(run, exchange, exchange.clients[:1], examples=4)
    assert view.examples == 4
    assert view.adaptation.kind == "noise"


def test_a_clipped_update_is_inverted_by_its_direction(tmp_path: Path) -> None:
    """DLG compares lengths too: it must cut its candidates as the client cut its update."""
    folder = finished(
        tmp_path,
        {"name": "udp-fedavg", "clip": 0.02, "noise_multiplier": 0.0, "batch_size": 8},
        task={"model": "lenet-zhu", "data_options": {"max_train": 8}},
        partition={"kind": "iid", "clients": 8},
        run={"rounds": 1, "sampler": "all", "cohort": None},
    )
    run = open_run(folder)
    attack = make_attack("idlg", {"steps": 150})
    _, scored = attack_exchange(run, attack, round=1, clients=[0, 1, 2], examples=1)
    assert isinstance(scored, Scored)
    assert sum(value > 40 for value in scored.against_x.psnr) >= 2


@pytest.mark.parametrize(
    ("wrap", "least"),
    [
        ({"name": "gradient-masking", "part": 0.5}, 16.0),
        ({"name": "gradient-pruning", "part": 0.99}, 8.0),
        ({"name": "gradient-gaussian", "std": 0.1}, 18.5),
    ],
)
def test_the_quotient_makes_use_of_every_row_that_a_defence_leaves(
    tmp_path: Path, wrap: dict[str, Any], least: float
) -> None:
    """One row alone loses half of its pixels to the mask (12 dB, no better than the mean image), or has no divisor."""
    folder = finished(
        tmp_path,
        {"name": "fedsgd"},
        task={"data_options": {"max_train": 8}},
        partition={"kind": "iid", "clients": 8},
        run={"rounds": 1, "sampler": "all", "cohort": None},
        wrap=[wrap],
    )
    _, scored = attack_exchange(open_run(folder), make_attack("analytic"), round=1, clients=list(range(8)))
    assert isinstance(scored, Scored)
    assert min(scored.against_x.psnr) > least
    assert scored.weaker is not None


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedsgd"},
        {"name": "fedavg", "epochs": 5},
        {"name": "fedavg", "epochs": 5, "momentum": 0.9},
        {"name": "fedavg", "epochs": 5, "batch_size": 4, "lr": 0.01},
    ],
)
def test_labels_are_read_off_gradients_that_local_steps_sum_up(
    tmp_path: Path, method: dict[str, Any]
) -> None:
    folder = finished(
        tmp_path,
        method,
        task={"data_options": {"max_train": 160}},
        partition={"kind": "iid", "clients": 10},
        run={"rounds": 1, "sampler": "all", "cohort": None},
    )
    run = open_run(folder)
    exchange = read_exchange(run, 1)
    held = truth(run, exchange, list(range(10)))
    view = server_view(run, exchange, list(range(10)))
    found = infer_labels(view, named_stream(0, "labels"))
    named = [
        torch.minimum(a.bincount(minlength=10), b.bincount(minlength=10)).sum()
        for a, b in zip(found, held.y, strict=True)
    ]
    assert float(sum(named)) / held.y.numel() > 0.9


def test_one_wrong_label_does_not_make_the_others_wrong() -> None:
    assert labels_right(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[0, 1, 2, 3]])) == 0.75
    assert labels_right(torch.tensor([[1, 1, 1]]), torch.tensor([[2, 1, 1]])) == pytest.approx(2 / 3)


@pytest.mark.parametrize(("least", "most"), [(0.0, 1.0), (0.0, 255.0), (-0.8, 1.9)])
def test_own_images_are_attacked_in_their_own_range(tmp_path: Path, least: float, most: float) -> None:
    """Arrays hold whatever numbers their owner likes; black and white are then those of the public images."""
    digits = load_dataset("digits", normalise="unit")
    assert isinstance(digits, Dataset)
    x, y = least + (most - least) * digits.train.x.numpy(), digits.train.y.numpy()
    data = tmp_path / "data"
    data.mkdir()
    for client in range(2):
        np.savez(data / f"{client}.npz", x=x[client : client + 1], y=y[client : client + 1])
    np.savez(data / "test.npz", x=x[100:400], y=y[100:400])
    folder = finished(
        tmp_path / "results",
        {"name": "fedsgd", "lr": 0.001},
        task={"dataset": "client-folder", "data_options": {"path": str(data)}, "model": "lenet-5"},
        partition={"kind": "user"},
        run={"rounds": 1, "sampler": "all", "cohort": None},
    )
    attack = make_attack("inverting-gradients", {"steps": 250})
    _, scored = attack_exchange(open_run(folder), attack, round=1, clients=[0, 1])
    assert isinstance(scored, Scored)
    assert scored.trivial_psnr == pytest.approx(12, abs=2)
    assert max(scored.against_x.psnr) > 25  # the other one is missed from this start


def test_the_more_successful_attacker_is_reported(tmp_path: Path) -> None:
    folder = finished(
        tmp_path,
        {"name": "fedsgd", "batch_size": 2},
        task={"data_options": {"max_train": 8}},
        partition={"kind": "iid", "clients": 2},
        run={"rounds": 1, "sampler": "all", "cohort": None},
        wrap=[{"name": "gradient-masking", "part": 0.5}],
    )
    arguments = ["attack", str(folder), "--attack", "inverting-gradients", "--set", "steps=30", "--json"]
    found = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
    plain = json.loads(CliRunner().invoke(app, [*arguments, "--no-adaptive"], catch_exceptions=False).stdout)
    assert "metrics" not in found  # a score has one name: it is compared with x, or with what was trained on
    assert plain["weaker_attacker"] is None
    assert plain["adaptation"]["kind"] == "none"
    assert {found["adaptation"]["kind"], found["weaker_attacker"]["adaptation"]} == {"mask", "none"}
    assert found["against_x"]["mean"]["psnr"] >= found["weaker_attacker"]["mean"]["psnr"]
    assert found["against_x"]["mean"]["psnr"] >= plain["against_x"]["mean"]["psnr"]
    shown = CliRunner().invoke(app, arguments[:-1], catch_exceptions=False)
    assert "Shown is the attacker who" in shown.output


def test_attacks_of_the_configuration(tmp_path: Path) -> None:
    folder = finished(
        tmp_path,
        {"name": "fedsgd", "batch_size": 1},
        task={"data_options": {"max_train": 8}},
        partition={"kind": "iid", "clients": 2},
        run={"cohort": 2},
        attack=[{"name": "analytic", "round": 2}, {"name": "idlg", "steps": 2, "restarts": 1}],
    )
    arguments = ["attack", str(folder), "--json", "--client", "0"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    names = [found["attack"] for found in json.loads(result.stdout)["findings"]]
    assert names == ["analytic", "idlg"]
    assert json.loads(result.stdout)["findings"][0]["against_x"]["mean"]["psnr"] > 80


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_a_table_drowned_in_noise_are_not_called_given_away(seed: int, tmp_path: Path) -> None:
    """Each of fifty rows with two features has a near neighbour among fifty others, whatever was sent."""
    rng = np.random.default_rng(seed)
    cells = [f"{k % 3},{rng.normal(50, 15):.1f},{rng.integers(18, 80)},{k % 2}" for k in range(180)]
    (tmp_path / "t.csv").write_text("\n".join(["who,a,b,y", *cells]))
    options = {"path": str(tmp_path / "t.csv"), "label": "y", "user": "who"}
    folder = finished(
        tmp_path,
        {"name": "udp-fedavg", "noise_multiplier": 1000.0},
        task={"dataset": "table", "data_options": options},
        partition={"kind": "user"},
        run={"rounds": 1, "cohort": 3, "noise": "seeded"},
    )
    run = open_run(folder)
    size = run.prepared.clients.sizes[0]
    command = ["attack", str(folder), "--attack", "inverting-gradients", "--round", "1", "--client", "0"]
    done = CliRunner().invoke(app, [*command, "--examples", str(size), "--set", "steps=5"])
    assert done.exit_code == 0, done.output
    verdict = attack_verdict(json.loads(next((folder / "attacks").rglob("finding.json")).read_text()))
    assert verdict is not None
    assert verdict.level != "leak"
    assert verdict.text in " ".join(done.output.split())
