"""Datasets by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedveil.data.dataset import Dataset, TextDataset, check_count
from fedveil.data.digits import load_digits, load_fashion_mnist, load_mnist, load_mnist5k
from fedveil.errors import InputError

Kind = Literal["image", "table", "text"]


@dataclass(frozen=True)
class DatasetInfo:
    """What a named dataset is and where it comes from. `options` are what `load_dataset` takes for it."""

    name: str
    summary: str
    kind: Kind
    how_to_get: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class _Entry:
    summary: str
    kind: Kind
    how_to_get: str
    load: Callable[..., Dataset | TextDataset]

    def options(self) -> tuple[str, ...]:
        named = tuple(name for name in inspect.signature(self.load).parameters if name != "data_dir")
        return (*named, "max_train", "max_test")


_ENTRIES: dict[str, _Entry] = {
    "digits": _Entry("1797 digits, 1x8x8, 10 classes", "image", "Comes with fedveil.", load_digits),
    "mnist5k": _Entry(
        "5000 MNIST digits, 1x28x28, 10 classes", "image", 'pip install "fedveil[mnist]"', load_mnist5k
    ),
    "mnist": _Entry("70000 digits, 1x28x28, 10 classes", "image", "Four IDX files in mnist/.", load_mnist),
    "fashion-mnist": _Entry(
        "70000 pieces of clothing, 1x28x28, 10 classes",
        "image",
        "Four IDX files in fashion-mnist/.",
        load_fashion_mnist,
    ),
}


def list_datasets() -> list[DatasetInfo]:
    """Every dataset that has a name."""
    return [
        DatasetInfo(name, entry.summary, entry.kind, entry.how_to_get, entry.options())
        for name, entry in _ENTRIES.items()
    ]


def load_dataset(
    name: str,
    *,
    data_dir: Path | str | None = None,
    max_train: int | None = None,
    max_test: int | None = None,
    **options: object,
) -> Dataset | TextDataset:
    """Load the dataset of this name; `list_datasets` tells the names and the options of each.

    Files are looked for in `data_dir`, then `$FEDVEIL_DATA`, then the user's cache. `max_train` and
    `max_test` keep the first so many examples. An unknown name or option is refused before anything is read.
    """
    entry = _ENTRIES.get(name) if isinstance(name, str) else None
    if entry is None:
        raise InputError("dataset", name, "no such dataset", f"Use one of: {', '.join(_ENTRIES)}.")
    for field, limit in (("max_train", max_train), ("max_test", max_test)):
        if limit is not None:
            check_count(field, limit)
    for option, value in options.items():
        if option not in entry.options():
            raise InputError(
                option, value, f"{name} has no such option", f"It takes: {', '.join(entry.options())}."
            )
    if "data_dir" in inspect.signature(entry.load).parameters:
        options["data_dir"] = data_dir
    return entry.load(**options).limited(max_train, max_test)
