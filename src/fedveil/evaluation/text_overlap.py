"""ROUGE for recovered texts; Matthews correlation and perplexity for text models.

Lin: ROUGE: A package for automatic evaluation of summaries. 2004. Words are runs of letters and digits without
regard to case, not stemmed; every score is an F-measure, from 0 to 1.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from fedveil.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

_NOT_A_WORD = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class Rouge:
    """ROUGE-1 (words), ROUGE-2 (pairs of neighbouring words) and ROUGE-L (longest common subsequence)."""

    rouge1: float
    rouge2: float
    rouge_l: float

    def to_json(self) -> dict[str, float]:
        return {"rouge1": self.rouge1, "rouge2": self.rouge2, "rougeL": self.rouge_l}


def words_of(text: str) -> list[str]:
    """The words that ROUGE compares."""
    return _NOT_A_WORD.sub(" ", text.lower()).split()


def rouge(original: str, found: str) -> Rouge:
    """The scores of `found` against `original`; symmetric, 1 for equal words in equal order, 0 where one is empty."""
    a, b = words_of(original), words_of(found)
    return Rouge(
        _shared(a, b), _shared(_pairs(a), _pairs(b)), _f_measure(_common_length(a, b), len(a), len(b))
    )


def mean_rouge(scores: Sequence[Rouge]) -> Rouge:
    """The mean of each score over texts."""
    if not scores:
        raise InputError("scores", [], "there is nothing to average", "Score at least one text.")
    return Rouge(
        fmean(s.rouge1 for s in scores), fmean(s.rouge2 for s in scores), fmean(s.rouge_l for s in scores)
    )


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    return list(pairwise(words))


def _shared(a: Sequence[object], b: Sequence[object]) -> float:
    return _f_measure((Counter(a) & Counter(b)).total(), len(a), len(b))


def _f_measure(shared: int, a: int, b: int) -> float:
    """The harmonic mean of shared / a and shared / b."""
    return 2 * shared / (a + b) if shared else 0.0


def _common_length(a: Sequence[str], b: Sequence[str]) -> int:
    """The length of the longest common subsequence, computed row by row."""
    row = [0] * (len(b) + 1)
    for word in a:
        diagonal = 0
        for j, other in enumerate(b, 1):
            above = row[j]
            row[j] = diagonal + 1 if word == other else max(above, row[j - 1])
            diagonal = above
    return row[-1]


def matthews(y: Tensor, predicted: Tensor) -> float:
    """The Matthews correlation of labels and predictions, for any number of classes (Gorodkin 2004).

    1 is perfect, 0 no better than chance; 0 also if labels or predictions have only one class, where it is undefined.
    """
    if y.shape != predicted.shape or y.dim() != 1 or not len(y):
        raise InputError(
            "predicted",
            list(predicted.shape),
            f"there are labels of shape {list(y.shape)}",
            "Give one class for each label.",
        )
    classes = int(max(y.max(), predicted.max())) + 1
    held = y.bincount(minlength=classes).double()
    said = predicted.bincount(minlength=classes).double()
    n, right = float(len(y)), float((y == predicted).sum())
    spread = (n * n - float(held @ held)) * (n * n - float(said @ said))
    return (right * n - float(held @ said)) / math.sqrt(spread) if spread > 0 else 0.0


def perplexity(loss: float) -> float:
    """`exp` of the mean loss per token in nats; infinite if it overflows."""
    return math.exp(loss) if loss < 700 else math.inf
