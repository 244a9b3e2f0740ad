"""An LSTM that classifies texts (FedCEO's Table 6, on Sentiment140).

Deviations: FedCEO gives only the name of its LSTM and cites LEAF (Caldas et al. 2018), whose network has two
layers of 100 units on 25 tokens with fixed word vectors. Sizes are options here; `frozen_embedding` keeps the
vectors fixed, `embedding_path` loads them from a transformers folder, and `pooling = "mean"` uses the mean of all
states instead of the last, which learns much faster with plain SGD.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedveil.data.transformers_folder import token_embeddings
from fedveil.errors import InputError
from fedveil.models.frozen import freeze
from fedveil.models.shapes import check_count, check_rate, check_text
from fedveil.text_model import TextModel


class LSTMLayer(nn.Module):
    """One layer in plain operations, since `torch.nn.LSTM` cannot be mapped over clients.

    Gates are in torch's order (input, forget, cell, output) and have torch's initialisation.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(hidden)
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, inputs).uniform_(-bound, bound))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(4 * hidden).uniform_(-bound, bound))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """The states `[B, L, H]` after each token; padding does not change the state."""
        given = functional.linear(x, self.weight_ih, self.bias)
        h = c = torch.zeros_like(given[:, 0, : given.shape[-1] // 4])
        states = []
        for step in range(x.shape[1]):
            gates = given[:, step] + functional.linear(h, self.weight_hh)
            enter, forget, cell, out = gates.chunk(4, dim=-1)
            here = mask[:, step, None]
            c = torch.where(here, torch.sigmoid(forget) * c + torch.sigmoid(enter) * torch.tanh(cell), c)
            h = torch.where(here, torch.sigmoid(out) * torch.tanh(c), h)
            states.append(h)
        return torch.stack(states, dim=1)


class LSTMClassifier(TextModel):
    """Embedding, LSTM layers, dropout, and one linear layer on the last state or on the mean of all states."""

    table = "embedding.weight"

    def __init__(
        self,
        vocabulary: int,
        pad: int,
        classes: int,
        embedding: int,
        hidden: int,
        layers: int,
        dropout: float,
        pooling: str,
    ) -> None:
        super().__init__()
        self.pad = pad
        self.pooling = pooling
        self.embedding = nn.Embedding(vocabulary, embedding)
        nn.init.normal_(self.embedding.weight, std=1 / math.sqrt(embedding))
        sizes = [embedding, *([hidden] * layers)]
        self.layers = nn.ModuleList(LSTMLayer(*pair) for pair in pairwise(sizes))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.output = nn.Linear(hidden, classes)

    def from_embeddings(self, embedded: Tensor, ids: Tensor) -> Tensor:
        mask = self.mask(ids)
        for layer in self.layers:
            embedded = layer(embedded, mask)
        summary = embedded[:, -1]
        if self.pooling == "mean":
            weights = mask.to(embedded.dtype).unsqueeze(-1)
            summary = (embedded * weights).sum(1) / weights.sum(1).clamp(min=1)
        scores: Tensor = self.output(self.dropout(summary))
        return scores


def lstm(
    input_shape: Sequence[int],
    classes: int,
    *,
    vocabulary: int,
    pad: int = 0,
    embedding: int = 64,
    hidden: int = 64,
    layers: int = 1,
    dropout: float = 0.0,
    pooling: Literal["last", "mean"] = "last",
    frozen_embedding: bool = False,
    embedding_path: str | None = None,
) -> LSTMClassifier:
    """An LSTM classifier of texts of `input_shape[0]` tokens.

    `frozen_embedding` keeps the initial embeddings as constants that are neither trained nor sent. `embedding_path`
    loads them, frozen and scaled to a mean square of 1, from the transformers folder whose tokenizer made the tokens
    ("default" for the MiniLM package).
    """
    check_text("lstm", input_shape, vocabulary, pad)
    for field, value in (("embedding", embedding), ("hidden", hidden), ("layers", layers)):
        check_count(field, value)
    if pooling not in ("last", "mean"):
        raise InputError("pooling", pooling, "is not a pooling", 'Use "last" or "mean".')
    table = None if embedding_path is None else token_embeddings(embedding_path, vocabulary)
    width = embedding if table is None else int(table.shape[1])
    model = LSTMClassifier(vocabulary, pad, classes, width, hidden, layers, check_rate(dropout), pooling)
    if table is not None:
        with torch.no_grad():
            model.embedding.weight.copy_(table / table.square().mean().sqrt())
    if frozen_embedding or table is not None:
        freeze(model, lambda name: name == model.table)
    return model
