"""A recorded run on texts, attacked from the command line: scores always, texts only where they may be shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fedveil.cli.attack
import fedveil.cli.report
from fedveil.attack_runs.inversion import attack_exchange
from fedveil.attack_runs.transcript import StoredRun, open_run, read_exchange, server_view, truth
from fedveil.attacks.registry import make_attack
from fedveil.attacks.view import UNKNOWN
from fedveil.cli import app
from fedveil.errors import InputError
from fedveil.experiment.config import make_config
from fedveil.experiment.run import run_seed
from tests.unit.attacks.texts import WORDS, sentences

QUICK = ["--set", "steps=5", "--set", "starts=10", "--set", "swaps=10", "--set", "prior=n-gram"]


def finished(folder: Path, dataset: str, method: dict[str, object], model: str = "transformer") -> Path:
    """A run of one round on sentences of the small grammar, under the name of a public dataset."""
    data = folder / "data"
    labelled = [f"{text}\t{i % 2}" for i, text in enumerate(sentences(60, "files"))]
    (data / "sst2").mkdir(parents=True)
    for name in ("train.tsv", "test.tsv"):
        (data / "sst2" / name).write_text("\n".join(labelled) + "\n")
    (data / "sentiment140").mkdir()
    for name in ("positive.txt", "negative.txt"):
        (data / "sentiment140" / name).write_text("\n".join(sentences(30, name)) + "\n")
    (data / "words.txt").write_text(" ".join(WORDS))
    config = make_config(
        {
            "task": {
                "dataset": dataset,
                "model": model,
                "data_options": {"max_train": 8},
                "text": {
                    "vocabulary": "public",
                    "path": "words.txt",
                    "size": 60,
                    "length": 12,
                    "pack": False,
                },
            },
            "partition": {"kind": "iid", "clients": 4},
            "method": method,
            "run": {"rounds": 1, "sampler": "all", "transcript": True},
        }
    )
    result = run_seed(config, 0, experiment="texts", results=folder / "results", data_dir=data)
    assert result.folder is not None
    return result.folder


@pytest.fixture(autouse=True)
def _other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedveil.data.text.KNOWN_SHA256", {})


@pytest.fixture
def fedem(tmp_path: Path) -> StoredRun:
    method = {"name": "fedem", "batch_size": 2, "perturbation_steps": 2, "rho_max": 0.5}
    return open_run(finished(tmp_path, "sst2", method), tmp_path / "data")


def test_the_view_knows_lengths_and_the_truth_is_what_was_sent(fedem: StoredRun) -> None:
    from fedveil.tree import with_axis

    exchange = read_exchange(fedem, 1)
    held = truth(fedem, exchange, [0])
    assert held.delta is not None
    view = server_view(fedem, exchange, [0], labels=held.y, texts=held.x)
    assert view.text is not None
    assert view.text.known.unique().tolist() == [UNKNOWN, 0]
    assert torch.equal(view.text.known == 0, held.x == 0)
    task = fedem.prepared.task
    from fedveil.task import Batch

    again = task.grad(with_axis(view.params), task.perturbed(Batch(held.x, held.y), held.delta))
    for name, leaf in again.items():
        torch.testing.assert_close(leaf, view.observed[name], rtol=1e-4, atol=1e-6)


def test_an_attack_is_shown_written_and_reported(tmp_path: Path) -> None:
    folder = finished(tmp_path, "sst2", {"name": "fedsgd", "batch_size": 1})
    data = ["--data", str(tmp_path / "data")]
    assert fedveil.cli.attack.attack_command is not None
    arguments = ["attack", str(folder), "--attack", "lamp", "--round", "1", "--client", "0", *QUICK, *data]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "original" in shown.stdout
    assert "ROUGE-L" in shown.stdout
    content = json.loads(CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert content["leaked_tokens"][0]["precision"] == content["leaked_tokens"][0]["recall"] == 1.0
    assert content["metrics"]["rouge1"] > 0.7 > content["public_text"]["rouge1"]
    assert any("3-gram" in note for note in content["notes"])
    assert content["labels_right"] == 1.0
    (pair,) = json.loads((Path(content["finding"]) / "texts.json").read_text())
    assert pair["original"] in sentences(60, "files")
    assert pair["path"][0]["step"] == 0
    page = tmp_path / "page.html"
    assert fedveil.cli.report.report_command is not None
    CliRunner().invoke(app, ["report", str(folder), "--output", str(page)], catch_exceptions=False)
    html = page.read_text()
    assert pair["original"] in html
    assert f"<mark>{pair['original'].split()[0]}</mark>" in html


def test_tweets_are_scored_and_never_shown(tmp_path: Path) -> None:
    folder = finished(tmp_path, "sentiment140", {"name": "fedsgd", "batch_size": 1})
    arguments = ["attack", str(folder), *QUICK, "--data", str(tmp_path / "data")]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    (finding,) = (folder / "attacks").iterdir()
    assert [path.name for path in finding.iterdir()] == ["finding.json"]
    written = (finding / "finding.json").read_text()
    assert json.loads(written)["metrics"]["rouge1"] > 0.7
    private = [text for name in ("positive.txt", "negative.txt") for text in sentences(30, name)]
    for text in private:
        assert text not in result.output
        assert text not in written
    assert "not shown" in result.output


def test_an_attack_on_images_is_refused_and_local_training_is_noted(tmp_path: Path) -> None:
    folder = finished(tmp_path, "sst2", {"name": "fedavg", "batch_size": 1, "epochs": 1, "lr": 0.1})
    run = open_run(folder, tmp_path / "data")
    with pytest.raises(InputError) as error:
        attack_exchange(run, make_attack("inverting-gradients", {"steps": 1}), round=1, clients=[0])
    assert error.value.field == "attack"
    quick = make_attack("lamp", {"steps": 1, "starts": 2, "swaps": 2, "polish": 0, "prior": "none"})
    _, scored = attack_exchange(run, quick, round=1, clients=[0])
    assert "compared as if trained in one step" in scored.finding.notes


def test_a_language_models_targets_are_never_given(tmp_path: Path) -> None:
    folder = finished(tmp_path, "sst2", {"name": "fedsgd", "batch_size": 1}, model="causal-lm")
    run = open_run(folder, tmp_path / "data")
    quick = make_attack("lamp", {"steps": 1, "starts": 2, "swaps": 2, "polish": 0, "prior": "none"})
    _, scored = attack_exchange(run, quick, round=1, clients=[0])
    assert scored.view.labels is None
