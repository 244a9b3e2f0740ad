"""Texts as token ids: padding, windows, what is cut, what is refused."""

from __future__ import annotations

from pathlib import Path

import torch

from fedveil.data.dataset import Dataset, Examples, TextDataset, TextExamples
from fedveil.data.registry import load_dataset
from fedveil.data.tokens import tokenise
from fedveil.data.vocabulary import WordVocabulary
from fedveil.errors import DataError
from fedveil.token_losses import IGNORED
from tests.refusals import refuses

WORDS = WordVocabulary(["a", "b", "c"], "given")  # 3, 4, 5; 0 pads, 1 ends


def labelled(*texts: str) -> TextDataset:
    labels = torch.arange(len(texts)) % 2
    return TextDataset(
        "mine", TextExamples(texts, labels), TextExamples(("a",), torch.tensor([1])), ("no", "yes")
    )


def plain(*texts: str) -> TextDataset:
    return TextDataset("mine", TextExamples(texts), TextExamples(("a b",)), ())


def test_a_classifier_reads_padded_texts_with_their_labels() -> None:
    found = tokenise(labelled("a b", "c", "a b c a b"), WORDS, length=4)
    assert found.train.x.tolist() == [[3, 4, 0, 0], [5, 0, 0, 0], [3, 4, 5, 3]]
    assert found.train.y.tolist() == [0, 1, 0]
    assert found.tokens is not None
    assert found.tokens.truncated == {"train": 1, "test": 0}
    assert found.tokens.to_json()["tokens"] == WORDS.size
    assert (found.input_shape, found.num_classes, found.predicts_tokens) == ((4,), 2, False)


def test_prefix_and_suffix_survive_truncation() -> None:
    class Wrapped(WordVocabulary):
        prefix = (1,)
        suffix = (2,)

    vocabulary = Wrapped(["a", "b", "c"], "given")
    found = tokenise(labelled("a b c a b", "a"), vocabulary, length=4)
    assert found.train.x.tolist() == [[1, 3, 4, 2], [1, 3, 2, 0]]
    with refuses("task.text.length", value=2):
        tokenise(labelled("a"), vocabulary, length=2)


def test_packed_windows_hold_every_token_once_with_the_one_after_it() -> None:
    found = tokenise(plain("a b", "c", "a"), WORDS, length=3, next_token=True)
    # The stream: a b end c end a end
    assert found.train.x.tolist() == [[3, 4, 1], [5, 1, 3]]
    assert found.train.y.tolist() == [[4, 1, 5], [1, 3, 1]]
    longer = tokenise(plain("a b", "c", "a"), WORDS, length=4, next_token=True)
    assert longer.train.x.tolist() == [[3, 4, 1, 5], [1, 3, 0, 0]]
    assert longer.train.y.tolist() == [[4, 1, 5, 1], [3, 1, IGNORED, IGNORED]]
    assert longer.predicts_tokens
    assert longer.num_classes == WORDS.size
    assert longer.labels.tolist() == [0, 0]


def test_unpacked_windows_are_texts() -> None:
    found = tokenise(plain("a b", "c a b c"), WORDS, length=3, next_token=True, pack=False)
    assert found.train.x.tolist() == [[3, 4, 0], [5, 3, 4]]
    assert found.train.y.tolist() == [[4, 1, IGNORED], [3, 4, 5]]
    assert found.tokens is not None
    assert found.tokens.truncated["train"] == 1


def test_too_long_texts_can_be_refused() -> None:
    with refuses("task.text.length", DataError, value=1):
        tokenise(labelled("a b c", "a"), WORDS, length=2, too_long="refuse")


def test_empty_texts_are_refused_without_quoting_or_left_out() -> None:
    data = labelled("secret a", "", "a", "  ")
    with refuses("task.text.empty", DataError, value=2) as caught:
        tokenise(data, WORDS, length=4)
    assert "secret" not in str(caught.value)
    found = tokenise(data, WORDS, length=4, empty="drop")
    assert found.train.x.tolist() == [[2, 3, 0, 0], [3, 0, 0, 0]]
    assert found.train.y.tolist() == [0, 0]
    assert found.tokens is not None
    assert found.tokens.dropped == {"train": 2, "test": 0}
    with refuses("train", DataError):
        tokenise(labelled("", " "), WORDS, length=4, empty="drop")


def test_an_empty_text_of_a_file_that_is_split_here_is_named_by_its_line(tmp_path: Path) -> None:
    rows = [f"{'' if number in (7, 23) else 'a b'}\t{number % 2}" for number in range(1, 41)]
    (tmp_path / "mine.tsv").write_text("\n".join(rows) + "\n")
    data = load_dataset("labelled-text", path=tmp_path / "mine.tsv", test_fraction=0.1)
    assert isinstance(data, TextDataset)
    with refuses("task.text.empty", DataError, value=2):
        tokenise(data, WORDS, length=4)
    limited = data.limited(5, None).train
    assert limited.lines == (data.train.lines or ())[:5]


def test_texts_without_labels_cannot_be_classified() -> None:
    with refuses("task.dataset", value="mine train"):
        tokenise(plain("a"), WORDS, length=4)


def test_examples_of_tokens_are_checked() -> None:
    x = torch.tensor([[3, 4], [5, 9]])
    facts = tokenise(labelled("a"), WORDS, length=2).tokens
    with refuses("y", DataError, value=9):
        Dataset(
            "mine",
            Examples(x, torch.tensor([0, 1])),
            Examples(x, torch.tensor([0, 1])),
            ("n", "y"),
            (),
            (),
            "",
            facts,
        )
    with refuses("x", DataError):
        Examples(torch.zeros(2, 3, 4, dtype=torch.int64), torch.tensor([0, 1]))
    with refuses("y", DataError, value=-5):
        Examples(x, torch.tensor([[1, -5], [2, 3]]))


def test_your_own_labelled_texts(tmp_path: Path) -> None:
    file = tmp_path / "mine.tsv"
    file.write_text("".join(f"text {i}\t{'spam' if i % 2 else 'ham'}\n" for i in range(20)))
    found = load_dataset("labelled-text", path=file, test_fraction=0.2)
    assert isinstance(found, TextDataset)
    assert found.classes == ("ham", "spam")
    assert (len(found.train), len(found.test)) == (16, 4)
    assert found.train.labels is not None
    for text, label in zip(found.train.texts, found.train.labels.tolist(), strict=True):
        assert int(text.split()[1]) % 2 == label
    file.write_text("one\tham\nno label\n")
    with refuses("line", DataError, value=2):
        load_dataset("labelled-text", path=file)
    file.write_bytes("caf\xe9\tham\n".encode("latin-1"))
    with refuses("line", DataError, value=1):
        load_dataset("labelled-text", path=file)
