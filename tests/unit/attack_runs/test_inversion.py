"""From a run's folder to a finding: what is seen, what is refused, what is written."""

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
from fedveil.attack_runs.transcript import RecordedRun, open_run, read_exchange, server_view, truth
from fedveil.attacks.inversion.labels import infer_labels
from fedveil.attacks.inversion.matching import candidate_gradients
from fedveil.attacks.registry import make_attack
from fedveil.cli import app
from fedveil.data.dataset import Dataset
from fedveil.data.registry import load_dataset
from fedveil.errors import InputError, ResultError
from fedveil.experiment.config import make_config
from fedveil.experiment.run import run_seed
from fedveil.methods.cpsgd import CpSGD, Levels, rotate
from fedveil.methods.dp_fedags_proven import DPFedAGSProven, ModelAndMask, Selected
from fedveil.methods.method import At
from fedveil.methods.shared_model import Model
from fedveil.privacy.releases import Plan
from fedveil.streams import named_stream
from fedveil.task import Batch
from fedveil.tree import flatten, with_axis

QUICK = {"steps": 3}


def finished(tmp_path: Path, method: dict[str, Any], **more: Any) -> Path:
    config = make_config(
        {
            "task": {"dataset": "digits", "model": "logistic"} | more.pop("task", {}),
            "partition": more.pop("partition", {"kind": "iid", "clients": 300}),
            "method": method,
            "run": {"rounds": 2, "cohort": 2, "transcript": True} | more.pop("run", {}),
            **more,
        }
    )
    result = run_seed(config, 0, experiment="unit", results=tmp_path)
    assert result.folder is not None
    return result.folder


@pytest.fixture(scope="module")
def fedem(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    method = {"name": "fedem", "batch_size": 2, "perturbation_steps": 2, "rho_max": 0.5}
    return open_run(finished(tmp_path_factory.mktemp("fedem"), method))


def test_the_truth_is_what_the_client_sent_the_gradient_of(fedem: RecordedRun) -> None:
    exchange = read_exchange(fedem, 2, 1)
    client = exchange.clients[1]
    held = truth(fedem, exchange, [client])
    assert held.delta is not None
    assert float(held.delta.abs().max()) > 0
    view = server_view(fedem, exchange, [client])
    again = fedem.prepared.task.grad(with_axis(view.params), Batch(held.x + held.delta, held.y))
    for name, leaf in again.items():
        torch.testing.assert_close(leaf, view.observed[name], rtol=1e-5, atol=1e-7)


def test_finding_is_written_with_scores_against_both(fedem: RecordedRun) -> None:
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


def test_rounds_exchanges_and_clients_that_were_not_recorded_are_refused(fedem: RecordedRun) -> None:
    with pytest.raises(InputError, match="rounds 1 to 2"):
        read_exchange(fedem, 7)
    with pytest.raises(InputError, match="exchanges 0 to"):
        read_exchange(fedem, 1, 99)
    absent = next(k for k in range(300) if k not in read_exchange(fedem, 1).clients)
    for client in (absent, 300):
        with pytest.raises(InputError, match="did not answer"):
            attack_exchange(fedem, make_attack("inverting-gradients", QUICK), round=1, clients=[client])


@pytest.mark.parametrize("labels", ["known", "inferred"])
def test_another_number_of_examples_than_was_sent_is_refused_before_the_attack(
    fedem: RecordedRun, labels: LabelMode
) -> None:
    with pytest.raises(InputError, match="stands for 2"):
        attack_exchange(
            fedem,
            make_attack("inverting-gradients", QUICK),
            round=1,
            clients=read_exchange(fedem, 1).clients[:1],
            labels=labels,
            examples=3,
        )


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


def test_an_upload_that_does_not_tell_its_examples_needs_them(tmp_path: Path) -> None:
    folder = finished(
        tmp_path,
        {"name": "udp-fedavg", "batch_size": 2},
        task={"data_options": {"max_train": 8}},
        partition={"kind": "iid", "clients": 2},
        run={"rounds": 1, "sampler": "all", "cohort": None},
    )
    run = open_run(folder)
    exchange = read_exchange(run, 1)
    with pytest.raises(InputError, match="--examples"):
        server_view(run, exchange, exchange.clients[:1])
    view = server_view(run, exchange, exchange.clients[:1], examples=4)
    assert view.examples == 4
    assert view.adaptation.kind == "noise"


@pytest.mark.parametrize(
    "method",
    [
        {"name": "dp-fedavg", "clip": 1e3, "noise_multiplier": 0.0},
        {"name": "dp-fedavg", "unit": "record", "record_rate": 1.0, "clip": 1e3, "noise_multiplier": 0.0},
        {
            "name": "dp-fedprox",
            "clip": 1e3,
            "noise_multiplier": 0.0,
            "proximal": 0.0,
            "lr_schedule": "constant",
        },
        {"name": "udp-fedavg", "clip": 1e3, "noise_multiplier": 0.0},
        {"name": "fedceo", "clip": 1e3, "noise_multiplier": 0.0},
        {"name": "scaffold"},
        {"name": "fedprox"},
    ],
)
def test_every_upload_that_tells_a_step_is_read_as_the_gradient_behind_it(
    tmp_path: Path, method: dict[str, Any]
) -> None:
    batch = {"batch_size": 8, "epochs": 1, "lr": 0.1}
    run = open_run(
        finished(
            tmp_path,
            batch | method,
            task={"data_options": {"max_train": 8}},
            partition={"kind": "iid", "clients": 2},
            run={"rounds": 1, "sampler": "all", "cohort": None},
        )
    )
    exchange = read_exchange(run, 1)
    held = truth(run, exchange, [0])
    view = server_view(run, exchange, [0], examples=len(held.y[0]))
    task = run.prepared.task
    expected = task.grad(with_axis(view.params), Batch(held.x, held.y))
    length = sum(float(leaf.square().sum()) for leaf in expected.values()) ** 0.5
    gap = sum(float((view.observed[name] - leaf).square().sum()) for name, leaf in expected.items()) ** 0.5
    assert gap < 1e-4 * length


QUIET = {"clip": 1e3, "noise_multiplier": 0.0}


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedavg", "momentum": 0.9, "weight_decay": 0.1},
        {"name": "fedprox", "proximal": 1.0},
        {"name": "fedprox", "proximal": 1.0, "momentum": 0.5},
        {"name": "scaffold"},
        {"name": "scaffold", "epochs": 1},
        {"name": "udp-fedavg", "server_lr": 3.0, **QUIET},
        {"name": "fedceo", "server_lr": 3.0, **QUIET},
        {"name": "ppsgd", "personal_lr": 0.4, "server_lr": 0.5, **QUIET},
        {"name": "dp-fedavg", "unit": "record", "record_rate": 1.0, **QUIET},
        {"name": "dp-fedprox", "proximal": 1.0, **QUIET},
    ],
)
def test_the_data_themselves_explain_an_upload_of_every_round(tmp_path: Path, method: dict[str, Any]) -> None:
    """A candidate equal to the data has the loss zero, or no search could find it: with all that a server knows of
    a method, and of what a client sent before."""
    run = open_run(
        finished(
            tmp_path,
            {"batch_size": 8, "epochs": 4, "lr": 0.1} | method,
            task={"data_options": {"max_train": 8}},
            partition={"kind": "iid", "clients": 2},
            run={"rounds": 3, "sampler": "all", "cohort": None},
        )
    )
    for number in (1, 3):
        exchange = read_exchange(run, number)
        held = truth(run, exchange, [1])
        view = server_view(run, exchange, [1], examples=4)
        sent = candidate_gradients(view, held.x.repeat(2, 1, 1, 1, 1), held.y.repeat(2, 1))
        for name, leaf in view.observed.items():
            torch.testing.assert_close(
                sent[name].detach(),
                leaf.expand_as(sent[name]),
                rtol=1e-3,
                atol=1e-4 * float(leaf.abs().max()),
            )
        assert view.notes == ()


def test_what_a_client_sent_in_rounds_that_are_not_on_record_is_told_to_be_unknown(tmp_path: Path) -> None:
    folder = finished(
        tmp_path,
        {"name": "scaffold", "batch_size": 8},
        task={"data_options": {"max_train": 8}},
        partition={"kind": "iid", "clients": 2},
        run={"rounds": 2, "sampler": "all", "cohort": None, "transcript": [2]},
    )
    run = open_run(folder)
    assert "not on record" in server_view(run, read_exchange(run, 2), [0], examples=4).notes[0]


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


def test_stored_bytes_are_searched_in_their_own_unit(tmp_path: Path) -> None:
    folder = finished(
        tmp_path,
        {"name": "fedsgd", "lr": 0.001},
        task={"data_options": {"max_train": 2, "normalise": "none"}, "model": "lenet-5"},
        partition={"kind": "iid", "clients": 2},
        run={"rounds": 1, "sampler": "all", "cohort": None},
    )
    run = open_run(folder)
    view = server_view(run, read_exchange(run, 1), [0])
    assert view.unit == pytest.approx(16 * 0.376, rel=0.05)
    assert view.centre == pytest.approx(16 * 0.3053, rel=0.05)


def test_integers_of_a_rotated_update_are_turned_back() -> None:
    method = CpSGD(lr=0.1, levels=4096, clip=10.0)
    sent = {"a": torch.zeros(1, 3, 5), "b": torch.zeros(1, 4)}
    update = {name: torch.randn(2, *leaf.shape[1:]) for name, leaf in sent.items()}
    at = At(Plan(2, 2, "all", 3), 3)
    turned = rotate(flatten(update), at.round)
    levels = Levels((turned / method.spacing(turned.shape[1])).round().int())
    read = method.read_upload(at, Model(sent), levels)
    assert read.gradient is not None
    for name, leaf in update.items():
        torch.testing.assert_close(-0.1 * read.gradient[name], leaf, rtol=0, atol=0.05)
        torch.testing.assert_close(read.models[name], leaf, rtol=0, atol=0.05)


def test_selected_coordinates_are_put_where_they_belong() -> None:
    sent = {"a": torch.zeros(1, 3), "b": torch.zeros(1, 2)}
    values = torch.tensor([[1.0, 2.0]])
    at = At(Plan(2, 2, "all", 1), 1)
    masked = ModelAndMask(sent, {"places": torch.tensor([[0, 4]])})
    own = Selected(values, {"places": torch.tensor([[2, 3]])})
    for down, up, expected in (
        (masked, Selected(values, {}), [1, 0, 0, 0, 2]),
        (ModelAndMask(sent, {}), own, [0, 0, 1, 2, 0]),
        (ModelAndMask(sent, {}), Selected(torch.arange(5.0)[None], {}), [0, 1, 2, 3, 4]),
    ):
        gradient = DPFedAGSProven().read_upload(at, down, up).gradient
        assert gradient is not None
        assert flatten(gradient).tolist() == [expected]


def test_what_was_not_selected_is_left_out(tmp_path: Path) -> None:
    method = {"name": "dp-fedags-proven", "batch_size": 8, "selected": 0.1}
    run = open_run(
        finished(
            tmp_path,
            method,
            task={"data_options": {"max_train": 8}},
            partition={"kind": "iid", "clients": 2},
            run={"rounds": 1, "sampler": "all", "cohort": None},
        )
    )
    view = server_view(run, read_exchange(run, 1), [0], examples=4)
    assert view.adaptation.kind == "mask"
    sent = sum(int((leaf != 0).sum()) for leaf in view.observed.values())
    assert 0 < sent <= 1 + 0.1 * sum(leaf.numel() for leaf in view.params.values())


def test_a_server_without_the_whole_model_cannot_invert(tmp_path: Path) -> None:
    run = open_run(
        finished(tmp_path, {"name": "centaur", "batch_size": 2}, task={"model": "mlp-2"}, run={"rounds": 1})
    )
    exchange = read_exchange(run, 1)
    with pytest.raises(InputError, match="never holds"):
        server_view(run, exchange, exchange.clients[:1], examples=1)


def test_an_upload_without_gradient_is_refused(fedem: RecordedRun) -> None:
    from dataclasses import dataclass, replace

    from fedveil.messages import Message

    @dataclass(frozen=True)
    class Pictures(Message):
        images: torch.Tensor

    exchange = read_exchange(fedem, 1)
    other = replace(exchange, up=Pictures(torch.zeros(2, 3)))
    with pytest.raises(InputError, match="no gradient"):
        server_view(fedem, other, exchange.clients[:1], examples=1)


def test_a_run_without_transcript_says_how_to_get_one(tmp_path: Path) -> None:
    folder = finished(tmp_path, {"name": "fedsgd", "batch_size": 2}, run={"transcript": False, "rounds": 1})
    with pytest.raises(ResultError, match=r"run\.transcript=true"):
        open_run(folder)
    with pytest.raises(ResultError, match="no run"):
        open_run(tmp_path / "nothing")


def test_only_the_asked_rounds_and_exchanges_are_recorded(tmp_path: Path) -> None:
    folder = finished(
        tmp_path, {"name": "fedsgd", "batch_size": 2}, run={"transcript": [2], "transcript_exchanges": 1}
    )
    assert [p.name for p in (folder / "transcript").iterdir()] == ["round-000002"]
    assert len(list((folder / "transcript" / "round-000002").iterdir())) == 1


@pytest.mark.parametrize(
    ("wrap", "kind"),
    [
        ({"name": "gradient-masking"}, "mask"),
        ({"name": "gradient-pruning"}, "mask"),
        ({"name": "sign-compression"}, "sign"),
        ({"name": "gradient-gaussian", "std": 0.1}, "noise"),
        ({"name": "gradient-laplace", "scale": 0.1}, "noise"),
        ({"name": "ppfa"}, "noise"),
        ({"name": "ldpm"}, "noise"),
        ({"name": "dp-sgd"}, "noise"),
    ],
)
def test_the_attacker_knows_the_defence(wrap: dict[str, Any], kind: str) -> None:
    method = make_config({"method": {"name": "fedsgd"}, "wrap": [wrap]}).build_method()
    assert method.adaptation(At(Plan(2, 2, "all", 1), 1), 1000, 8).kind == kind
    assert method.defences() == (wrap["name"],)


@pytest.mark.parametrize(
    ("method", "std"),
    [
        (
            {"name": "udp-fedavg", "clip": 2.0, "noise_multiplier": 0.5, "noise_scope": "local", "lr": 0.1},
            10.0,
        ),
        ({"name": "fedceo", "clip": 2.0, "noise_multiplier": 0.5, "noise_scope": "local", "lr": 0.1}, 10.0),
        ({"name": "fedceo", "clip": 2.0, "noise_multiplier": 0.5, "lr": 0.1, "server_lr": 3.0}, 5.0),
        ({"name": "ppsgd", "clip": 2.0, "noise_multiplier": 0.5, "lr": 0.1, "server_lr": 3.0}, 5.0),
        ({"name": "dp-fedavg", "unit": "record", "record_rate": 0.25, "clip": 2.0, "epochs": 4}, 4.0),
        ({"name": "fedceo", "unit": "record", "batch_size": 8, "clip": 2.0, "lr": 0.1, "epochs": 4}, 0.5),
        ({"name": "fedceo", "clip": 2.0, "noise_multiplier": 0.0}, 0.0),
        ({"name": "fedavg"}, 0.0),
        ({"name": "fedem", "rho_max": 1.0}, 0.0),
    ],
)
def test_noise_is_known_from_what_a_method_declares(method: dict[str, Any], std: float) -> None:
    built = make_config({"method": method}).build_method()
    known = built.adaptation(At(Plan(4, 4, "all", 1, 8, 8), 1), 9, 8)
    assert known.kind == ("noise" if std else "none")
    assert known.noise == pytest.approx(std)


@pytest.mark.parametrize("name", ["dp-fedags", "dp-fedsnlc"])
def test_coordinates_that_a_method_leaves_bare_are_compared_alone(name: str) -> None:
    method = make_config({"method": {"name": name, "clip": 5.0}}).build_method()
    known = method.adaptation(At(Plan(4, 4, "all", 1, 8, 8), 1), 9, 8)
    assert known.kind == "small"
    assert known.limit == pytest.approx(0.1)


def test_declared_noise_is_the_noise_that_is_sent(tmp_path: Path) -> None:
    fields = {"name": "fedceo", "batch_size": 2, "lr": 0.1, "clip": 0.5, "noise_multiplier": 3.0}
    more = {
        "task": {"data_options": {"max_train": 8}},
        "partition": {"kind": "iid", "clients": 2},
        "run": {"rounds": 1, "sampler": "all", "cohort": None},
    }
    views = []
    for name, method in (("loud", fields), ("quiet", fields | {"noise_multiplier": 0.0})):
        run = open_run(finished(tmp_path / name, method, **more))
        views.append(server_view(run, read_exchange(run, 1), [0], examples=4))
    loud, quiet = views
    difference = torch.cat([(loud.observed[name] - quiet.observed[name]).flatten() for name in loud.observed])
    assert float(difference.std()) == pytest.approx(loud.adaptation.noise, rel=0.1)


def test_the_attacker_who_comes_closer_is_kept(tmp_path: Path) -> None:
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


def test_rows_of_a_table_drowned_in_noise_are_not_called_given_away(tmp_path: Path) -> None:
    """Of forty rows with two features each has a like among forty others, whatever was sent."""
    rng = np.random.default_rng(0)
    cells = [f"{k % 3},{rng.normal(50, 15):.1f},{rng.integers(18, 80)},{k % 2}" for k in range(180)]
    (tmp_path / "t.csv").write_text("\n".join(["who,a,b,y", *cells]))
    options = {"path": str(tmp_path / "t.csv"), "label": "y", "user": "who"}
    folder = finished(
        tmp_path,
        {"name": "udp-fedavg", "noise_multiplier": 1000.0},
        task={"dataset": "table", "data_options": options},
        partition={"kind": "user"},
        run={"rounds": 1, "cohort": 3},
    )
    run = open_run(folder)
    size = run.prepared.clients.sizes[0]
    command = ["attack", str(folder), "--attack", "inverting-gradients", "--round", "1", "--client", "0"]
    done = CliRunner().invoke(app, [*command, "--examples", str(size), "--set", "steps=5"])
    assert done.exit_code == 0, done.output
    assert "no better than showing the mean image, or public ones" in " ".join(done.output.split())
