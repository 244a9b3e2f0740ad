"""Score recovered texts and describe them: scores always, the texts only where they may be shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedveil.attack_runs.transcript import StoredRun, Truth
from fedveil.attacks.text.leak import LeakScore, score_leak
from fedveil.attacks.view import UNKNOWN, Finding, ServerView
from fedveil.data.text import NOT_QUOTED
from fedveil.evaluation.text_overlap import Rouge, mean_rouge, rouge

_SNAPSHOTS = 6
_PUBLIC = 200  # number of public texts for the baseline


@dataclass(frozen=True)
class ScoredTexts:
    """An attack's texts with their scores, in the order of the client's texts; lists are over all attacked texts."""

    finding: Finding
    view: ServerView
    truth: Truth
    original: tuple[str, ...]
    found: tuple[str, ...]
    path: tuple[tuple[int, tuple[str, ...]], ...]
    scores: tuple[Rouge, ...]
    leaks: tuple[LeakScore, ...]
    public: Rouge
    """The baseline: the average score of a public text."""
    quotable: bool

    @property
    def mean(self) -> Rouge:
        return mean_rouge(self.scores)


def score_texts(run: StoredRun, view: ServerView, finding: Finding, held: Truth) -> ScoredTexts:
    """Score the finding against the clients' texts; texts of a batch are matched for the largest total overlap."""
    dataset = run.prepared.dataset
    assert dataset.tokens is not None
    assert view.text is not None
    read = dataset.tokens.vocabulary.decode
    original = [[read(text) for text in batch] for batch in held.x.tolist()]
    found = [[read(text) for text in batch] for batch in finding.images.tolist()]
    orders = [_matched(a, b) for a, b in zip(original, found, strict=True)]
    pairs = [
        (text, batch[i])
        for texts, batch, order in zip(original, found, orders, strict=True)
        for text, i in zip(texts, order, strict=True)
    ]
    known = view.text.known
    leaks = tuple(
        score_leak(leak, held.x[t], known[t][known[t] != UNKNOWN].tolist())
        for t, leak in enumerate(finding.leaks)
    )
    public = [read(text) for text in dataset.test.x[:_PUBLIC].tolist()]
    return ScoredTexts(
        finding,
        view,
        held,
        tuple(a for a, _ in pairs),
        tuple(b for _, b in pairs),
        tuple((step, _in_order(tokens, orders, read)) for step, tokens in _thinned(finding.path)),
        tuple(rouge(a, b) for a, b in pairs),
        leaks,
        mean_rouge([rouge(a, text) for a, _ in pairs for text in public]),
        dataset.name not in NOT_QUOTED,
    )


def _matched(original: list[str], found: list[str]) -> list[int]:
    """The index of the found text matched to each original."""
    from scipy.optimize import linear_sum_assignment

    scores = [[rouge(a, b) for b in found] for a in original]
    overlap = np.array([[s.rouge1 + s.rouge_l for s in row] for row in scores])
    return [int(i) for i in linear_sum_assignment(overlap, maximize=True)[1]]


def _in_order(tokens: Tensor, orders: list[list[int]], read: Callable[[list[int]], str]) -> tuple[str, ...]:
    batches = tokens.tolist()
    return tuple(read(batch[i]) for batch, order in zip(batches, orders, strict=True) for i in order)


def _thinned(path: tuple[tuple[int, Tensor], ...]) -> list[tuple[int, Tensor]]:
    """The first, the last, and a few evenly spaced entries."""
    if len(path) <= _SNAPSHOTS:
        return list(path)
    return [path[round(i * (len(path) - 1) / (_SNAPSHOTS - 1))] for i in range(_SNAPSHOTS)]


def describe_texts(scored: ScoredTexts) -> dict[str, Any]:
    """The scores as JSON. Leaked tokens come first: they need no search."""
    leaks = [
        {"tokens": len(leak.tokens), "how": leak.how, "precision": score.precision, "recall": score.recall}
        for leak, score in zip(scored.finding.leaks, scored.leaks, strict=True)
    ]
    return {
        "leaked_tokens": leaks,
        "metrics": scored.mean.to_json() | _leak_means(scored.leaks),
        "public_text": scored.public.to_json(),
        "per_text": [score.to_json() for score in scored.scores],
        "texts_shown": scored.quotable,
    }


def _leak_means(leaks: tuple[LeakScore, ...]) -> dict[str, float]:
    if not leaks:
        return {}
    return {
        "leaked_tokens_right": float(np.mean([leak.precision for leak in leaks])),
        "tokens_leaked": float(np.mean([leak.recall for leak in leaks])),
    }


def texts_content(scored: ScoredTexts) -> list[dict[str, Any]]:
    """Every text with its reconstruction and intermediate results; empty where texts may not be shown."""
    if not scored.quotable:
        return []
    return [
        {
            "original": original,
            "found": found,
            **score.to_json(),
            "path": [{"step": step, "text": texts[i]} for step, texts in scored.path],
        }
        for i, (original, found, score) in enumerate(
            zip(scored.original, scored.found, scored.scores, strict=True)
        )
    ]
