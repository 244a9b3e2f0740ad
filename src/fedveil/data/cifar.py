"""CIFAR-10 and CIFAR-100: the binary version, plain or compressed, or the Python version read safely."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np

from fedveil.data.dataset import Dataset, Examples, Normalise, images_from_bytes, labels_from
from fedveil.data.files import find_together, locate, not_found, read_bytes
from fedveil.errors import DataError, InputError

CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_FINE_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel
    can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
    dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion
    lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree
    pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea
    seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank
    telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman
    worm"""
CIFAR100_FINE = tuple(_FINE_NAMES.split())
_COARSE_NAMES = """
    aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
    household_furniture insects large_carnivores large_man-made_outdoor_things
    large_natural_outdoor_scenes large_omnivores_and_herbivores medium_mammals
    non-insect_invertebrates people reptiles small_mammals trees vehicles_1 vehicles_2"""
CIFAR100_COARSE = tuple(_COARSE_NAMES.split())

# sha256 of the decompressed binary batches
KNOWN_SHA256 = {
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

_PIXELS = 3 * 32 * 32
_MOST_RECORDS = 60_000
_HALF = (0.5, 0.5, 0.5)


def load_cifar10(
    *, data_dir: Path | None = None, normalise: Normalise = "dataset", pad_to: int | None = None
) -> Dataset:
    """CIFAR-10 from the training batches that are present (at least one of five) and the test batch.

    "dataset" is mean 0.5 and std 0.5 in each channel. The summary says how many batches were found.
    """
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    paths = find_together([_candidates10(name) for name in names], data_dir, at_least=2)
    if paths is None:
        raise not_found(
            _candidates10("data_batch_1") + _candidates10("test_batch"),
            data_dir,
            what="cifar10: a training batch and test_batch.bin in the same place",
            how_to_get="Put the binary version of CIFAR-10 (data_batch_1.bin to data_batch_5.bin and "
            "test_batch.bin, or the same with .xz) in cifar-10-batches-bin/ in one of these folders.",
        )
    found = {name: path for name, path in zip(names, paths, strict=True) if path is not None}

    def read(name: str, path: Path) -> tuple[np.ndarray, np.ndarray]:
        if _is_binary(path):
            return read_cifar_binary(path, label_bytes=1, num_classes=10, sha256=KNOWN_SHA256.get(name))
        return read_cifar_pickle(path, b"labels", num_classes=10)

    with ThreadPoolExecutor(len(found)) as pool:  # decompression releases the interpreter lock
        *batches, test = pool.map(read, found.keys(), found.values())
    train = (np.concatenate([pixels for pixels, _ in batches]), np.concatenate([y for _, y in batches]))
    summary = f"CIFAR-10, {len(train[1])} training examples from {len(batches)} of 5 batches"
    return _dataset("cifar10", train, test, CIFAR10_CLASSES, summary, normalise, pad_to)


def load_cifar100(
    *,
    data_dir: Path | None = None,
    normalise: Normalise = "dataset",
    pad_to: int | None = None,
    labels: Literal["fine", "coarse"] = "fine",
) -> Dataset:
    """CIFAR-100 with its 100 fine or 20 coarse labels; normalised as CIFAR-10 is."""
    if labels not in ("fine", "coarse"):
        raise InputError("labels", labels, "is not a kind of CIFAR-100 labels", 'Use "fine" or "coarse".')
    classes = CIFAR100_FINE if labels == "fine" else CIFAR100_COARSE

    def read(name: str) -> tuple[np.ndarray, np.ndarray]:
        path = locate(
            [
                f"{folder}{name}{ending}"
                for folder in ("cifar-100-binary/", "")
                for ending in (".bin", ".bin.xz", ".bin.gz")
            ]
            + [f"cifar-100-python/{name}"],
            data_dir,
            what=f"cifar100: {name}.bin",
            how_to_get="Put the binary version of CIFAR-100 (train.bin, test.bin) in cifar-100-binary/.",
        )
        if _is_binary(path):
            which = 1 if labels == "fine" else 0
            return read_cifar_binary(path, label_bytes=2, which_label=which, num_classes=len(classes))
        return read_cifar_pickle(path, f"{labels}_labels".encode(), num_classes=len(classes))

    summary = f"CIFAR-100, {labels} labels"
    return _dataset("cifar100", read("train"), read("test"), classes, summary, normalise, pad_to)


def read_cifar_binary(
    path: Path, *, label_bytes: int, num_classes: int, which_label: int = 0, sha256: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Images `[n, 3, 32, 32]` and labels `[n]` from records of `label_bytes` labels and 3072 pixels."""
    record = label_bytes + _PIXELS
    content = read_bytes(path, most=record * _MOST_RECORDS, sha256=sha256)
    if len(content) % record:
        raise DataError(
            f"{path}: {len(content)} bytes are not complete records of {record}; truncated or another format. "
            "Get it again.",
            field="size",
            value=len(content),
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    y = records[:, which_label]
    _require_labels(path, y, num_classes)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), y


def read_cifar_pickle(path: Path, labels: bytes, *, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """The same from a batch of the Python version. Only dictionaries, lists, numbers, bytes and byte arrays are
    unpickled: no class or function named in the file is imported.
    """
    content = read_bytes(path, most=(_PIXELS + 200) * _MOST_RECORDS)
    try:
        batch = _SafeUnpickler(BytesIO(bytes(content)), encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{path}: {error}", field=error.field, value=error.value) from error
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(
            f"{path}: not a batch of CIFAR's Python version ({type(error).__name__}).",
            field="batch",
            value=str(path),
        ) from error
    if not isinstance(batch, dict):
        raise DataError(
            f"{path}: not a batch of CIFAR's Python version, there is no dictionary in it.",
            field="batch",
            value=str(path),
        )
    data, y = _entry(batch, b"data"), _entry(batch, labels)
    if not isinstance(data, _PickledArray) or not isinstance(y, list):
        raise DataError(
            f"{path}: the entries data and {labels.decode()} are missing or of another kind.",
            field="batch",
            value=str(path),
        )
    try:
        pixels = data.as_bytes_array()
        y_array = np.array(y, dtype=np.int64)
    except (DataError, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{path}: {error}", field="batch", value=str(path)) from error
    if pixels.ndim != 2 or pixels.shape[1] != _PIXELS or y_array.shape != (len(pixels),) or not len(y_array):
        raise DataError(
            f"{path}: {list(pixels.shape)} pixels and {list(y_array.shape)} labels do not match.",
            field="labels",
            value=str(path),
        )
    _require_labels(path, y_array, num_classes)
    return pixels.reshape(-1, 3, 32, 32), y_array


@dataclass
class _PickledArray:
    """Replaces a NumPy array while unpickling, so that no NumPy code runs on unchecked input."""

    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def as_bytes_array(self) -> np.ndarray:
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            raise DataError("holds an array in an unknown form.", field="batch")
        _, shape, kind, by_column, raw = self.state
        if not isinstance(kind, _PickledType) or kind.code not in ("u1", b"u1") or by_column:
            raise DataError("holds an array of something other than bytes.", field="batch")
        if (
            not isinstance(raw, bytes)
            or not isinstance(shape, tuple)
            or not all(type(size) is int and size >= 0 for size in shape)
            or math.prod(shape) != len(raw)
        ):
            raise DataError("holds an array whose shape and content do not match.", field="batch")
        return np.frombuffer(raw, np.uint8).reshape(shape)


@dataclass
class _PickledType:
    """Replaces a NumPy type while unpickling."""

    code: object = None

    def __setstate__(self, state: object) -> None:
        """Ignore the state: byte order and padding do not apply to bytes."""


def _latin1(text: object, encoding: object) -> bytes:
    """Decode bytes as Python 3 writes them into old pickles."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise DataError("holds text in an unknown encoding.", field="batch")
    return text.encode("latin1")


class _SafeUnpickler(pickle.Unpickler):
    """Resolves the few names that a pickled byte array needs to replacements; refuses every other name."""

    _stand_ins: dict[tuple[str, str], Callable[..., object]] = {  # noqa: RUF012 - never changed
        ("numpy.core.multiarray", "_reconstruct"): lambda *_: _PickledArray(),
        ("numpy._core.multiarray", "_reconstruct"): lambda *_: _PickledArray(),
        ("numpy", "ndarray"): _PickledArray,
        ("numpy", "dtype"): lambda code=None, *_: _PickledType(code),
        ("_codecs", "encode"): _latin1,
    }

    def find_class(self, module_name: str, global_name: str) -> Callable[..., object]:
        stand_in = self._stand_ins.get((module_name, global_name))
        if stand_in is None:
            raise DataError(
                f"refers to {module_name}.{global_name}, which data does not need; not loaded.",
                field="pickle",
                value=f"{module_name}.{global_name}",
            )
        return stand_in


def _entry(batch: dict[object, object], key: bytes) -> object:
    return batch.get(key, batch.get(key.decode()))


def _is_binary(path: Path) -> bool:
    return ".bin" in path.suffixes


def _candidates10(name: str) -> list[str]:
    binary = [
        f"{folder}{name}{ending}"
        for folder in ("cifar-10-batches-bin/", "")
        for ending in (".bin", ".bin.xz", ".bin.gz")
    ]
    return [*binary, f"cifar-10-batches-py/{name}"]


def _require_labels(path: Path, y: np.ndarray, num_classes: int) -> None:
    if y.min() < 0 or y.max() >= num_classes:
        raise DataError(
            f"{path}: contains a label outside 0..{num_classes - 1}; damaged or another format. Get it again.",
            field="labels",
            value=str(path),
        )


def _dataset(
    name: str,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    classes: tuple[str, ...],
    summary: str,
    normalise: Normalise,
    pad_to: int | None,
) -> Dataset:
    x, mean, std = images_from_bytes(train[0], _HALF, _HALF, normalise=normalise, pad_to=pad_to)
    x_test, _, _ = images_from_bytes(test[0], _HALF, _HALF, normalise=normalise, pad_to=pad_to)
    return Dataset(
        name,
        Examples(x, labels_from(train[1])),
        Examples(x_test, labels_from(test[1])),
        classes,
        mean,
        std,
        summary,
    )
