"""EMNIST (Cohen et al., 2017): the official IDX files, or the ByClass test split packed as WebP sheets.

The IDX files contain characters transposed; here they are upright. The sheets contain 116323 characters without a
training split, so six sevenths of every class, chosen by a seed, become it. If both exist the IDX files are used,
and the summary names the source.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Literal

import numpy as np

from fedveil.data.dataset import (
    Dataset,
    Examples,
    Normalise,
    check_seed,
    images_from_bytes,
    labels_from,
    stratified_split,
)
from fedveil.data.digits import DIGITS, MNIST_MEAN, MNIST_STD
from fedveil.data.files import find, find_together, not_found, read_bytes
from fedveil.data.idx import read_idx_pair
from fedveil.data.pictures import open_picture
from fedveil.errors import DataError
from fedveil.streams import named_stream

Variant = Literal["byclass", "balanced", "letters", "digits"]

BYCLASS = DIGITS + tuple(string.ascii_uppercase) + tuple(string.ascii_lowercase)
# Lower-case letters that look like their capitals are merged with them; these eleven are not.
BALANCED = DIGITS + tuple(string.ascii_uppercase) + tuple("abdefghnqrt")
LETTERS = tuple(string.ascii_lowercase)
_CLASSES: dict[Variant, tuple[str, ...]] = {
    "byclass": BYCLASS,
    "balanced": BALANCED,
    "letters": LETTERS,
    "digits": DIGITS,
}
_IDX_FOLDERS = ("emnist", "emnist/gzip", "EMNIST/raw", "gzip", ".")
_SHEET_FOLDERS = ("emnist-byclass-test", ".")

SHEETS_SHA256 = {
    "test.json": "b2d4f5349865e3e808b93c432df28358dea9a46b63e8da1bc9916726d89a56da",
    "X_test_0_to_16128.webp": "0e413f4196363ee451fa9589e64adc0c29edb3e3ec0ac8743e715ac0bfe00787",
    "X_test_16129_to_32257.webp": "99dec7b5cb928e057dfe3209687e69bac68a317b2f57390ac32cbcf845c65459",
    "X_test_32258_to_48386.webp": "c52a7f82ba45d288e1ac25b8bab69934691a38499cd8a932c44ca28f005bc246",
    "X_test_48387_to_64515.webp": "4887b7ea0c3af1c35b7882a571d9b6a18a78a4a14b4cafae57acb0befd81af01",
    "X_test_64516_to_80644.webp": "f1751a8de8c810eec3d063bd0bf783b2a527146caad14bac7dff334e1ec5461b",
    "X_test_80645_to_96773.webp": "77c13c0725cf7fd32d696f264e38c7e3ac43bc401bb884df6018e02112d5a072",
    "X_test_96774_to_112902.webp": "42c84e24fbe955643e1eb335a959060c78cca926c2b28e9ceff424ad81c93a95",
    "X_test_112903_to_116322.webp": "f653a84706346a63615839e32bfdc9d11d4855b5a5f864c5472722fc96b0e5e6",
}


def load_emnist(
    *,
    variant: Variant,
    data_dir: Path | None = None,
    normalise: Normalise = "dataset",
    pad_to: int | None = None,
    seed: int = 0,
) -> Dataset:
    """One variant of EMNIST, 1x28x28, normalised as MNIST is.

    byclass has 62 classes, balanced 47 (as many examples of each), letters 26 (capitals and small letters
    together), digits 10. The seed only affects the split of the sheets.
    """
    check_seed(seed)
    name = f"emnist-{variant}"
    stems = [
        f"{name}-{split}-{kind}-ubyte"
        for split in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    ]
    idx = find_together([_idx_candidates(stem) for stem in stems], data_dir)
    if idx is not None:
        paths = [path for path in idx if path is not None]
        pairs = (_read_idx(variant, *paths[:2]), _read_idx(variant, *paths[2:]))
        examples, mean, std = _examples(pairs, normalise, pad_to)
        summary = f"EMNIST {variant}, official IDX files"
        return Dataset(name, examples[0], examples[1], _CLASSES[variant], mean, std, summary)
    index = find([f"{folder}/test.json" for folder in _SHEET_FOLDERS], data_dir)
    if index is None:
        missing = next((stem for stem in stems if find(_idx_candidates(stem), data_dir) is None), stems[0])
        raise not_found(
            [*_idx_candidates(missing), "emnist-byclass-test/test.json"],
            data_dir,
            what=f"{name}: {missing}.gz",
            how_to_get=f"Put the official {name}-*.gz files in emnist/ in one of these folders, or the "
            "ByClass test split as WebP sheets in emnist-byclass-test/.",
        )
    pixels, y = _of_variant(*read_sheets(index, SHEETS_SHA256), variant, seed)
    train, test = stratified_split(y, 1 / 7, seed, name)
    (everything,), mean, std = _examples(((pixels, y),), normalise, pad_to)
    summary = f"EMNIST {variant}, from the WebP sheets of the ByClass test split, split 6:1 here"
    return Dataset(name, everything.take(train), everything.take(test), _CLASSES[variant], mean, std, summary)


def read_sheets(index: Path, sha256: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Characters `[n, 28, 28]` and ByClass labels from `test.json` and the sheets that it names."""
    content = bytes(read_bytes(index, most=1 << 26, sha256=sha256.get(index.name)))
    try:
        described = json.loads(content)
        files, labels = list(described["files"]), np.array(described["id"])
        shape, mapping = (described["height"], described["width"]), described["mapping"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{index}: not the index of EMNIST's sheets ({type(error).__name__}).",
            field="index",
            value=str(index),
        ) from error
    if shape != (28, 28) or mapping != [ord(name) for name in BYCLASS]:
        raise DataError(
            f"{index}: describes other images or classes than EMNIST ByClass.",
            field="index",
            value=str(index),
        )
    if labels.ndim != 1 or labels.dtype.kind != "i" or not len(labels):
        raise DataError(
            f"{index}: its labels are not a list of whole numbers.", field="labels", value=str(index)
        )
    if labels.min() < 0 or labels.max() >= len(BYCLASS):
        raise DataError(
            f"{index}: holds a label outside 0..{len(BYCLASS) - 1}.", field="labels", value=str(index)
        )
    if not all(isinstance(name, str) and Path(name).name == name for name in files):
        raise DataError(f"{index}: names a sheet outside its own folder.", field="sheets", value=str(index))
    pixels = np.empty((len(labels), 28, 28), np.uint8)
    done = 0
    for name in files:
        with open_picture(index.parent / name, sha256=sha256.get(name)) as picture:
            columns, rows = picture.width // 28, picture.height // 28
            count = min(columns * rows, len(labels) - done)
            if picture.width % 28 or picture.height % 28 or count < 1:
                raise DataError(
                    f"{index.parent / name}: not a sheet of 28x28 tiles that the index has room for.",
                    field="sheets",
                    value=name,
                )
            sheet = np.asarray(picture.convert("RGB"))[:, :, 0]  # the three channels are equal
        tiles = sheet.reshape(rows, 28, columns, 28).swapaxes(1, 2).reshape(-1, 28, 28)
        pixels[done : done + count] = tiles[:count]
        done += count
    if done != len(labels):
        raise DataError(
            f"{index}: lists {len(labels)} labels but the sheets hold {done} characters.",
            field="labels",
            value=len(labels),
        )
    return pixels, labels


def _of_variant(
    pixels: np.ndarray, y: np.ndarray, variant: Variant, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The ByClass characters that a variant holds, with its labels."""
    if variant == "byclass":
        return pixels, y
    wanted = _CLASSES[variant]
    table = np.full(len(BYCLASS), -1)
    for label, character in enumerate(BYCLASS):
        if variant == "letters":
            character = character.lower()
        elif variant == "balanced" and character not in wanted:
            character = character.upper()
        if character in wanted:
            table[label] = wanted.index(character)
    labels = table[y]
    keep = np.flatnonzero(labels >= 0)
    if variant == "balanced":
        rng = named_stream(seed, "balance", "emnist-balanced")
        counts = np.bincount(labels[keep], minlength=len(wanted))
        each = int(counts[counts > 0].min()) if len(keep) else 0
        chosen = [rng.permutation(np.flatnonzero(labels == label))[:each] for label in range(len(wanted))]
        keep = np.sort(np.concatenate(chosen))
    if not len(keep):
        raise DataError(
            f"emnist-{variant}: the sheets hold none of its characters.", field="variant", value=variant
        )
    return pixels[keep], labels[keep]


def _read_idx(variant: Variant, images: Path, labels: Path) -> tuple[np.ndarray, np.ndarray]:
    pixels, y = read_idx_pair(images, labels)
    y = y.astype(np.int64) - (1 if variant == "letters" else 0)  # the files count letters from 1
    if y.min() < 0 or y.max() >= len(_CLASSES[variant]):
        raise DataError(
            f"{labels}: holds labels that EMNIST {variant} does not have.", field="labels", value=str(labels)
        )
    return pixels.swapaxes(1, 2), y


def _examples(
    pairs: tuple[tuple[np.ndarray, np.ndarray], ...], normalise: Normalise, pad_to: int | None
) -> tuple[list[Examples], tuple[float, ...], tuple[float, ...]]:
    made: list[Examples] = []
    mean: tuple[float, ...] = MNIST_MEAN
    std: tuple[float, ...] = MNIST_STD
    for pixels, y in pairs:
        x, mean, std = images_from_bytes(
            pixels[:, None], MNIST_MEAN, MNIST_STD, normalise=normalise, pad_to=pad_to
        )
        made.append(Examples(x, labels_from(y)))
    return made, mean, std


def _idx_candidates(stem: str) -> list[str]:
    return [f"{folder}/{stem}{ending}" for folder in _IDX_FOLDERS for ending in (".gz", "")]
