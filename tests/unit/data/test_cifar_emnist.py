from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedveil.data import cifar, emnist
from fedveil.data.cifar import CIFAR100_COARSE, CIFAR100_FINE, load_cifar10, load_cifar100, read_cifar_pickle
from fedveil.data.emnist import BALANCED, BYCLASS, Variant, load_emnist
from fedveil.errors import DataError
from tests.refusals import refuses

from .makers import cifar_bytes, idx_bytes, tiles, write


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def pictures(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)


@pytest.mark.parametrize("ending", [".bin", ".bin.xz", ".bin.gz"])
def test_cifar10_takes_the_batches_that_are_present(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(cifar, "KNOWN_SHA256", {})
    made = {
        name: (pictures(rng, 4), rng.integers(0, 10, 4))
        for name in ("data_batch_2", "data_batch_5", "test_batch")
    }
    for name, (pixels, y) in made.items():
        write(tmp_path / f"cifar-10-batches-bin/{name}{ending}", cifar_bytes(pixels, y))
    dataset = load_cifar10(data_dir=tmp_path, normalise="none")
    assert "8 training examples from 2 of 5 batches" in dataset.summary
    expected = np.concatenate([made["data_batch_2"][0], made["data_batch_5"][0]])
    assert np.array_equal(dataset.train.x.numpy(), expected)
    assert np.array_equal(dataset.test.y.numpy(), made["test_batch"][1])
    assert dataset.classes[3] == "cat"


def test_batches_of_two_places_never_mix(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar, "KNOWN_SHA256", {})
    for place, batches in (
        ("mine", ["data_batch_1", "test_batch"]),
        ("named", ["data_batch_2", "test_batch"]),
    ):
        for name in batches:
            write(tmp_path / place / f"{name}.bin", cifar_bytes(pictures(rng, 2), np.zeros(2)))
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "named"))
    assert len(load_cifar10(data_dir=tmp_path / "mine").train) == 2
    (tmp_path / "mine/test_batch.bin").unlink()
    assert len(load_cifar10(data_dir=tmp_path / "mine").train) == 2  # the whole of the other place
    (tmp_path / "named/data_batch_2.bin").unlink()
    with refuses("missing", DataError):
        load_cifar10(data_dir=tmp_path / "mine")


def test_a_known_batch_with_other_content_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    for name in ("data_batch_1", "test_batch"):
        write(tmp_path / f"cifar-10-batches-bin/{name}.bin", cifar_bytes(pictures(rng, 2), np.zeros(2)))
    with refuses("sha256", DataError):
        load_cifar10(data_dir=tmp_path)


def test_labels_out_of_range_and_cut_records_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    content = cifar_bytes(pictures(rng, 2), np.array([1, 10]))
    path = write(tmp_path / "a.bin", content)
    with refuses("labels", DataError):
        cifar.read_cifar_binary(path, label_bytes=1, num_classes=10)
    path.write_bytes(content[:-5])
    with refuses("size", DataError, value=6141):
        cifar.read_cifar_binary(path, label_bytes=1, num_classes=10)


def test_cifar100_reads_fine_and_coarse_labels(tmp_path: Path, rng: np.random.Generator) -> None:
    assert (len(set(CIFAR100_FINE)), len(set(CIFAR100_COARSE))) == (100, 20)
    assert list(CIFAR100_FINE) == sorted(CIFAR100_FINE)
    for name in ("train", "test"):
        write(
            tmp_path / f"cifar-100-binary/{name}.bin",
            cifar_bytes(pictures(rng, 3), np.array([0, 19, 5]), np.array([99, 0, 42])),
        )
    assert load_cifar100(data_dir=tmp_path).train.y.tolist() == [99, 0, 42]
    assert load_cifar100(data_dir=tmp_path, labels="coarse").train.y.tolist() == [0, 19, 5]


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
@pytest.mark.parametrize("byte_keys", [True, False])
def test_the_python_version_reads_as_the_binary_one(
    tmp_path: Path, rng: np.random.Generator, module: bytes, byte_keys: bool
) -> None:
    pixels, y = pictures(rng, 3), [1, 2, 0]
    batch = {b"data": pixels.reshape(3, -1), b"labels": y, b"batch_label": b"x", b"filenames": [b"a"] * 3}
    named = batch if byte_keys else {key.decode(): value for key, value in batch.items()}
    content = pickle.dumps(named, protocol=2).replace(b"numpy._core.multiarray", module)
    for name in ("data_batch_1", "test_batch"):
        write(tmp_path / "cifar-10-batches-py" / name, content)
    dataset = load_cifar10(data_dir=tmp_path, normalise="none")
    assert np.array_equal(dataset.train.x.numpy(), pixels)
    assert dataset.train.y.tolist() == y


class Harmful:
    def __init__(self, call: object, *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[object, ...]:
        return self.call, self.arguments


def test_a_pickle_cannot_run_anything(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for call in (os.system, eval, getattr):
        content = pickle.dumps({b"data": Harmful(call, f"touch {marker}"), b"labels": [0]}, protocol=2)
        with refuses("pickle", DataError):
            read_cifar_pickle(write(tmp_path / "batch", content), b"labels", num_classes=10)
    assert not marker.exists()


@pytest.mark.parametrize(
    "batch",
    [
        [1, 2],
        {b"labels": [0]},
        {b"data": np.zeros((1, 3072), np.uint8)},
        {b"data": np.zeros((1, 3072), np.float32), b"labels": [0]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]},
        {b"data": np.zeros((1, 3000), np.uint8), b"labels": [0]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": ["cat"]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": [2**70]},
    ],
)
def test_a_pickle_with_other_content_is_refused(tmp_path: Path, batch: object) -> None:
    path = write(tmp_path / "batch", pickle.dumps(batch, protocol=2))
    with pytest.raises(DataError) as caught:
        read_cifar_pickle(path, b"labels", num_classes=10)
    assert caught.value.field in ("batch", "labels", "pickle")
    assert str(path) in str(caught.value)


def write_sheets(folder: Path, pixels: np.ndarray, labels: list[int], columns: int = 10) -> None:
    """Two sheets of tiles as the packed EMNIST has them: lossless WebP, three equal channels."""
    folder.mkdir(parents=True)
    half = (len(pixels) // 2 // columns) * columns
    names = []
    for start, stop in ((0, half), (half, len(pixels))):
        part = pixels[start:stop]
        rows = -(-len(part) // columns)
        sheet = np.zeros((rows * 28, columns * 28), np.uint8)
        for k, tile in enumerate(part):
            row, column = divmod(k, columns)
            sheet[row * 28 : row * 28 + 28, column * 28 : column * 28 + 28] = tile
        names.append(f"X_{start}.webp")
        Image.fromarray(np.repeat(sheet[:, :, None], 3, axis=2)).save(folder / names[-1], lossless=True)
    index = {
        "width": 28,
        "height": 28,
        "files": names,
        "mapping": [ord(c) for c in BYCLASS],
        "id": labels,
    }
    (folder / "test.json").write_text(json.dumps(index))


@pytest.fixture
def sheets(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, np.ndarray, np.ndarray]:
    monkeypatch.setattr(emnist, "SHEETS_SHA256", {})
    labels = np.concatenate([np.tile(np.arange(62), 7), [0, 0, 0]])
    pixels = tiles(rng, len(labels))
    write_sheets(tmp_path / "emnist-byclass-test", pixels, labels.tolist())
    return tmp_path, pixels, labels


@pytest.mark.parametrize(
    "variant, classes, size",
    [("byclass", 62, 437), ("digits", 10, 73), ("letters", 26, 364), ("balanced", 47, 329)],
)
def test_the_sheets_give_every_variant_split_six_to_one(
    sheets: tuple[Path, np.ndarray, np.ndarray], variant: Variant, classes: int, size: int
) -> None:
    folder, pixels, labels = sheets
    dataset = load_emnist(variant=variant, data_dir=folder, normalise="none")
    assert dataset.num_classes == classes
    assert len(dataset.train) + len(dataset.test) == size
    assert len(dataset.test) == pytest.approx(size / 7, abs=1)
    assert "WebP sheets" in dataset.summary
    where = {tile.tobytes(): int(label) for tile, label in zip(pixels, labels, strict=True)}
    for x, y in zip(dataset.train.x[:50].numpy(), dataset.train.y[:50].tolist(), strict=True):
        character = BYCLASS[where[x[0].astype(np.uint8).tobytes()]]
        name = dataset.classes[y]
        assert name == (character.lower() if variant == "letters" else name)
        assert name in (character, character.upper(), character.lower())
    if variant == "balanced":
        counts = dataset.train.y.bincount() + dataset.test.y.bincount()
        assert counts.tolist() == [7] * 47  # as many of each


def test_balanced_merges_the_fifteen_look_alikes() -> None:
    assert len(BALANCED) == 47
    assert sorted(set(BYCLASS) - set(BALANCED)) == sorted("cijklmopsuvwxyz")


def test_a_sheet_with_other_content_is_refused(
    sheets: tuple[Path, np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emnist, "SHEETS_SHA256", {"X_0.webp": "0" * 64})
    with refuses("sha256", DataError):
        load_emnist(variant="letters", data_dir=sheets[0])


@pytest.mark.parametrize(
    "change",
    [
        {"files": ["../X_0.webp"]},
        {"files": ["X_0.webp"]},
        {"id": [0, 62]},
        {"id": ["a"]},
        {"width": 20},
        {"mapping": [1]},
        {"files": ["none.webp"]},
        {"id": []},
    ],
)
def test_a_wrong_index_is_refused(
    sheets: tuple[Path, np.ndarray, np.ndarray], change: dict[str, object]
) -> None:
    index = sheets[0] / "emnist-byclass-test/test.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | change))
    with pytest.raises(DataError):
        load_emnist(variant="byclass", data_dir=sheets[0])


def test_idx_files_come_first_stand_upright_and_count_letters_from_zero(
    sheets: tuple[Path, np.ndarray, np.ndarray], rng: np.random.Generator
) -> None:
    upright = tiles(rng, 4)
    for split in ("train", "test"):
        stem = sheets[0] / "emnist" / f"emnist-letters-{split}"
        write(Path(f"{stem}-images-idx3-ubyte.gz"), idx_bytes(upright.swapaxes(1, 2)))
        write(Path(f"{stem}-labels-idx1-ubyte.gz"), idx_bytes(np.array([1, 26, 3, 1])))
    dataset = load_emnist(variant="letters", data_dir=sheets[0], normalise="none")
    assert "IDX" in dataset.summary
    assert dataset.train.y.tolist() == [0, 25, 2, 0]
    assert np.array_equal(dataset.train.x[:, 0].numpy(), upright)
    assert dataset.train.x.is_contiguous()


def test_missing_emnist_names_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with refuses("missing", DataError) as caught:
        load_emnist(variant="digits", data_dir=tmp_path)
    for name in ("emnist-digits-train-images-idx3-ubyte", "emnist-byclass-test/"):
        assert name in str(caught.value)
