"""Datasets by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from fedveil.data.dataset import Dataset, TextDataset, check_count
from fedveil.errors import InputError, install, known_name

Kind = Literal["image", "table", "text"]


@dataclass(frozen=True)
class DatasetInfo:
    """The description and source of a named dataset."""

    name: str
    summary: str
    kind: Kind
    how_to_get: str

    @property
    def options(self) -> tuple[str, ...]:
        """What `load_dataset` takes for it."""
        return _ENTRIES[self.name].options()


_NO_OPTIONS = ("data_dir", "variant")
_EMNIST_FILES = "The official IDX files in emnist/, or WebP sheets of the test split in emnist-byclass-test/."


@dataclass(frozen=True)
class _Entry:
    summary: str
    kind: Kind
    how_to_get: str
    place: str
    """Where its loader is below `fedveil.data`: loaded when the data set is asked for."""
    own: bool = False
    """Whether these are files of the user's own, not a public benchmark."""
    variant: str | None = None

    @property
    def load(self) -> Callable[..., Dataset | TextDataset]:
        module, _, name = self.place.partition(":")
        load: Callable[..., Dataset | TextDataset] = getattr(import_module(f"fedveil.data.{module}"), name)
        return load if self.variant is None else functools.partial(load, variant=self.variant)

    def options(self) -> tuple[str, ...]:
        named = tuple(name for name in inspect.signature(self.load).parameters if name not in _NO_OPTIONS)
        return (*named, "max_train", "max_test")

    def needed(self) -> list[str]:
        parameters = inspect.signature(self.load).parameters.values()
        return [p.name for p in parameters if p.default is inspect.Parameter.empty]


_ENTRIES: dict[str, _Entry] = {
    "digits": _Entry("1797 digits, 1x8x8, 10 classes", "image", "Comes with fedveil.", "digits:load_digits"),
    "mnist5k": _Entry(
        "5000 MNIST digits, 1x28x28, 10 classes", "image", install("mnist"), "digits:load_mnist5k"
    ),
    "mnist": _Entry(
        "70000 digits, 1x28x28, 10 classes", "image", "Four IDX files in mnist/.", "digits:load_mnist"
    ),
    "fashion-mnist": _Entry(
        "70000 pieces of clothing, 1x28x28, 10 classes",
        "image",
        "Four IDX files in fashion-mnist/.",
        "digits:load_fashion_mnist",
    ),
    "emnist-byclass": _Entry(
        "digits, capitals and small letters, 1x28x28, 62 classes",
        "image",
        _EMNIST_FILES,
        "emnist:load_emnist",
        variant="byclass",
    ),
    "emnist-balanced": _Entry(
        "the same with 15 look-alikes merged and classes of one size, 1x28x28, 47 classes",
        "image",
        _EMNIST_FILES,
        "emnist:load_emnist",
        variant="balanced",
    ),
    "emnist-letters": _Entry(
        "letters, capital and small together, 1x28x28, 26 classes",
        "image",
        _EMNIST_FILES,
        "emnist:load_emnist",
        variant="letters",
    ),
    "emnist-digits": _Entry(
        "digits, 1x28x28, 10 classes",
        "image",
        _EMNIST_FILES,
        "emnist:load_emnist",
        variant="digits",
    ),
    "cifar10": _Entry(
        "up to 60000 photographs, 3x32x32, 10 classes",
        "image",
        "The binary version in cifar-10-batches-bin/ (.bin or .bin.xz).",
        "cifar:load_cifar10",
    ),
    "cifar100": _Entry(
        "60000 photographs, 3x32x32, 100 classes",
        "image",
        "The binary version in cifar-100-binary/.",
        "cifar:load_cifar100",
    ),
    "image-folder": _Entry(
        "your pictures, one folder per class (Tiny-ImageNet's layout too)",
        "image",
        "Give path.",
        "pictures:load_image_folder",
        own=True,
    ),
    "client-folder": _Entry(
        "your clients, one folder of pictures or one file (.csv, .parquet, .npz) each",
        "table",
        'Give path, and label for tables; keep clients apart with partition.kind = "user".',
        "own:load_client_folder",
        own=True,
    ),
    "table": _Entry(
        "your CSV or Parquet table",
        "table",
        "Give path and label.",
        "table:load_table",
        own=True,
    ),
    "heart-disease": _Entry(
        "740 patients of four hospitals, 13 features, 2 classes (FLamby's Fed-Heart-Disease)",
        "table",
        'The four processed UCI files in heart-disease/; partition.kind = "user" keeps hospitals apart.',
        "heart:load_heart_disease",
    ),
    "cola": _Entry(
        "9594 sentences, acceptable or not", "text", "CoLA 1.0's raw files in cola/.", "text:load_cola"
    ),
    "sst2": _Entry(
        "9613 sentences about films, 2 classes", "text", "Three TSV files in sst2/.", "text:load_sst2"
    ),
    "sentiment140": _Entry(
        "100000 tweets, 2 classes",
        "text",
        "positive.txt and negative.txt in sentiment140/.",
        "text:load_sentiment140",
    ),
    "wikitext-2": _Entry(
        "articles of Wikipedia, no labels",
        "text",
        "valid.txt and test.txt in wikitext-2/.",
        "text:load_wikitext2",
    ),
    "tiny-shakespeare": _Entry(
        "plays of Shakespeare, no labels",
        "text",
        "input.txt in tiny-shakespeare/.",
        "text:load_tiny_shakespeare",
    ),
    "labelled-text": _Entry(
        "your texts with labels",
        "text",
        "Give path: lines of text, tab, label.",
        "text:load_labelled_text",
        own=True,
    ),
    "text": _Entry("your text file, no labels", "text", "Give path.", "text:load_text", own=True),
}


def list_datasets() -> list[DatasetInfo]:
    """Every dataset that has a name."""
    return [
        DatasetInfo(name, entry.summary, entry.kind, entry.how_to_get) for name, entry in _ENTRIES.items()
    ]


def is_own_data(name: str) -> bool:
    """Whether this name is for the user's own files, not for a public benchmark."""
    return name in _ENTRIES and _ENTRIES[name].own


def dataset_loader(name: str) -> Callable[..., Dataset | TextDataset]:
    """The function that loads this dataset."""
    load = _ENTRIES[known_name("name", "dataset", name, _ENTRIES)].load
    return load.func if isinstance(load, functools.partial) else load


def dataset_options(name: str) -> dict[str, object]:
    """The options of this dataset with what they are if not given; "needed" is none that may be left out."""
    entry = _ENTRIES[known_name("name", "dataset", name, _ENTRIES)]
    given = inspect.signature(entry.load).parameters
    defaults = {key: given[key].default if key in given else None for key in entry.options()}
    return defaults | dict.fromkeys(entry.needed(), "needed")


def load_dataset(
    name: str,
    *,
    data_dir: Path | str | None = None,
    max_train: int | None = None,
    max_test: int | None = None,
    **options: object,
) -> Dataset | TextDataset:
    """Load the dataset of this name.

    Args:
        name: One of `list_datasets()`.
        data_dir: The folder that is searched first; then `$FEDVEIL_DATA`, then the user's cache.
        max_train: Keep the first so many training examples.
        max_test: Keep the first so many test examples.
        options: Options of the dataset.

    Returns:
        The training and test examples, with their metadata.

    Raises:
        InputError: There is no such name or option; nothing has been read.
    """
    entry = _ENTRIES[known_name("dataset", "dataset", name, _ENTRIES)]
    for field, limit in (("max_train", max_train), ("max_test", max_test)):
        if limit is not None:
            check_count(field, limit)
    for option, value in options.items():
        if option not in entry.options():
            raise InputError(
                option, value, f"{name} has no such option", f"It takes: {', '.join(entry.options())}."
            )
    for option in entry.needed():
        if option not in options:
            raise InputError(option, None, f"is required by {name}", f"Give {option}.")
    if "data_dir" in inspect.signature(entry.load).parameters:
        options["data_dir"] = data_dir
    return entry.load(**options).limited(max_train, max_test)
