"""Conversion of texts to token ids of one length, padded on the right, for models of texts.

A classifier's example is one text with its label. A language model's example is a window of `length` tokens with the
next token of each: of the concatenated texts of a split (`pack`), so that a record is a window, or of one text each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from fedveil.data.dataset import Dataset, Examples, TextDataset, TextExamples, TokenFacts, check_count
from fedveil.data.vocabulary import Vocabulary
from fedveil.errors import DataError, InputError
from fedveil.lazy_torch import torch
from fedveil.token_losses import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

TooLong = Literal["truncate", "refuse"]
Empty = Literal["refuse", "drop"]


def tokenise(
    dataset: TextDataset,
    vocabulary: Vocabulary,
    *,
    length: int = 64,
    next_token: bool = False,
    too_long: TooLong = "truncate",
    empty: Empty = "refuse",
    pack: bool = True,
) -> Dataset:
    """The dataset as token ids, for a classifier or (`next_token`) a language model.

    Texts longer than `length` are cut, and their number is in `tokens.truncated`, or they are refused. Texts without
    a token are refused, or left out and counted in `tokens.dropped`. No error quotes a text.
    """
    made: list[Examples] = []
    truncated: dict[str, int] = {}
    dropped: dict[str, int] = {}
    for split, texts in (("train", dataset.train), ("test", dataset.test)):
        examples, truncated[split], dropped[split] = tokenise_texts(
            f"{dataset.name} {split}",
            texts,
            vocabulary,
            length=length,
            next_token=next_token,
            too_long=too_long,
            empty=empty,
            pack=pack,
        )
        made.append(examples)
    facts = TokenFacts(vocabulary, truncated, dropped)
    return Dataset(dataset.name, made[0], made[1], dataset.classes, (), (), dataset.summary, facts)


def tokenise_texts(
    name: str,
    texts: TextExamples,
    vocabulary: Vocabulary,
    *,
    length: int,
    next_token: bool = False,
    too_long: TooLong = "truncate",
    empty: Empty = "refuse",
    pack: bool = True,
) -> tuple[Examples, int, int]:
    """Token ids of these texts, the number of truncated and of dropped texts; `name` is for errors."""
    room = check_count("task.text.length", length) - len(vocabulary.prefix) - len(vocabulary.suffix)
    if room < 1:
        raise InputError(
            "task.text.length",
            length,
            f"leaves no room besides {length - room} special tokens",
            f"Use {length - room + 1} or more.",
        )
    if not next_token and texts.labels is None:
        raise InputError(
            "task.dataset", name, "has no labels to classify", "Choose a language model, e.g. causal-lm."
        )
    encoded, labels, dropped = _without_empty(name, texts, vocabulary, empty)
    if next_token or labels is None:
        examples, truncated = _windows(encoded, vocabulary, length, pack)
    else:
        examples, truncated = _labelled(encoded, labels, vocabulary, length, room)
    if truncated and too_long == "refuse":
        raise DataError(
            f"{name}: {truncated} texts are longer than task.text.length = {length}. "
            'Increase it, or set task.text.too_long = "truncate".',
            field="task.text.length",
            value=truncated,
        )
    return examples, truncated, dropped


def _without_empty(
    name: str, texts: TextExamples, vocabulary: Vocabulary, empty: Empty
) -> tuple[list[list[int]], Tensor | None, int]:
    encoded = vocabulary.encode(texts.texts)
    kept = [place for place, ids in enumerate(encoded) if ids]
    missing = len(encoded) - len(kept)
    if missing and empty == "refuse":
        places = [place for place, ids in enumerate(encoded) if not ids]
        first = (
            f"text {places[0] + 1}" if texts.lines is None else f"line {min(texts.lines[p] for p in places)}"
        )
        raise DataError(
            f"{name}: {missing} of {len(encoded)} texts are empty, the first is {first}. "
            'Remove them, or set task.text.empty = "drop".',
            field="task.text.empty",
            value=missing,
        )
    labels = None if texts.labels is None else texts.labels[torch.tensor(kept, dtype=torch.long)]
    return [encoded[place] for place in kept], labels, missing


def _labelled(
    encoded: Sequence[Sequence[int]], labels: Tensor, vocabulary: Vocabulary, length: int, room: int
) -> tuple[Examples, int]:
    x = torch.full((len(encoded), length), vocabulary.pad, dtype=torch.int64)
    for row, ids in zip(x, encoded, strict=True):
        whole = [*vocabulary.prefix, *ids[:room], *vocabulary.suffix]
        row[: len(whole)] = torch.tensor(whole)
    return Examples(x, labels), sum(len(ids) > room for ids in encoded)


def _windows(
    encoded: Sequence[Sequence[int]], vocabulary: Vocabulary, length: int, pack: bool
) -> tuple[Examples, int]:
    """Windows of `length` tokens with the next token of each; missing targets at the end are ignored."""
    ended = [[*ids, vocabulary.end] for ids in encoded]
    truncated = 0
    if pack:
        stream = [token for ids in ended for token in ids]
        pieces = [stream[start : start + length + 1] for start in range(0, len(stream) - 1, length)]
    else:
        truncated = sum(len(ids) > length + 1 for ids in ended)
        pieces = [ids[: length + 1] for ids in ended]
    x = torch.full((len(pieces), length), vocabulary.pad, dtype=torch.int64)
    y = torch.full((len(pieces), length), IGNORED, dtype=torch.int64)
    for place, piece in enumerate(pieces):
        x[place, : len(piece) - 1] = torch.tensor(piece[:-1])
        y[place, : len(piece) - 1] = torch.tensor(piece[1:])
    return Examples(x, y), truncated
