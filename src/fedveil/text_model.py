"""The base class of models that read texts.

Tokens are ids: `x` is `[K, B, L]` int64 (for one model `[B, L]`), padded on the right with the model's `pad`. No mask
is passed: a model computes it from the ids, `ids != pad`. The *input space* of a text, where perturbations and attacks
operate, is that of its token embeddings, `[..., L, E]`: rows of the embedding table, before positions and norms are
added. Values at padding positions never change an output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from operator import attrgetter
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional


class TextModel(nn.Module, ABC):
    """A network of token ids: `forward(ids) == from_embeddings(embed(ids), ids)`.

    `table` names the parameter or buffer `[V, E]` with the token embeddings; `pad` is the id of padding. A model
    that `torch.func.vmap` cannot map over clients sets `stacks = False` and is run client by client. At most
    `largest_batch` texts are evaluated at a time.
    """

    stacks: ClassVar[bool] = True
    table: str
    pad: int
    largest_batch: int = 256

    def mask(self, ids: Tensor) -> Tensor:
        """True on tokens, False on padding, `[B, L]`."""
        return ids != self.pad

    def embedding_table(self) -> Tensor:
        """The embeddings of all tokens, `[V, E]`."""
        table: Tensor = attrgetter(self.table)(self)
        return table

    def embed(self, ids: Tensor) -> Tensor:
        """The embeddings `[B, L, E]` of these tokens."""
        return functional.embedding(ids, self.embedding_table())

    @abstractmethod
    def from_embeddings(self, embedded: Tensor, ids: Tensor) -> Tensor:
        """Scores from embeddings `[B, L, E]`; `ids` only gives the padding.

        Scores are `[B, classes]`; for a language model `[B, L, V]`, the scores of each next token.
        """

    def forward(self, ids: Tensor, offset: Tensor | None = None, embedded: Tensor | None = None) -> Tensor:
        """Scores of these texts; `offset` is added to their embeddings, `embedded` replaces them."""
        if embedded is None:
            embedded = self.embed(ids)
        if offset is not None:
            embedded = embedded + offset
        return self.from_embeddings(embedded, ids)
