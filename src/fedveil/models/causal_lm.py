"""A small causal language model trained from scratch (FedEM's Table 10 trains one on WikiText-2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedveil.models.shapes import check_next_tokens
from fedveil.models.transformer import Sizes, Transformer

EVALUATED = 1 << 24  # largest number of scores in memory while a language model is evaluated


class CausalLM(Transformer):
    """Every token attends to itself and earlier tokens, and predicts the next one."""

    def __init__(self, sizes: Sizes, *, tied: bool) -> None:
        super().__init__(sizes)
        self.largest_batch = max(1, EVALUATED // (sizes.length * sizes.vocabulary))
        self.output = None if tied else nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def from_embeddings(self, embedded: Tensor, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        states = self.states(embedded, later.expand(ids.shape[0], -1, -1))
        if self.output is not None:
            scores: Tensor = self.output(states)
            return scores
        return functional.linear(states, self.embedding_table())


def causal_lm(
    input_shape: Sequence[int],
    classes: int,
    *,
    vocabulary: int,
    pad: int = 0,
    width: int = 64,
    heads: int = 2,
    layers: int = 2,
    dropout: float = 0.0,
    tied: bool = True,
) -> CausalLM:
    """A small language model of texts of up to `input_shape[0]` tokens.

    `tied` uses the embedding table as output layer, which halves the parameters; every row of the table then has
    a gradient, including the rows of tokens that do not occur.
    """
    sizes = Sizes.checked(
        "causal-lm",
        input_shape,
        vocabulary=vocabulary,
        pad=pad,
        width=width,
        heads=heads,
        layers=layers,
        dropout=dropout,
    )
    check_next_tokens(classes, vocabulary)
    return CausalLM(sizes, tied=tied)
