"""Tokens disclosed directly by a gradient: the embedding of a token has a gradient only if the token occurs.

Melis, Song, De Cristofaro, Shmatikov: Exploiting unintended feature leakage in collaborative learning. 2019.

If every row has a gradient (noise on all coordinates, or a table that also scores the next token), the rows of
occurring tokens have larger norms, so outliers among the norms are assumed to be these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedveil.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


_FAR = 5.0  # an outlier is so many robust standard deviations above the median


@dataclass(frozen=True)
class TokenLeak:
    """The tokens disclosed by one upload, in order of id, and how; empty if none, with `how` as the reason."""

    tokens: tuple[int, ...]
    how: str


def leaked_tokens(gradient: Tensor | None, places: int, ignored: Sequence[int] = ()) -> TokenLeak:
    """The tokens disclosed by the gradient `[V, E]` of an embedding table, at most as many as there are `places`.

    `ignored` are tokens that are not searched: padding, and those with known positions.
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
        how = "outlier rows of the embedding gradient, all of which are not zero"
    if not len(occurring):
        return TokenLeak((), "no row of the embedding gradient is an outlier")
    return TokenLeak(tuple(sorted(occurring.tolist())), how)


@dataclass(frozen=True)
class LeakScore:
    """The precision and recall of a leak on the distinct tokens of the texts."""

    precision: float
    recall: float


def score_leak(leak: TokenLeak, truth: Tensor, ignored: Sequence[int] = ()) -> LeakScore:
    """Score the leak against the ids `truth` that occurred; an empty leak scores 0."""
    held = set(truth.flatten().tolist()) - set(ignored)
    named = set(leak.tokens)
    shared = len(held & named)
    return LeakScore(shared / max(len(named), 1), shared / max(len(held), 1))


def allowed_tokens(leak: TokenLeak, vocabulary: int, ignored: Sequence[int]) -> Tensor:
    """The candidate tokens, `[V]`: those that leaked, or all but the ignored if none did."""
    allowed = torch.zeros(vocabulary, dtype=torch.bool)
    if leak.tokens:
        allowed[list(leak.tokens)] = True
    else:
        allowed[:] = True
        allowed[list(ignored)] = False
    return allowed
