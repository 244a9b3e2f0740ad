"""A method that only this file knows goes through everything: run, attacks, audit and report.

Its messages have fields of their own, its clients train and add noise in their own way. What the rest of the library
must know of it, it is told by the method's hooks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass as record
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic.dataclasses import dataclass
from typer.testing import CliRunner

import fedveil.cli.attack
import fedveil.cli.privacy
import fedveil.cli.report
import fedveil.cli.run
from fedveil.attack_runs.membership import attack_result
from fedveil.attack_runs.transcript import open_run, read_exchange, server_view, truth
from fedveil.cli import app
from fedveil.data.client_data import ClientData
from fedveil.experiment.config import Config, make_config
from fedveil.experiment.run import run_seed
from fedveil.messages import Message, Record
from fedveil.methods.disclosure import LocalSteps, UploadReading
from fedveil.methods.fields import STRICT, Clip, LearningRate, NoiseMultiplier
from fedveil.methods.method import At, Method, register, unprotected
from fedveil.privacy.mechanisms import Gaussian
from fedveil.privacy.releases import ADVERSARIES, Plan, Release
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.tree import Params, State, add, expand, mean, scale, sub, with_axis

assert all(
    (fedveil.cli.attack, fedveil.cli.privacy, fedveil.cli.report, fedveil.cli.run)
)  # each adds its commands to `app`


@record(frozen=True)
class Kept(Record):
    weights: Params


@record(frozen=True)
class Question(Message):
    weights: Params


@record(frozen=True)
class Push(Message):
    push: Params


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Pushes(Method[Kept, Question, Push]):
    """Clients take `walk` full-batch steps and send `factor` times the noisy sum of their gradients."""

    lr: LearningRate = 0.5
    walk: int = 1
    factor: float = 3.0
    clip: Clip = 1.0
    noise_multiplier: NoiseMultiplier = 1.0
    added: float = 1.0
    """The part of the declared noise that clients really add; any but 1 is a bug."""

    def init_server(self, params: Params, plan: Plan) -> Kept:
        return Kept(params)

    def broadcast(self, at: At, server: Kept, clients: Sequence[int]) -> Question:
        return Question(with_axis(server.weights))

    def client_update(
        self, task: Task, at: At, down: Question, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Push, State]:
        start = walker = expand(down.weights, data.count)
        for _ in range(self.walk):
            walker = add(walker, task.grad(walker, data.everything()), scale=-self.lr)
        total = scale(sub(start, walker), 1 / self.lr)
        if self.noise_multiplier > 0:
            total = Gaussian(self.clip, self.added * self.noise_multiplier)(total, rng.noise())
        return Push(scale(total, self.factor)), state

    def server_update(
        self,
        task: Task,
        at: At,
        server: Kept,
        clients: Sequence[int],
        up: Push | None,
        rng: ServerStreams,
    ) -> Kept:
        if up is None:
            return server
        return Kept(add(server.weights, mean(up.push), scale=-self.lr / self.factor))

    def model(self, server: Kept) -> Params:
        return server.weights

    def releases(self, plan: Plan) -> Sequence[Release]:
        if self.noise_multiplier == 0:
            return unprotected("the push of each client", "no noise is added")
        price = Gaussian(self.clip, self.noise_multiplier).protection()
        return (Release("the push of each client", "client", ADVERSARIES, price),)

    def sent_model(self, down: Question) -> Params:
        return down.weights

    def local_training(self, at: At) -> LocalSteps:
        local = LocalSteps(self.lr, None, steps=self.walk)
        return replace(local, clip=self.clip) if self.noise_multiplier > 0 else local

    def read_upload(self, at: At, down: Question, up: Push) -> UploadReading:
        return UploadReading.of_gradient(down.weights, scale(up.push, 1 / self.factor), self.lr)


NAME = "pushes-of-a-test"


@pytest.fixture(autouse=True)
def known(names_of_this_test_only: None) -> None:  # noqa: ARG001  (forgets it afterwards)
    register(NAME, "pushes with noise", server=Kept, down=Question, up=Push)(Pushes)


def settings(*, train: int, clients: int, **fields: Any) -> Config:
    return make_config(
        {
            "task": {"dataset": "digits", "model": "logistic", "data_options": {"max_train": train}},
            "partition": {"kind": "iid", "clients": clients},
            "method": {"name": NAME, **fields},
            "run": {"rounds": 2, "sampler": "all", "transcript": True, "workers": 1},
        }
    )


def finished(tmp_path: Path, **more: Any) -> Path:
    folder = run_seed(settings(**more), 0, experiment="own", results=tmp_path).folder
    assert folder is not None
    return folder


def command(*words: str | Path, code: int = 0) -> dict[str, Any]:
    """What a command prints with --json."""
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert done.exit_code == code, done.output
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def test_it_learns(tmp_path: Path) -> None:
    quiet = finished(tmp_path, train=200, clients=4, walk=20, noise_multiplier=0.0)
    assert json.loads((quiet / "summary.json").read_text())["accuracy"] > 0.7


@pytest.mark.parametrize("walk", [1, 5])
def test_a_server_reads_the_local_training_off_a_push(tmp_path: Path, walk: int) -> None:
    """The true data reproduce the upload; otherwise no search could find them."""
    from fedveil.attacks.inversion.matching import candidate_gradients

    run = open_run(finished(tmp_path, train=8, clients=2, walk=walk, noise_multiplier=0.0))
    exchange = read_exchange(run, 2)
    held = truth(run, exchange, [1])
    view = server_view(run, exchange, [1], examples=4)
    again = candidate_gradients(view, held.x, held.y)
    for name, leaf in view.observed.items():
        torch.testing.assert_close(again[name].detach(), leaf, rtol=1e-3, atol=1e-5)
    assert view.adaptation.kind == "none"


def test_inversion_finds_the_image_unless_there_is_noise(tmp_path: Path) -> None:
    found = {}
    for name, sigma in (("bare", 0.0), ("noisy", 1.0)):
        folder = finished(tmp_path / name, train=4, clients=4, noise_multiplier=sigma)
        found[name] = command("attack", folder, "--attack", "analytic", "--examples", "1")
    bare, noisy = (found[name]["against_x"]["mean"]["psnr"] for name in ("bare", "noisy"))
    assert bare > 60
    assert noisy < 15
    assert found["bare"]["method"] == NAME
    assert found["bare"]["adaptation"]["kind"] == "none"
    assert found["noisy"]["adaptation"] == {"kind": "noise", "noise": 1.0, "limit": 0.0}


def test_membership_is_disclosed_unless_there_is_noise(tmp_path: Path) -> None:
    aucs = []
    for sigma in (0.0, 1.0):
        folder = finished(tmp_path / str(sigma), train=200, clients=10, noise_multiplier=sigma)
        upload = attack_result(folder, "gradient-alignment", target="upload", examples=20)
        final = attack_result(folder, "loss-threshold", examples=100)
        assert final.members > 50
        assert "2 models before it" in final.target
        aucs.append(upload.auc.value)
    assert aucs[0] > 0.9
    assert aucs[1] < 0.75


def test_an_audit_refutes_nothing_but_the_variant_with_too_little_noise(tmp_path: Path) -> None:
    sound = finished(tmp_path / "sound", train=40, clients=4)
    answer = command("audit", sound, "--samples", "1000")["audit"]
    assert answer["unit"] == "client"
    assert answer["proven"] is not None
    assert not any(row["broken"] for row in answer["all"])
    broken = finished(tmp_path / "broken", train=40, clients=4, added=0.3)
    answer = command("audit", broken, "--samples", "1000", code=1)["audit"]
    assert any(row["broken"] for row in answer["all"])


def test_every_command_takes_it_and_the_report_names_it_with_what_was_found(tmp_path: Path) -> None:
    file, page = tmp_path / "own.toml", tmp_path / "report.html"
    file.write_text(settings(train=40, clients=4).to_toml())
    assert any(row["epsilon"] for row in command("account", file)["proven"])
    folder = Path(command("run", file, "--results", tmp_path)["result"])
    command("attack", folder, "--attack", "inverting-gradients", "--set", "steps=3", "--examples", "10")
    final = command("attack", folder, "--attack", "loss-threshold", "--examples", "10")
    upload = command("attack", folder, "--attack", "white-box", "--target", "upload", "--examples", "10")
    assert (final["attack"], upload["attack"]) == ("loss-threshold", "white-box")
    command("audit", folder, "--samples", "200")
    command("report", folder, "--output", page)
    text = page.read_text()
    for named in (NAME, "inverting-gradients", "loss-threshold", "white-box", "the push of each client"):
        assert named in text
