"""Discrete changes of texts: LAMP's transformations of the order, and replacements of single tokens.

A text batch is one sequence of F free positions; `texts` lists the positions of each text. A change gives the source
position of every position, and optionally sets one position to a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Change:
    """Position i gets the content of `source[i]`; then position `place`, if given, gets `token`."""

    source: tuple[int, ...]
    place: int | None = None
    token: int | None = None


def reorder(texts: Sequence[Sequence[int]], count: int, rng: np.random.Generator) -> Change:
    """A random transformation of LAMP: swap two tokens, move one, move a part, or move the beginning to the end.

    In a batch one in four swaps tokens of two texts, since a gradient does not show which text has a token. The
    multiset of tokens does not change.
    """
    source = list(range(count))
    filled = [text for text in texts if text]
    if len(filled) > 1 and rng.random() < 0.25:
        one, other = (filled[i] for i in rng.choice(len(filled), 2, replace=False))
        i, j = int(rng.choice(one)), int(rng.choice(other))
        source[i], source[j] = source[j], source[i]
        return Change(tuple(source))
    long = [text for text in filled if len(text) > 1]
    if not long:
        return Change(tuple(source))
    text = long[int(rng.integers(len(long)))]
    order = _transformed(list(text), rng)
    for place, origin in zip(text, order, strict=True):
        source[place] = origin
    return Change(tuple(source))


def _transformed(order: list[int], rng: np.random.Generator) -> list[int]:
    kind = int(rng.integers(4))
    n = len(order)
    if kind == 0:
        i, j = rng.choice(n, 2, replace=False)
        order[i], order[j] = order[j], order[i]
        return order
    if kind == 1:
        token = order.pop(int(rng.integers(n)))
        order.insert(int(rng.integers(n)), token)
        return order
    if kind == 2:
        begin, end = sorted(int(i) for i in rng.choice(n + 1, 2, replace=False))
        part, rest = order[begin:end], order[:begin] + order[end:]
        at = int(rng.integers(len(rest) + 1))
        return rest[:at] + part + rest[at:]
    cut = int(rng.integers(1, n))
    return order[cut:] + order[:cut]


def substitute(
    content: Sequence[int], choices: Sequence[Sequence[int]], named: frozenset[int], rng: np.random.Generator
) -> Change | None:
    """Replace a token by another of the position's `choices`; None if there is none.

    A `named` token is known to occur, so its last occurrence is never replaced.
    """
    counts = Counter(content)
    open_places = [i for i, token in enumerate(content) if token not in named or counts[token] > 1]
    if not open_places:
        return None
    place = int(rng.choice(open_places))
    others = [token for token in choices[place] if token != content[place]]
    return Change(tuple(range(len(content))), place, int(rng.choice(others))) if others else None
