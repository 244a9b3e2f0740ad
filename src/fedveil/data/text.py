"""Text datasets: labelled sentences for classifiers, lines without labels for language models.

Errors never quote a text, since texts may be personal.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fedveil.data.dataset import TextDataset, TextExamples, check_fraction, stratified_split
from fedveil.data.files import find, given_file, locate, read_text, text_lines
from fedveil.data.missing import require_labels
from fedveil.errors import DataError, InputError
from fedveil.lazy_torch import torch

NOT_QUOTED = frozenset({"sentiment140"})
"""Datasets whose texts are scored but never shown, since they may be personal."""

KNOWN_SHA256 = {
    "cola/in_domain_train.tsv": "f320a10f92d3bce6b29152fde322a362eac39238e50d8de0c8815457fdf4fc12",
    "cola/in_domain_dev.tsv": "77176f6a03faa5a1c4f23c69971fc1bff565931112fb65af47b2d6e24b7f42f7",
    "cola/out_of_domain_dev.tsv": "201b9c57b2a20f1282242eec0ed8995729e3be19c29a46c047b3727338836c05",
    "sst2/train.tsv": "ec192f833a64da08f475488a77b0d0b47db47acd0f458bd18433fc793b569920",
    "sst2/dev.tsv": "eddea6b39e601dd4e7a672b53cc40fdf6019fa80522f351206c24340ca5d9359",
    "sst2/test.tsv": "831169c7e2e429d6026e1bdbb542f33b636e3e596caad9602ebc953c205928b7",
    "wikitext-2/valid.txt": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    "wikitext-2/test.txt": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
    "tiny-shakespeare/input.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    "sentiment140/positive.txt": "9974fca006a8ba35d363f2444712b16479948ba2fc9613a2d42cdd143251769d",
    "sentiment140/negative.txt": "91305124952116f2a29e1b1024eb74f74f6bfdf566189ffed2f0bfa9b181a3b7",
}


def load_cola(
    *, data_dir: Path | None = None, test: Literal["in-domain", "out-of-domain", "both"] = "in-domain"
) -> TextDataset:
    """CoLA (Warstadt et al., 2018): is a sentence acceptable English? Tested on a development split."""
    if test not in ("in-domain", "out-of-domain", "both"):
        raise InputError("test", test, "no such split", 'Use "in-domain", "out-of-domain" or "both".')
    names = {
        "in-domain": ["in_domain_dev.tsv"],
        "out-of-domain": ["out_of_domain_dev.tsv"],
        "both": ["in_domain_dev.tsv", "out_of_domain_dev.tsv"],
    }
    how_to_get = "Put the raw files of CoLA 1.0 in cola/."
    rows = [
        [read_rows(_known("cola", name, data_dir, how_to_get), 4, "cola") for name in group]
        for group in (["in_domain_train.tsv"], names[test])
    ]
    train, held_out = (_labelled([(row[3], row[1]) for part in group for row in part]) for group in rows)
    return TextDataset("cola", train, held_out, ("unacceptable", "acceptable"), f"CoLA 1.0, tested {test}")


def load_sst2(*, data_dir: Path | None = None, test: Literal["test", "dev"] = "test") -> TextDataset:
    """SST-2 (Socher et al., 2013): is a sentence about a film positive?"""
    if test not in ("test", "dev"):
        raise InputError("test", test, "no such split", 'Use "test" or "dev".')
    splits = []
    for name in ("train.tsv", f"{test}.tsv"):
        path = _known("sst2", name, data_dir, "Put train.tsv, dev.tsv and test.tsv in sst2/.")
        splits.append(_labelled([(row[0], row[1]) for row in read_rows(path, 2, "sst2")]))
    return TextDataset("sst2", splits[0], splits[1], ("negative", "positive"), f"SST-2, tested on {test}")


def load_sentiment140(
    *, data_dir: Path | None = None, test_fraction: float = 0.2, seed: int = 0
) -> TextDataset:
    """A sample of Sentiment140 (Go et al., 2009): is a tweet positive? Split here, fixed by the seed.

    Lines end with "\\n" only, since tweets hold other line breaks.
    """
    check_fraction("test_fraction", test_fraction)
    groups = [
        _read_lines(
            _known("sentiment140", name, data_dir, "Put positive.txt and negative.txt in sentiment140/."),
            f"sentiment140/{name}",
        )
        for name in ("negative.txt", "positive.txt")
    ]
    texts = [text for group in groups for text in group]
    y = np.repeat([0, 1], [len(group) for group in groups])
    made = [
        TextExamples(tuple(texts[i] for i in index.tolist()), torch.from_numpy(y[index.numpy()]))
        for index in stratified_split(y, test_fraction, seed, "sentiment140")
    ]
    summary = f"Sentiment140, {len(texts)} tweets, split here"
    return TextDataset("sentiment140", made[0], made[1], ("negative", "positive"), summary)


def load_wikitext2(*, data_dir: Path | None = None) -> TextDataset:
    """WikiText-2, one text per line that is not blank. Where the training split is absent, the validation
    split is trained on, and the summary says so."""
    how_to_get = "Put train.txt, valid.txt and test.txt of WikiText-2 in wikitext-2/."
    training = find(["wikitext-2/train.txt"], data_dir)
    name = "train.txt" if training else "valid.txt"
    splits = [
        TextExamples(
            _not_blank(_read_lines(_known("wikitext-2", file, data_dir, how_to_get), f"wikitext-2/{file}"))
        )
        for file in (name, "test.txt")
    ]
    return TextDataset("wikitext-2", splits[0], splits[1], (), f"WikiText-2, trained on {name}")


def load_tiny_shakespeare(*, data_dir: Path | None = None, test_fraction: float = 0.1) -> TextDataset:
    """Plays of Shakespeare, one text per speech, the last of them for testing; joined with a blank line
    between them, the speeches give the file again."""
    path = _known("tiny-shakespeare", "input.txt", data_dir, "Put input.txt in tiny-shakespeare/.")
    speeches = read_text(path, sha256=KNOWN_SHA256.get("tiny-shakespeare/input.txt")).split("\n\n")
    return _in_order("tiny-shakespeare", tuple(speeches), test_fraction, "Tiny Shakespeare, by speech")


def load_text(*, path: str | Path, data_dir: Path | None = None, test_fraction: float = 0.1) -> TextDataset:
    """A plain UTF-8 text file, one text per line that is not blank, the last of them for testing."""
    source = given_file("path", path, data_dir)
    lines = _not_blank(text_lines(source))
    if len(lines) < 2:
        raise DataError(
            f"{source}: has {len(lines)} lines of text; training and test need at least one each. Add lines.",
            field="lines",
            value=len(lines),
        )
    return _in_order(f"text:{source.stem}", lines, test_fraction, source.name)


def load_labelled_text(
    *, path: str | Path, data_dir: Path | None = None, test_fraction: float = 0.2, seed: int = 0
) -> TextDataset:
    """A UTF-8 file of lines "text<TAB>label", any label names; split here, fixed by the seed."""
    source = given_file("path", path, data_dir)
    check_fraction("test_fraction", test_fraction)
    rows = _labelled_lines(source)
    labels = [label for _, label in rows]
    require_labels(source, "the label", labels, lambda row: f"line {row + 1}")
    classes = tuple(sorted(set(labels)))
    y = np.array([classes.index(label) for label in labels], dtype=np.int64)
    made = [
        TextExamples(
            tuple(rows[i][0] for i in index.tolist()),
            torch.from_numpy(y[index.numpy()]),
            tuple(i + 1 for i in index.tolist()),
        )
        for index in stratified_split(y, test_fraction, seed, "labelled-text")
    ]
    return TextDataset(f"labelled-text:{source.stem}", made[0], made[1], classes, source.name)


def read_labelled_texts(path: Path, classes: Sequence[str]) -> TextExamples:
    """A file of lines "text<TAB>label" whose labels are these classes, in this order."""
    rows = _labelled_lines(path)
    places = {name: place for place, name in enumerate(classes)}
    for number, (_, label) in enumerate(rows, 1):
        if label not in places:
            raise DataError(
                f"{path}: line {number} has a label other than {', '.join(classes)}. Fix the line.",
                field="label",
                value=number,
            )
    labels = torch.tensor([places[label] for _, label in rows], dtype=torch.int64)
    return TextExamples(tuple(text for text, _ in rows), labels)


def _labelled_lines(path: Path) -> list[tuple[str, str]]:
    rows = [line.rsplit("\t", 1) for line in text_lines(path)]
    for number, row in enumerate(rows, 1):
        if len(row) != 2 or not row[1].strip():
            raise DataError(
                f"{path}: line {number} is not a text, a tab and a label. Fix the line.",
                field="line",
                value=number,
            )
    return [(text, label.strip()) for text, label in rows]


def _known(folder: str, name: str, data_dir: Path | None, how_to_get: str) -> Path:
    return locate([f"{folder}/{name}"], data_dir, what=f"{folder}: {name}", how_to_get=how_to_get)


def _read_lines(path: Path, key: str) -> list[str]:
    return text_lines(path, sha256=KNOWN_SHA256.get(key))


def read_rows(path: Path, cells: int, folder: str) -> list[list[str]]:
    """Lines of tab-separated cells."""
    rows: list[list[str]] = []
    for number, line in enumerate(_read_lines(path, f"{folder}/{path.name}"), 1):
        row = line.split("\t")
        if len(row) != cells:
            raise DataError(
                f"{path}: line {number} has {len(row)} cells instead of {cells}. Get the file again.",
                field="line",
                value=number,
            )
        if row[1] not in ("0", "1"):
            raise DataError(
                f"{path}: line {number} has a label other than 0 and 1. Get the file again.",
                field="label",
                value=number,
            )
        rows.append(row)
    return rows


def _labelled(pairs: list[tuple[str, str]]) -> TextExamples:
    labels = torch.tensor([int(label) for _, label in pairs], dtype=torch.int64)
    return TextExamples(tuple(text for text, _ in pairs), labels)


def _not_blank(lines: list[str]) -> tuple[str, ...]:
    return tuple(line for line in lines if line.strip())


def _in_order(name: str, texts: tuple[str, ...], test_fraction: float, summary: str) -> TextDataset:
    cut = len(texts) - round(check_fraction("test_fraction", test_fraction) * len(texts))
    return TextDataset(name, TextExamples(texts[:cut]), TextExamples(texts[cut:]), (), summary)
