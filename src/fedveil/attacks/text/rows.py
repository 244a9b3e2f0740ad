"""Exact recovery of a text from two gradients, without search: those of the token table and of the positions.

Models add the embeddings of a token and of its position. For one text, the gradient of position p is therefore that of
the sum at p, and the gradient of a token is the sum of these over its positions, so equal rows belong together. This
holds for any perturbation that is added to the embeddings, so perturbed inputs do not protect a text; only changes of
the two gradients themselves can.

The leak of token rows alone is known since Melis et al. 2019.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic.dataclasses import dataclass

from fedveil.attacks.inversion.restarts import Clock, Named
from fedveil.attacks.registry import register_attack
from fedveil.attacks.text.leak import TokenLeak, allowed_tokens, leaked_tokens
from fedveil.attacks.text.matching import text_model
from fedveil.attacks.view import UNKNOWN, Finding, ServerView, StepCallback
from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.methods.fields import STRICT

if TYPE_CHECKING:
    from torch import Tensor


@register_attack("embedding-rows", "texts, exactly: gradient rows of tokens matched with those of positions")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class EmbeddingRows(Named):
    of_texts = True

    def __call__(
        self, view: ServerView, rng: np.random.Generator, callback: StepCallback | None = None
    ) -> Finding:
        clock = Clock()
        if view.text is None:
            raise InputError("attack", self.name, "the run's data is not text", "Use an attack on images.")
        if view.examples != 1:
            raise InputError(
                "examples", view.examples, "rows of a batch are sums over its texts", "Use lamp for batches."
            )
        tokens, places = _rows(view)
        texts, leaks, losses = [], [], []
        for t in range(view.targets):
            known = view.text.known[t, 0]
            pad, sums = text_model(view.task).pad, view.adaptation.kind not in ("sign", "mask")
            text, leak, loss = _read(tokens[t], places[t], known, view.text.vocabulary, pad, sums=sums)
            texts.append(text)
            leaks.append(leak)
            losses.append(loss)
            if callback is not None:
                callback(t + 1, view.targets, min(losses))
        found = torch.stack(texts).unsqueeze(1)
        labels = view.labels if view.labels is not None else torch.zeros(view.targets, 0, dtype=torch.long)
        notes = ("lengths and places of special tokens known", "labels, model and language prior not needed")
        return Finding(
            self.name,
            found,
            labels,
            torch.tensor(losses).unsqueeze(1),
            ((0, found),),
            0,
            clock.seconds,
            notes,
            tuple(leaks),
        )


def _rows(view: ServerView) -> tuple[Tensor, Tensor]:
    """The gradients of the token table `[T, V, E]` and of the positions `[T, L, E]`."""
    table = text_model(view.task).table
    if table not in view.observed:
        raise InputError("attack", "embedding-rows", "the embeddings are not trained", "Use lamp.")
    tokens = view.observed[table]
    named = [
        leaf
        for name, leaf in view.observed.items()
        if ("position" in name or "wpe" in name) and leaf.dim() == 3 and leaf.shape[2] == tokens.shape[2]
    ]
    if len(named) != 1:
        raise InputError("attack", "embedding-rows", "the model has no learnt positions", "Use lamp.")
    return tokens.double(), named[0].double()


def _read(
    tokens: Tensor, places: Tensor, known: Tensor, vocabulary: int, pad: int, *, sums: bool
) -> tuple[Tensor, TokenLeak, float]:
    """One text `[L]`, the tokens of its rows, and the share of their gradient that it leaves unexplained."""
    ignored = sorted({pad, *known[known != UNKNOWN].tolist()})
    free = (known == UNKNOWN).nonzero()[:, 0]
    leak = leaked_tokens(tokens, len(free), ignored)
    choice = allowed_tokens(leak, vocabulary, ignored).nonzero()[:, 0]
    wanted, given = tokens[choice], places[free]
    near = _similarity(wanted, given)
    if not leak.tokens:
        picked = near.argmax(0)
    elif not sums:  # coordinates are missing or have lost their magnitude, so sums of rows are not comparable
        picked = _assigned(near)
    else:
        starts = [_assigned(near), _assigned(_combination(wanted, given))]
        tried = [_refined(start, wanted, given) for start in starts]
        picked = min(tried, key=lambda p: _unexplained(p, wanted, given))
    text = known.clone()
    text[free] = choice[picked]
    return text, leak, _unexplained(picked, wanted, given)


def _similarity(wanted: Tensor, given: Tensor) -> Tensor:
    """Cosines `[M, P]` over coordinates that are not zero in both, since a defence may set some to zero."""
    a, b = (wanted != 0).double(), (given != 0).double()
    lengths = (wanted.square() @ b.T) * (a @ given.square().T)
    return (wanted @ given.T) / lengths.clamp(min=1e-60).sqrt()


def _combination(wanted: Tensor, given: Tensor) -> Tensor:
    """The count of each position in each token's row `[M, P]`, by least squares; exact without a defence."""
    found: Tensor = torch.linalg.lstsq(given.T, wanted.T, driver="gelsd").solution
    return found.T


def _assigned(near: Tensor) -> Tensor:
    """The token of each position: tokens get their nearest positions, then other positions their nearest tokens."""
    from scipy.optimize import linear_sum_assignment

    near = near.nan_to_num()
    rows, columns = linear_sum_assignment(near, maximize=True)
    picked = near.argmax(0)
    picked[torch.from_numpy(columns)] = torch.from_numpy(rows)
    return picked


def _refined(picked: Tensor, wanted: Tensor, given: Tensor) -> Tensor:
    """Improve an assignment by moving positions to other tokens, or swapping two, while the residual decreases."""
    products, lengths = given @ given.T, given.square().sum(1)
    apart = lengths[:, None] + lengths[None] - 2 * products
    picked = picked.clone()
    for _ in range(4 * len(given)):
        left = wanted - torch.zeros_like(wanted).index_add_(0, picked, given)
        products = left @ given.T  # [M, P]
        own = products[picked]  # row p: inner products of the residual of p's token with each position
        here = own.diagonal()
        move = 2 * (lengths + here)[None] - 2 * products
        move[picked, torch.arange(len(given))] = torch.inf
        swap = 2 * apart - 2 * (own - here[:, None]) - 2 * (own.T - here[None])
        swap[picked[:, None] == picked[None]] = torch.inf
        least = min(float(move.min()), float(swap.min()))
        if least > -1e-12 * float(wanted.square().sum()):
            break
        if float(swap.min()) <= float(move.min()):
            i, j = divmod(int(swap.argmin()), len(given))
            picked[i], picked[j] = picked[j].clone(), picked[i].clone()
        else:
            token, place = divmod(int(move.argmin()), len(given))
            picked[place] = token
    return picked


def _unexplained(picked: Tensor, wanted: Tensor, given: Tensor) -> float:
    sums = torch.zeros_like(wanted).index_add_(0, picked, given)
    return float((wanted - sums).norm() / wanted.norm().clamp(min=1e-30))
