"""Vocabularies that look at no private text."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import pytest

from fedveil.data.vocabulary import (
    ByteVocabulary,
    HashVocabulary,
    Vocabulary,
    WordVocabulary,
    make_vocabulary,
    public_vocabulary,
)
from fedveil.errors import DataError
from tests.refusals import refuses


def test_a_hashed_word_has_the_place_of_its_digest() -> None:
    vocabulary = HashVocabulary(100)
    digest = int.from_bytes(blake2b(b"cat", digest_size=8).digest(), "little")
    assert vocabulary.encode(["Cat, cat"]) == [
        [2 + digest % 98, vocabulary.encode([","])[0][0], 2 + digest % 98]
    ]
    assert not vocabulary.readable
    assert vocabulary.decode([0, 1, 7, 9]) == "#7 #9"


@pytest.mark.parametrize(
    "vocabulary",
    [HashVocabulary(3), HashVocabulary(50), ByteVocabulary(), WordVocabulary(["a", "b"], "given")],
)
def test_tokens_are_within_the_size_and_never_padding(vocabulary: Vocabulary) -> None:
    tokens = [i for ids in vocabulary.encode(["a B? né\t1", "", "   "]) for i in ids]
    assert tokens
    assert all(0 <= i < vocabulary.size for i in tokens)
    assert not set(tokens) & vocabulary.special()
    assert vocabulary.encode([""]) == [[]]


def test_bytes_lead_back_to_the_text() -> None:
    vocabulary = ByteVocabulary()
    text = "Grüße, 世界\n"
    assert vocabulary.decode([*vocabulary.encode([text])[0], vocabulary.end, vocabulary.pad]) == text


def test_public_words_are_the_most_frequent_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "public.txt"
    file.write_text("b a b c a b d")
    vocabulary = public_vocabulary(file, 5)
    assert vocabulary.encode(["a b c"]) == [[4, 3, vocabulary.unknown]]
    assert vocabulary.decode([3, 4, 2, 1, 0]) == "b a <unk>"
    assert vocabulary.size == 5
    assert "declared public" in vocabulary.made
    file.write_text("...")
    assert public_vocabulary(file, 9).size == 4
    file.write_text(" \n ")
    with refuses("task.text.path", DataError):
        public_vocabulary(file, 9)


def test_what_cannot_be_built_is_refused() -> None:
    with refuses("task.text.path"):
        make_vocabulary("hash", path="x")
    with refuses("task.text.path"):
        make_vocabulary("public")
    with refuses("task.text.vocabulary"):
        make_vocabulary("private")  # type: ignore[arg-type]
    with refuses("task.text.size"):
        make_vocabulary("hash", size=2)
    with refuses("words"):
        WordVocabulary(["a", "a"], "given")
    assert make_vocabulary("bytes").size == 258
    assert make_vocabulary("hash", size=9).size == 9
