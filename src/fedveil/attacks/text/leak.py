"""Which tokens a gradient names outright: the embedding of a token gets a gradient only if the token occurs.

Melis, Song, De Cristofaro, Shmatikov: Exploiting unintended feature leakage in collaborative learning. 2019.

Where every row has a gradient (noise on all coordinates, or a table that also scores the next token) the rows of
tokens that occur are longer than the rest, and outliers among the lengths are taken for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedveil.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


_FAR = 5.0  # robust standard deviations above the median that make an outlier


@dataclass(frozen=True)
class TokenLeak:
    """The tokens that one upload names, in order of id; empty where it names none, and `how` says why."""

    tokens: tuple[int, ...]
    how: str


def leaked_tokens(gradient: Tensor | None, places: int, ignored: Sequence[int] = ()) -> TokenLeak:
    """The tokens behind the gradient `[V, E]` of an embedding table, at most as many as there are `places`.

    `ignored` are tokens that need no finding: padding, and those whose places are known.
    """
    if gradient is None:
        return TokenLeak((), "the embeddings are not trained, so they have no gradient")
    lengths = gradient.double().norm(dim=1)
    lengths[list(ignored)] = 0.0
    occurring = (lengths > 0).nonzero()[:, 0]
    if len(occurring) <= places:
        how = "rows of the embedding gradient that are not zero"
    else:
        logged = lengths[occurring].log()
        middle = logged.median()
        spread = 1.4826 * (logged - middle).abs().median()
        far = occurring[logged > middle + _FAR * spread]
        occurring = far[lengths[far].argsort(descending=True)][:places]
        how = "rows of the embedding gradient that stand out: all have one"
    if not len(occurring):
        return TokenLeak((), "no row of the embedding gradient stands out")
    return TokenLeak(tuple(sorted(occurring.tolist())), how)


@dataclass(frozen=True)
class LeakScore:
    """How right a leak is about the distinct tokens of the texts."""

    precision: float
    recall: float


def score_leak(leak: TokenLeak, truth: Tensor, ignored: Sequence[int] = ()) -> LeakScore:
    """The leak against the ids `truth` that occurred; a leak that names nothing scores 0."""
    held = set(truth.flatten().tolist()) - set(ignored)
    named = set(leak.tokens)
    shared = len(held & named)
    return LeakScore(shared / max(len(named), 1), shared / max(len(held), 1))


def allowed_tokens(leak: TokenLeak, vocabulary: int, ignored: Sequence[int]) -> Tensor:
    """Which tokens are candidates, `[V]`: those that leaked, or all but the ignored where none did."""
    allowed = torch.zeros(vocabulary, dtype=torch.bool)
    if leak.tokens:
        allowed[list(leak.tokens)] = True
    else:
        allowed[:] = True
        allowed[list(ignored)] = False
    return allowed
