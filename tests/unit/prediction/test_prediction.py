"""A finished run's model in use: loaded, applied to new files, exported."""

from __future__ import annotations

import csv
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

import fedveil
from fedveil.cli import app
from fedveil.errors import DataError, ResultError
from fedveil.evaluation.accuracy import evaluate
from fedveil.experiment.config import Config, make_config
from fedveil.experiment.prepare import load_examples, prepare
from fedveil.experiment.run import run_seed
from fedveil.features import normalise
from fedveil.prediction.export import DESCRIPTION, export
from fedveil.prediction.trained import TrainedModel, finished_run, load_trained

HEADER = ["hospital", "age", "pressure", "smoker", "ill"]


def write_patients(path: Path, rows: int = 200) -> None:
    draw = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        for _ in range(rows):
            age, smoker = draw.randint(20, 90), draw.choice(["yes", "no"])
            ill = "sick" if age + 20 * (smoker == "yes") > 60 else "well"
            writer.writerow([f"H{draw.randint(1, 4)}", age, f"{draw.gauss(125, 15):.1f}", smoker, ill])


def config(path: Path) -> dict[str, Any]:
    return {
        "task": {
            "dataset": "table",
            "model": "mlp-2",
            "data_options": {"path": str(path), "label": "ill", "user": "hospital"},
        },
        "partition": {"kind": "user"},
        "method": {"name": "fedavg", "epochs": 2},
        "run": {"rounds": 3},
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A table and the result folder of a run on it."""
    place = tmp_path_factory.mktemp("patients")
    table = place / "patients.csv"
    write_patients(table)
    made = make_config(config(table))
    result = run_seed(made, 0, experiment="patients", results=place / "results")
    assert result.folder is not None
    return table, result.folder


def test_a_loaded_model_scores_as_the_run_did(trained: tuple[Path, Path]) -> None:
    table, folder = trained
    prepared = prepare(make_config(config(table)), 0)
    model = fedveil.load(folder)
    assert model.classes == ("sick", "well")
    probabilities = torch.softmax(model.network(prepared.dataset.test.x), -1)
    hits = (probabilities.argmax(-1) == prepared.dataset.test.y).double().mean()
    summary = json.loads((folder / "summary.json").read_text())
    assert float(hits) == pytest.approx(summary["accuracy"])
    params: dict[str, torch.Tensor] = dict(model.network.named_parameters())
    test = prepared.dataset.test
    assert evaluate(prepared.task, params, test.x, test.y).loss == pytest.approx(summary["loss"])


def test_preprocessing_of_new_rows_equals_that_of_training(trained: tuple[Path, Path]) -> None:
    """The features of a file are, bit by bit, those that training made of the same rows."""
    table, folder = trained
    dataset = prepare(make_config(config(table)), 0).dataset
    model = load_trained(folder)
    features = {tuple(row) for row in model.preprocess(model.read(table)).tolist()}
    assert {tuple(row) for row in dataset.train.x.tolist()} <= features


def test_predict_writes_classes_and_probabilities(trained: tuple[Path, Path], tmp_path: Path) -> None:
    table, folder = trained
    new, target = tmp_path / "new.csv", tmp_path / "out.csv"
    lines = table.read_text().splitlines()
    new.write_text("\n".join(line.rsplit(",", 1)[0] for line in lines[:21]) + "\n")  # without the label
    done = CliRunner().invoke(app, ["predict", str(folder), str(new), "-o", str(target)])
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(target.read_text().splitlines()))
    assert len(rows) == 20
    for row in rows:
        sick, well = float(row["probability of sick"]), float(row["probability of well"])
        assert sick + well == pytest.approx(1, abs=1e-5)
        assert row["predicted"] == ("sick" if sick >= well else "well")


@pytest.mark.parametrize(
    "content, named",
    [
        ("age,pressure\n50,120\n", ["'smoker'"]),
        ("age,pressure,smoker\n50,120,yes\n50,120,sometimes\n", ["row 2", "'smoker'"]),
        ("age,pressure,smoker\n50,120,yes\nold,120,no\n", ["row 2", "'age'"]),
        ("age,pressure,smoker\n50,,yes\n", ["row 1", "'pressure'"]),
        ("age,pressure,smoker\n50,inf,yes\n", ["row 1", "'pressure'"]),
        ("age,pressure,smoker\n", ["new.csv"]),
    ],
)
def test_a_file_that_differs_from_the_schema_is_refused_with_its_place(
    trained: tuple[Path, Path], tmp_path: Path, content: str, named: list[str]
) -> None:
    new = tmp_path / "new.csv"
    new.write_text(content)
    with pytest.raises(DataError) as caught:
        load_trained(trained[1]).predict(new)
    for part in [str(new), *named]:
        assert part in str(caught.value)


def _copied(folder: Path, target: Path, change: Any) -> Path:
    target.mkdir()
    for name in ("summary.json", "model.safetensors", "rounds.jsonl"):
        (target / name).write_bytes((folder / name).read_bytes())
    summary = json.loads((target / "summary.json").read_text())
    change(summary)
    (target / "summary.json").write_text(json.dumps(summary))
    return target


@pytest.mark.parametrize(
    "change",
    [
        lambda summary: summary["prediction"].update(format=99),
        lambda summary: summary.pop("prediction"),
        lambda summary: summary["prediction"].update(model="no-such-model"),
        lambda summary: summary["prediction"].update(input_shape=[77]),
        lambda summary: summary["prediction"]["schema"].pop("classes"),
        lambda summary: summary.update(prediction=3),
    ],
)
def test_a_model_of_another_version_or_damaged_is_refused(
    trained: tuple[Path, Path], tmp_path: Path, change: Any
) -> None:
    folder = _copied(trained[1], tmp_path / "copy", change)
    with pytest.raises(ResultError) as caught:
        fedveil.load(folder)
    assert str(folder) in str(caught.value)


def test_an_unfinished_run_has_no_model(tmp_path: Path) -> None:
    with pytest.raises(ResultError):
        fedveil.load(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_answers_as_the_model_does(trained: tuple[Path, Path], tmp_path: Path) -> None:
    table, folder = trained
    model, target = load_trained(folder), tmp_path / "model.pt"
    done = CliRunner().invoke(app, ["export", str(folder), "-o", str(target)])
    assert done.exit_code == 0, done.output
    held = {DESCRIPTION: ""}
    loaded = torch.jit.load(target, _extra_files=held)
    x = model.read(table)
    assert torch.allclose(loaded(x), model(x))
    assert json.loads(held[DESCRIPTION])["classes"] == ["sick", "well"]


def test_the_only_run_below_a_folder_is_found(trained: tuple[Path, Path], tmp_path: Path) -> None:
    folder = trained[1]
    assert finished_run(folder) == finished_run(folder.parent.parent) == folder
    for name in ("one", "two"):
        shutil.copytree(folder, tmp_path / "results" / name / "seed-0")
    with pytest.raises(ResultError) as refused:
        load_trained(tmp_path / "results")
    assert refused.value.field == "RESULT"
    assert finished_run(tmp_path / "nowhere") == tmp_path / "nowhere"


def test_pytorch_weights_load_without_pickled_code(trained: tuple[Path, Path], tmp_path: Path) -> None:
    model = load_trained(trained[1])
    export(model, "pytorch", tmp_path / "model.pt")
    held = torch.load(tmp_path / "model.pt", weights_only=True)
    other = load_trained(trained[1])
    other.load_state_dict(held["state_dict"])
    assert json.loads(held[DESCRIPTION])["model"] == "mlp-2"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_onnx_answers_as_the_model_does(trained: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    table, folder = trained
    model = load_trained(folder)
    export(model, "onnx", tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    x = model.read(table)
    assert len(x) != 2  # not the number of rows that was traced
    (found,) = session.run(["probabilities"], {"input": x.numpy()})
    assert np.allclose(found, model(x).numpy(), atol=1e-6)
    held = session.get_modelmeta().custom_metadata_map
    assert json.loads(held[DESCRIPTION])["classes"] == ["sick", "well"]


def test_images_are_given_by_their_brightness(tmp_path: Path) -> None:
    made = make_config(
        {
            "task": {"data_options": {"max_train": 100, "max_test": 20}},
            "partition": {"clients": 2},
            "run": {"rounds": 1},
        }
    )
    result = run_seed(made, 0, experiment="digits", results=tmp_path)
    assert result.folder is not None
    model, dataset = load_trained(result.folder), prepare(made, 0).dataset
    mean, std = torch.tensor(dataset.mean), torch.tensor(dataset.std)
    brightness = dataset.test.x * std[:, None, None] + mean[:, None, None]
    assert torch.allclose(model.preprocess(brightness), dataset.test.x, atol=1e-5)
    np.savez(tmp_path / "new.npz", x=brightness.numpy())
    found = model.predict(tmp_path / "new.npz")
    assert len(found.predicted) == 20
    np.savez(tmp_path / "new.npz", x=np.zeros((3, 1, 5, 5)))
    with pytest.raises(DataError):
        model.predict(tmp_path / "new.npz")


SCATTERED: list[dict[str, Any]] = [
    {},
    {"square_root": True, "mirror": True, "centring": "place", "synthetic": "glyphs"},
    {"square_root": True, "centring": "place", "synthetic": "scenes", "whitening": 1.0, "pooling": 2},
    {"mirror": True, "synthetic": "leaves"},
]


@pytest.fixture(params=SCATTERED, ids=lambda options: "-".join(options) or "plain")
def scattered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[Config, Path]]:
    """A model of scattering features, and its configuration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(normalise, "COUNT", 64)
    normalise.constants.cache_clear()
    made = make_config(
        {
            "task": {
                "data_options": {"max_train": 100, "max_test": 20},
                "features": "scattering",
                "feature_options": {"depth": 1, "angles": 4} | request.param,
                "model": "logistic",
            },
            "partition": {"clients": 2},
            "run": {"rounds": 1},
        }
    )
    result = run_seed(made, 0, experiment="digits", results=tmp_path)
    assert result.folder is not None
    yield made, result.folder
    normalise.constants.cache_clear()


def brightness_of_digits() -> Tensor:
    plain = load_examples(make_config({"task": {"data_options": {"max_train": 100, "max_test": 20}}}), None)
    mean, std = torch.tensor(plain.mean), torch.tensor(plain.std)
    return plain.test.x * std[:, None, None] + mean[:, None, None]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_feature_map_is_part_of_the_model(scattered: tuple[Config, Path], tmp_path: Path) -> None:
    made, folder = scattered
    model, dataset, brightness = load_trained(folder), prepare(made, 0).dataset, brightness_of_digits()
    assert torch.allclose(model.preprocess(brightness), dataset.test.x, atol=2e-3)  # kept in half precision
    export(model, "torchscript", tmp_path / "model.pt")
    assert torch.allclose(torch.jit.load(tmp_path / "model.pt")(brightness), model(brightness), atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("options", SCATTERED, ids=lambda options: "-".join(options) or "plain")
def test_exports_of_features_of_colour_images_agree(options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    pictures, rng = tmp_path / "pictures", np.random.default_rng(0)
    for number in range(40):
        place = pictures / f"class-{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    made = make_config(
        {
            "task": {
                "dataset": "image-folder",
                "data_options": {"path": str(pictures)},
                "features": "scattering",
                "feature_options": {"depth": 1, "angles": 2} | options,
                "model": "logistic",
            },
            "partition": {"clients": 2},
            "method": {"name": "fedavg", "lr": 5.0},
            "run": {"rounds": 3},
        }
    )
    result = run_seed(made, 0, experiment="colours", results=tmp_path)
    assert result.folder is not None
    model = load_trained(result.folder)
    brightness = torch.from_numpy(rng.random((7, 3, 12, 12))).float()
    loaded = model(brightness)
    assert float((loaded - loaded.mean(0)).abs().max()) > 1e-4  # it answers by what it is shown
    export(model, "torchscript", tmp_path / "model.pt")
    export(model, "onnx", tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (answered,) = session.run(["probabilities"], {"input": brightness.numpy()})
    assert np.allclose(answered, loaded.numpy(), atol=1e-5)
    assert torch.allclose(torch.jit.load(tmp_path / "model.pt")(brightness), loaded, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_onnx_computes_the_features_of_images_too(scattered: tuple[Config, Path], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, brightness = load_trained(scattered[1]), brightness_of_digits()
    export(model, "onnx", tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(["probabilities"], {"input": brightness.numpy()})
    assert np.allclose(found, model(brightness).numpy(), atol=1e-5)


def test_texts_are_one_a_line(tmp_path: Path) -> None:
    rows = [f"{'good' if k % 2 else 'bad'} film {k}\t{k % 2}" for k in range(40)]
    (tmp_path / "reviews.tsv").write_text("\n".join(rows) + "\n")
    made = make_config(
        {
            "task": {
                "dataset": "labelled-text",
                "model": "lstm",
                "data_options": {"path": str(tmp_path / "reviews.tsv")},
                "model_options": {"embedding": 4, "hidden": 4},
                "text": {"length": 6, "size": 50},
            },
            "partition": {"clients": 2},
            "run": {"rounds": 1},
        }
    )
    result = run_seed(made, 0, experiment="reviews", results=tmp_path)
    assert result.folder is not None
    (tmp_path / "new.txt").write_text("good film\nbad film\n")
    assert len(load_trained(result.folder).predict(tmp_path / "new.txt").predicted) == 2


def test_the_weights_of_a_run_from_python_go_into_the_users_model(tmp_path: Path) -> None:
    pairs = [(torch.randn(12, 5), torch.arange(12) % 2) for _ in range(3)]
    build = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(5, 2))
    result = fedveil.run(
        fedveil.Task(build), pairs, fedveil.METHODS["fedavg"](), rounds=2, results=tmp_path / "run"
    )
    with pytest.raises(ResultError):
        fedveil.load(tmp_path / "run")
    loaded = fedveil.load(tmp_path / "run", model=build)
    assert not isinstance(loaded, TrainedModel)
    assert torch.equal(dict(loaded.named_parameters())["1.weight"], result.model["1.weight"])
