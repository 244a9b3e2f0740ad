"""Loaded datasets: tensors with labels, token ids, or texts with labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedveil.data.schema import TableSchema
from fedveil.data.vocabulary import Vocabulary
from fedveil.errors import DataError, InputError
from fedveil.lazy_torch import torch
from fedveil.losses import Target
from fedveil.streams import named_stream
from fedveil.token_losses import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

Normalise = Literal["dataset", "unit", "none"]


@dataclass(frozen=True)
class Examples:
    """Examples with labels: `x` is `[n, ...]` float32, `y` is `[n]` int64, `users` an id per example or None.

    Texts are token ids, `x` `[n, L]` int64; for a language model `y` is `[n, L]`, the next token of each or `IGNORED`.
    For regression `y` is `[n]` float32. Numbers must be finite and labels must not be negative; anything else is a
    DataError.
    """

    x: Tensor
    y: Tensor
    users: Tensor | None = None

    def __post_init__(self) -> None:
        if self.x.dtype != torch.float32 and (self.x.dtype != torch.int64 or self.x.dim() != 2):
            raise DataError(
                f"x must be float32, or int64 token ids [n, L], not {self.x.dtype}.",
                field="x",
                value=self.x.dtype,
            )
        targets = self.x.dtype == torch.int64 and self.y.shape == self.x.shape
        number = self.y.dtype == torch.float32 and self.y.dim() == 1
        if not number and (self.y.dtype != torch.int64 or (self.y.dim() != 1 and not targets)):
            raise DataError(
                f"y must be int64 labels [n], not {self.y.dtype} {list(self.y.shape)}.",
                field="y",
                value=self.y.dtype,
            )
        if self.x.dim() < 1 or self.x.shape[0] != self.y.shape[0]:
            raise DataError(
                f"x has shape {list(self.x.shape)} but y has {self.y.shape[0]} labels. Give one label per example.",
                field="y",
                value=self.y.shape[0],
            )
        if self.users is not None and (
            self.users.dtype != torch.int64 or self.users.shape != self.y.shape[:1]
        ):
            raise DataError("users must have one int64 id for each example.", field="users")
        require_finite(self.x, "x")
        if number:
            require_finite(self.y, "y")
            return
        counted = self.y[self.y != IGNORED] if targets else self.y
        if counted.numel() and int(counted.min()) < 0:
            raise DataError(
                f"label {int(counted.min())} is negative; labels count from 0.",
                field="y",
                value=int(counted.min()),
            )

    def __len__(self) -> int:
        return int(self.y.shape[0])

    def take(self, index: Tensor) -> Examples:
        """The examples at these positions, in this order."""
        users = None if self.users is None else self.users[index]
        return Examples(self.x.index_select(0, index), self.y[index], users)

    def first(self, count: int | None) -> Examples:
        """The first `count` examples, copied so that the rest can be freed; all of them for None."""
        if count is None or count >= len(self):
            return self
        users = None if self.users is None else self.users[:count].clone()
        return Examples(self.x[:count].clone(), self.y[:count].clone(), users)


@dataclass(frozen=True)
class TokenFacts:
    """The vocabulary of token ids, and the numbers of texts per split that were truncated or dropped as empty."""

    vocabulary: Vocabulary
    truncated: Mapping[str, int]
    dropped: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return {
            "vocabulary": self.vocabulary.made,
            "tokens": self.vocabulary.size,
            "truncated": dict(self.truncated),
            "dropped": dict(self.dropped),
        }


@dataclass(frozen=True)
class FeatureFacts:
    """The feature map that was applied to images, and their original shape."""

    name: str
    options: Mapping[str, Any]
    image_shape: tuple[int, ...]
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        facts = {"name": self.name, **self.options, "image_shape": list(self.image_shape)}
        return facts if self.note is None else facts | {"note": self.note}


@dataclass(frozen=True)
class Dataset:
    """A train and a test split with the same classes.

    `x * std + mean` (per channel, or per feature of a table) is the value before normalisation; for images
    that is a brightness from 0 to 1, for every normalisation. `user_names` are the names of the user ids, if the
    data has any. `schema` is the schema of a table.
    """

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    summary: str = ""
    tokens: TokenFacts | None = None
    user_names: tuple[str, ...] = ()
    schema: TableSchema | None = None
    notes: tuple[str, ...] = ()
    """Notes on data preparation for the privacy statement."""
    rows_per_person: int | None = None
    """The largest number of training rows of one person, if the data identifies persons."""
    features: FeatureFacts | None = None
    cells: tuple[Tensor, Tensor] | None = None
    """The training and test cells of a table whose scales will be computed with privacy noise."""

    def __post_init__(self) -> None:
        if len(self.train) == 0:
            raise DataError(f"{self.name}: there is no training example. Add some.", field="train")
        if self.train.x.shape[1:] != self.test.x.shape[1:]:
            raise DataError(
                f"{self.name}: training examples have shape {list(self.train.x.shape[1:])}, "
                f"test examples {list(self.test.x.shape[1:])}. Give both the same shape.",
                field="test",
                value=list(self.test.x.shape[1:]),
            )
        for split, examples in (("train", self.train), ("test", self.test)):
            if self.tokens is not None:
                require_labels_below(examples.x, self.tokens.vocabulary.size, f"{self.name} {split}")
            if not self.predicts_tokens and self.target == "classes":
                require_labels_below(examples.y, len(self.classes), f"{self.name} {split}")

    @property
    def predicts_tokens(self) -> bool:
        """Whether the target of each token is the next one."""
        return self.train.y.dim() == 2

    @property
    def target(self) -> Target:
        return "classes" if self.schema is None else self.schema.target

    @property
    def has_classes(self) -> bool:
        return not self.predicts_tokens and self.target == "classes"

    @property
    def labels(self) -> Tensor:
        """The training examples' labels `[n]` for partitions; zeros if there are no classes."""
        return self.train.y if self.has_classes else torch.zeros(len(self.train), dtype=torch.int64)

    @property
    def label_names(self) -> tuple[str, ...]:
        return self.classes if self.has_classes else ("texts",) if self.predicts_tokens else ("rows",)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in self.train.x.shape[1:])

    @property
    def example_shape(self) -> tuple[int, ...]:
        """The shape of an original example: of the image if the model reads features."""
        return self.input_shape if self.features is None else self.features.image_shape

    @property
    def num_classes(self) -> int:
        """The number of model outputs: one per class, interval or vocabulary token, or one for regression."""
        if self.predicts_tokens and self.tokens is not None:
            return self.tokens.vocabulary.size
        return len(self.classes) if self.schema is None else self.schema.outputs

    def limited(self, train: int | None, test: int | None) -> Dataset:
        """The same dataset with at most so many training and test examples."""
        return replace(self, train=self.train.first(train), test=self.test.first(test))


@dataclass(frozen=True)
class TextExamples:
    """Texts, all with or all without labels; `lines` are their line numbers in the file, if a split shuffled them."""

    texts: tuple[str, ...]
    labels: Tensor | None = None
    lines: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.labels is not None and tuple(self.labels.shape) != (len(self.texts),):
            raise DataError(
                f"{len(self.texts)} texts have {list(self.labels.shape)} labels. Give one label per text.",
                field="labels",
                value=list(self.labels.shape),
            )

    def __len__(self) -> int:
        return len(self.texts)

    def first(self, count: int | None) -> TextExamples:
        """The first `count` texts; all of them for None."""
        if count is None or count >= len(self):
            return self
        return TextExamples(
            self.texts[:count],
            None if self.labels is None else self.labels[:count].clone(),
            None if self.lines is None else self.lines[:count],
        )


@dataclass(frozen=True)
class TextDataset:
    """A train and a test split of texts. `classes` is empty for texts without labels."""

    name: str
    train: TextExamples
    test: TextExamples
    classes: tuple[str, ...]
    summary: str = ""

    def __post_init__(self) -> None:
        if len(self.train) == 0:
            raise DataError(f"{self.name}: there is no training text. Add some.", field="train")
        for split, examples in (("train", self.train), ("test", self.test)):
            if examples.labels is not None:
                require_labels_below(examples.labels, len(self.classes), f"{self.name} {split}")

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def limited(self, train: int | None, test: int | None) -> TextDataset:
        """The same dataset with at most so many training and test texts."""
        return replace(self, train=self.train.first(train), test=self.test.first(test))


def require_finite(x: Tensor, field: str) -> None:
    """Refuse NaN and infinity without allocating a mask of the size of `x`."""
    if not x.is_floating_point() or x.numel() == 0:
        return
    low, high = torch.aminmax(x)  # both propagate NaN
    if not (math.isfinite(low) and math.isfinite(high)):
        wrong = (~torch.isfinite(x)).reshape(x.shape[0], -1).any(1).nonzero()
        raise DataError(
            f"{field}: example {int(wrong[0])} contains NaN or infinity. Clean or drop it first.",
            field="x",
            value=int(wrong[0]),
        )


def require_labels_below(y: Tensor, num_classes: int, field: str) -> None:
    """Refuse labels outside 0..num_classes-1."""
    if y.numel() == 0:
        return
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= num_classes:
        wrong = low if low < 0 else high
        raise DataError(
            f"{field}: label {wrong} is outside 0..{num_classes - 1} ({num_classes} classes). Relabel it.",
            field="y",
            value=wrong,
        )


def images_from_bytes(
    pixels: np.ndarray,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    normalise: Normalise = "dataset",
    pad_to: int | None = None,
    brightest: float = 255.0,
) -> tuple[Tensor, tuple[float, ...], tuple[float, ...]]:
    """Images `[n, C, H, W]` as float32, with the mean and std that convert them back to brightness 0..1.

    "dataset" gives `(brightness - mean) / std`, "unit" the brightness, "none" the stored numbers. Padding is
    black, symmetric, and applied before normalisation.
    """
    if normalise not in ("dataset", "unit", "none"):
        raise InputError("normalise", normalise, "is not a normalisation", 'Use "dataset", "unit" or "none".')
    if normalise == "unit":
        mean, std = [0.0] * len(mean), [1.0] * len(std)
    elif normalise == "none":
        mean, std = [0.0] * len(mean), [1.0 / brightest] * len(std)
    n, channels, height, width = pixels.shape
    if pad_to is None:
        x = torch.from_numpy(pixels.astype(np.float32, order="C"))
    else:
        check_count("pad_to", pad_to)
        if pad_to < max(height, width):
            raise InputError(
                "pad_to",
                pad_to,
                f"is smaller than the images, {height}x{width}",
                f"Use at least {max(height, width)}.",
            )
        x = torch.zeros(n, channels, pad_to, pad_to)
        top, left = (pad_to - height) // 2, (pad_to - width) // 2
        x[:, :, top : top + height, left : left + width] = torch.from_numpy(pixels.astype(np.float32))
    for channel in range(channels):
        plane = x[:, channel]
        plane.mul_(1.0 / (brightest * std[channel])).sub_(mean[channel] / std[channel])
    return x, tuple(float(m) for m in mean), tuple(float(s) for s in std)


def labels_from(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def stratified_split(y: np.ndarray, test_fraction: float, seed: int, purpose: str) -> tuple[Tensor, Tensor]:
    """Positions of a train and a test split, shuffled and stratified by class.

    Each class gives `round(test_fraction * its size)` examples to the test split; the same seed and purpose
    give the same split.
    """
    check_fraction("test_fraction", test_fraction)
    rng = named_stream(check_seed(seed), "split", purpose)
    train: list[np.ndarray] = []
    test: list[np.ndarray] = []
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        cut = round(test_fraction * len(members))
        test.append(members[:cut])
        train.append(members[cut:])
    return (
        torch.from_numpy(rng.permutation(np.concatenate(train).astype(np.int64))),
        torch.from_numpy(rng.permutation(np.concatenate(test).astype(np.int64))),
    )


def check_fraction(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < 1.0:
        raise InputError(field, value, "is not a fraction", "Use a number from 0 to below 1.")
    return float(value)


def refuse_split(test_fraction: float, seed: int, why: str) -> None:
    """Refuse options of a split where the test examples are given: they would be ignored."""
    for field, value, usual in (("test_fraction", test_fraction, 0.2), ("seed", seed, 0)):
        if value != usual:
            raise InputError(field, value, f"is not used: {why}", "Leave it out.")


def check_count(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(field, value, "is not a positive whole number", "Use a whole number from 1 on.")
    return value


def check_seed(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError("seed", value, "is not a seed", "Use a whole number from 0 on.")
    return value
