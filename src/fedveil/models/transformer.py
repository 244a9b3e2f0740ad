"""A small transformer trained from scratch: its blocks, and a classifier.

Attention is written in plain operations, so that clients can be stacked and gradients differentiated again, as
gradient inversion needs; torch's fused attention supports neither on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedveil.errors import InputError
from fedveil.models.shapes import check_count, check_rate, check_text
from fedveil.text_model import TextModel


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        # A bias of the keys cancels in the softmax.
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width)

    def forward(self, h: Tensor, hidden: Tensor) -> Tensor:
        """`hidden [B, L, L]` is True where attention is masked out."""
        b, length, width = h.shape
        parts = self.query_key_value(h).reshape(b, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self.heads)
        scores = scores.masked_fill(hidden.unsqueeze(1), torch.finfo(scores.dtype).min)
        seen = torch.softmax(scores, dim=-1) @ value
        out: Tensor = self.output(seen.transpose(1, 2).reshape(b, length, width))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)
        self.dropout1 = nn.Dropout(dropout) if dropout else nn.Identity()
        self.dropout2 = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, h: Tensor, hidden: Tensor) -> Tensor:
        h = h + self.dropout1(self.attention(self.norm1(h), hidden))
        out: Tensor = h + self.dropout2(self.shrink(functional.gelu(self.expand(self.norm2(h)))))
        return out


@dataclass(frozen=True)
class Sizes:
    vocabulary: int
    pad: int
    length: int
    width: int
    heads: int
    layers: int
    dropout: float

    @classmethod
    def checked(
        cls,
        model: str,
        input_shape: Sequence[int],
        *,
        vocabulary: int,
        pad: int,
        width: int,
        heads: int,
        layers: int,
        dropout: float,
    ) -> Sizes:
        """Validated sizes of a transformer."""
        length = check_text(model, input_shape, vocabulary, pad)
        for field, value in (("width", width), ("heads", heads), ("layers", layers)):
            check_count(field, value)
        if width % heads:
            raise InputError(
                "heads", heads, f"does not divide width = {width}", "Choose a divisor of the width."
            )
        return cls(vocabulary, pad, length, width, heads, layers, check_rate(dropout))


class Transformer(TextModel):
    """Embedding, learnt positions, pre-norm blocks, a final norm."""

    table = "embedding.weight"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.pad = sizes.pad
        self.embedding = nn.Embedding(sizes.vocabulary, width)
        self.positions = nn.Parameter(torch.randn(sizes.length, width) / math.sqrt(width))
        self.blocks = nn.ModuleList(Block(width, sizes.heads, sizes.dropout) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=1 / math.sqrt(width))

    def states(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        h = embedded + self.positions[: embedded.shape[1]]
        for block in self.blocks:
            h = block(h, hidden)
        out: Tensor = self.norm(h)
        return out


class TransformerClassifier(Transformer):
    """Every token attends to every other; one linear layer on the mean over the tokens."""

    def __init__(self, sizes: Sizes, classes: int) -> None:
        super().__init__(sizes)
        self.output = nn.Linear(sizes.width, classes)

    def from_embeddings(self, embedded: Tensor, ids: Tensor) -> Tensor:
        mask = self.mask(ids)
        hidden = (~mask).unsqueeze(1).expand(-1, ids.shape[1], -1)
        weights = mask.to(embedded.dtype).unsqueeze(-1)
        mean = (self.states(embedded, hidden) * weights).sum(1) / weights.sum(1).clamp(min=1)
        scores: Tensor = self.output(mean)
        return scores


def transformer(
    input_shape: Sequence[int],
    classes: int,
    *,
    vocabulary: int,
    pad: int = 0,
    width: int = 64,
    heads: int = 2,
    layers: int = 2,
    dropout: float = 0.0,
) -> TransformerClassifier:
    """A small encoder that classifies texts of up to `input_shape[0]` tokens."""
    sizes = Sizes.checked(
        "transformer",
        input_shape,
        vocabulary=vocabulary,
        pad=pad,
        width=width,
        heads=heads,
        layers=layers,
        dropout=dropout,
    )
    return TransformerClassifier(sizes, classes)
