"""From a run's folder to the server's view of an exchange, and to the truth: what is observed, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil.attack_runs.inversion import attack_exchange
from fedveil.attack_runs.transcript import StoredRun, open_run, read_exchange, server_view, truth
from fedveil.attacks.inversion.matching import candidate_gradients
from fedveil.attacks.registry import make_attack
from fedveil.errors import InputError, ResultError
from fedveil.experiment.config import make_config
from fedveil.methods.cpsgd import CpSGD, Levels, rotate
from fedveil.methods.dp_fedags_proven import DPFedAGSProven, ModelAndMask, Selected
from fedveil.methods.method import At
from fedveil.methods.shared_model import Model
from fedveil.privacy.releases import Plan
from fedveil.task import Batch
from fedveil.tree import flatten, with_axis
from tests.unit.attack_runs.finished import finished

QUICK = {"steps": 3}
QUIET = {"clip": 1e3, "noise_multiplier": 0.0}


def test_the_truth_is_what_the_client_sent_the_gradient_of(fedem: StoredRun) -> None:
    exchange = read_exchange(fedem, 2, 1)
    client = exchange.clients[1]
    held = truth(fedem, exchange, [client])
    assert held.delta is not None
    assert float(held.delta.abs().max()) > 0
    view = server_view(fedem, exchange, [client])
    again = fedem.prepared.task.grad(with_axis(view.params), Batch(held.x + held.delta, held.y))
    for name, leaf in again.items():
        torch.testing.assert_close(leaf, view.observed[name], rtol=1e-5, atol=1e-7)


def test_rounds_exchanges_and_clients_that_were_not_recorded_are_refused(fedem: StoredRun) -> None:
    with pytest.raises(InputError) as error:
        read_exchange(fedem, 7)
    assert error.value.field == "round"
    with pytest.raises(InputError) as error:
        read_exchange(fedem, 1, 99)
    assert error.value.field == "exchange"
    absent = next(k for k in range(300) if k not in read_exchange(fedem, 1).clients)
    for client in (absent, 300):
        with pytest.raises(InputError) as error:
            attack_exchange(fedem, make_attack("inverting-gradients", QUICK), round=1, clients=[client])
        assert error.value.field == "client"


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
def test_every_upload_with_a_step_size_is_read_as_its_gradient(
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
    """A candidate equal to the data has loss zero; otherwise no search could find it. The attack uses all that a
    server knows of the method, and of what the client sent before."""
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


def test_uploads_of_unrecorded_rounds_are_noted_as_unknown(tmp_path: Path) -> None:
    folder = finished(
        tmp_path,
        {"name": "scaffold", "batch_size": 8},
        task={"data_options": {"max_train": 8}},
        partition={"kind": "iid", "clients": 2},
        run={"rounds": 2, "sampler": "all", "cohort": None, "transcript": [2]},
    )
    run = open_run(folder)
    assert "not recorded" in server_view(run, read_exchange(run, 2), [0], examples=4).notes[0]


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
    with pytest.raises(InputError) as error:
        server_view(run, exchange, exchange.clients[:1], examples=1)
    assert error.value.field == "method"


def test_an_upload_without_gradient_is_refused(fedem: StoredRun) -> None:
    from dataclasses import dataclass, replace

    from fedveil.messages import Message

    @dataclass(frozen=True)
    class Pictures(Message):
        images: torch.Tensor

    exchange = read_exchange(fedem, 1)
    other = replace(exchange, up=Pictures(torch.zeros(2, 3)))
    with pytest.raises(InputError) as error:
        server_view(fedem, other, exchange.clients[:1], examples=1)
    assert error.value.field == "method"


def test_a_run_without_transcript_is_refused_with_a_remedy(tmp_path: Path) -> None:
    folder = finished(tmp_path, {"name": "fedsgd", "batch_size": 2}, run={"transcript": False, "rounds": 1})
    with pytest.raises(ResultError):
        open_run(folder)
    with pytest.raises(ResultError):
        open_run(tmp_path / "nothing")


def test_only_the_requested_rounds_and_exchanges_are_recorded(tmp_path: Path) -> None:
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
