"""Picture files, and folders of them: Tiny-ImageNet's layout or one folder per class."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from fedveil.data.dataset import (
    Dataset,
    Examples,
    Normalise,
    check_count,
    images_from_bytes,
    labels_from,
    refuse_split,
    stratified_split,
)
from fedveil.data.files import places, text_lines
from fedveil.errors import DataError, InputError

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_MOST_BYTES = 1 << 28


@contextmanager
def open_picture(path: Path, *, sha256: str | None = None) -> Iterator[Image.Image]:
    """A decoded picture. A missing, damaged or enormous file, or one that is not a picture, is a DataError."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(
                f"{path}: is too large for a picture. Use a smaller one.", field="size", value=str(path)
            )
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}). Make it readable.", field="file", value=str(path)
        ) from error
    actual = hashlib.sha256(content).hexdigest() if sha256 else None
    if actual != sha256:
        raise DataError(
            f"{path}: the content is not the expected one: sha256 expected {sha256}, actual {actual}. "
            "Get the file again.",
            field="sha256",
            value=actual,
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Pillow only warns about pictures that are too large
            picture = Image.open(BytesIO(content), formats=_FORMATS)
            picture.load()
    except Exception as error:  # a damaged picture may raise anything
        raise DataError(
            f"{path}: is not a readable picture ({type(error).__name__}). Remove or replace it.",
            field="picture",
            value=str(path),
        ) from error
    with picture:
        yield picture


def read_pictures(paths: Sequence[Path], channels: int = 3) -> np.ndarray:
    """Pictures of one size as bytes `[n, channels, H, W]`; one of another size is a DataError."""
    pixels: np.ndarray | None = None
    for position, path in enumerate(paths):
        with open_picture(path) as picture:
            one = np.asarray(picture.convert("RGB" if channels == 3 else "L"))
        one = one.transpose(2, 0, 1) if channels == 3 else one[None]
        if pixels is None:
            pixels = np.empty((len(paths), *one.shape), np.uint8)
        if one.shape != pixels.shape[1:]:
            raise DataError(
                f"{path}: has shape {one.shape} where {paths[0]} has {pixels.shape[1:]}; "
                "pictures must have the same size.",
                field="size",
                value=str(path),
            )
        pixels[position] = one
    if pixels is None:
        raise DataError("there are no pictures to read. Give at least one.", field="pictures")
    return pixels


def load_image_folder(
    *,
    path: str | Path,
    data_dir: Path | None = None,
    normalise: Normalise = "dataset",
    pad_to: int | None = None,
    channels: int = 3,
    max_per_class: int | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """A folder of pictures with one folder per class, in rising order of their names.

    Understood are `train/<class>/images/*` with `val/images/*` and `val/val_annotations.txt` (Tiny-ImageNet),
    `train/<class>/*` with `test/<class>/*` or `val/<class>/*`, and `<class>/*` alone, which is split here,
    stratified and fixed by the seed. "dataset" is mean 0.5 and std 0.5 in each channel.
    """
    root = given_folder(path, data_dir)
    if channels not in (1, 3) or isinstance(channels, bool):
        raise InputError("channels", channels, "is not a number of channels", "Use 1 (grey) or 3 (colour).")
    if max_per_class is not None:
        check_count("max_per_class", max_per_class)
    half = (0.5,) * channels

    def examples(listed: list[tuple[Path, int]]) -> tuple[Examples, tuple[float, ...], tuple[float, ...]]:
        pixels = read_pictures([picture for picture, _ in listed], channels)
        x, mean, std = images_from_bytes(pixels, half, half, normalise=normalise, pad_to=pad_to)
        return Examples(x, labels_from(np.array([label for _, label in listed]))), mean, std

    separate = (root / "train").is_dir()
    classes = class_folders(root / "train" if separate else root)
    listed = list_pictures(root / "train" if separate else root, classes, max_per_class)
    if separate:
        refuse_split(test_fraction, seed, "the test pictures have a folder of their own")
        train, mean, std = examples(listed)
        test, _, _ = examples(_list_test(root, classes, max_per_class))
    else:
        y = np.array([label for _, label in listed])
        train_index, test_index = stratified_split(y, test_fraction, seed, "image-folder")
        everything, mean, std = examples(listed)
        train, test = everything.take(train_index), everything.take(test_index)
    summary = f"{len(train)} + {len(test)} pictures of {len(classes)} classes"
    return Dataset(f"image-folder:{root.name}", train, test, classes, mean, std, summary)


def class_folders(folder: Path) -> tuple[str, ...]:
    """The names of the class folders in it."""
    try:
        classes = tuple(
            sorted(inner.name for inner in folder.iterdir() if inner.is_dir() and inner.name[0] != ".")
        )
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be read ({error.strerror}). Make it readable.", field="file", value=str(folder)
        ) from error
    if not classes:
        raise DataError(
            f"{folder}: contains no class folder. Use one folder per class.",
            field="classes",
            value=str(folder),
        )
    return classes


def list_pictures(
    folder: Path, classes: Sequence[str], max_per_class: int | None = None
) -> list[tuple[Path, int]]:
    """Pictures and labels below the class folders; an absent class is skipped, an empty one refused."""
    listed: list[tuple[Path, int]] = []
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            continue
        inner = folder / name / "images"
        pictures = pictures_in(inner if inner.is_dir() else folder / name)
        if not pictures:
            raise DataError(
                f"{folder / name}: contains no picture ({', '.join(_ENDINGS)}). Add some or remove the folder.",
                field="pictures",
                value=str(folder / name),
            )
        listed.extend((picture, label) for picture in pictures[:max_per_class])
    return listed


def pictures_in(folder: Path) -> list[Path]:
    """The pictures in this folder, in rising order of their names; a file is the one picture."""
    if folder.is_file():
        return [folder]
    return sorted(
        inner
        for inner in folder.iterdir()
        if inner.is_file() and inner.suffix.lower() in _ENDINGS and inner.name[0] != "."
    )


def _list_test(root: Path, classes: tuple[str, ...], max_per_class: int | None) -> list[tuple[Path, int]]:
    notes = root / "val" / "val_annotations.txt"
    if notes.is_file():
        return _list_annotated(notes, classes, max_per_class)
    for name in ("test", "val"):
        if (root / name).is_dir():
            if unknown := sorted(set(class_folders(root / name)) - set(classes)):
                raise DataError(
                    f"{root / name}: class {unknown[0]} is not among the training classes. Remove it.",
                    field="classes",
                    value=unknown[0],
                )
            return list_pictures(root / name, classes, max_per_class)
    raise DataError(
        f"{root}: contains neither test/ nor val/ beside train/. Add one.", field="test", value=str(root)
    )


def _list_annotated(
    notes: Path, classes: tuple[str, ...], max_per_class: int | None
) -> list[tuple[Path, int]]:
    """Tiny-ImageNet's validation split: file name, class and a box on each line."""
    labels = {name: label for label, name in enumerate(classes)}
    taken = [0] * len(classes)
    listed: list[tuple[Path, int]] = []
    for number, line in enumerate(text_lines(notes), 1):
        cells = line.split("\t")
        if len(cells) < 2 or cells[1] not in labels or Path(cells[0]).name != cells[0]:
            raise DataError(
                f"{notes}: line {number} does not name a picture and one of the classes. Fix the line.",
                field="line",
                value=number,
            )
        label = labels[cells[1]]
        taken[label] += 1
        if max_per_class is None or taken[label] <= max_per_class:
            listed.append((notes.parent / "images" / cells[0], label))
    return listed


def given_folder(path: object, data_dir: Path | None) -> Path:
    if not isinstance(path, (str, Path)):
        raise InputError("path", path, "is not a path", "Give the path of a folder.")
    asked = Path(path).expanduser()
    tried = [asked] if asked.is_absolute() else [asked, *(place / asked for place in places(data_dir))]
    for folder in tried:
        if folder.is_dir():
            return folder
    looked = "\n".join(f"  {folder}" for folder in tried)
    raise DataError(
        f"{asked} was not found as a folder. Looked for:\n{looked}", field="path", value=str(asked)
    )
