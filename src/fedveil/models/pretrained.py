"""Pretrained encoders and language models from any local transformers folder.

The default is the MiniLM package. Dropout is off by default, and attention is the plain implementation, so that outputs
are reproducible and gradients can be differentiated again. Parts that are not trained are buffers: neither sent nor
noised. A folder is refused if weights are missing, or if its model, given embeddings and fedveil's masks, does not
give the same outputs as the library's model given tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedveil.data.transformers_folder import DEFAULT, find_folder, folder_config, transformers
from fedveil.errors import InputError
from fedveil.models.causal_lm import EVALUATED
from fedveil.models.frozen import freeze
from fedveil.models.shapes import check_next_tokens, check_rate, check_text
from fedveil.text_model import TextModel

_LAYER = re.compile(r"\.(?:layer|layers|h|blocks)\.(\d+)\.")


class PretrainedClassifier(TextModel):
    """An encoder, a pooling of its states, one linear layer."""

    stacks: ClassVar[bool] = False  # the library's code does not support vmap

    def __init__(
        self, encoder: Any, table: str, pad: int, classes: int, pooling: str, dropout: float
    ) -> None:
        super().__init__()
        self.table = f"encoder.{table}"
        self.pad = pad
        self.pooling = pooling
        self.largest_batch = 64
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.output = nn.Linear(encoder.config.hidden_size, classes)

    def states(self, embedded: Tensor, ids: Tensor) -> Tensor:
        """The encoder's last states `[B, L, H]`."""
        mask = _additive(self.mask(ids), embedded)
        found: Tensor = self.encoder(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
        return found

    def from_embeddings(self, embedded: Tensor, ids: Tensor) -> Tensor:
        mask = self.mask(ids)
        states = self.states(embedded, ids)
        if self.pooling == "first":
            summary = states[:, 0]
        else:
            weights = mask.to(states.dtype).unsqueeze(-1)
            summary = (states * weights).sum(1) / weights.sum(1).clamp(min=1)
        scores: Tensor = self.output(self.dropout(summary))
        return scores


class PretrainedLM(TextModel):
    """A causal language model of the library."""

    stacks: ClassVar[bool] = False

    def __init__(self, model: Any, table: str, pad: int, length: int) -> None:
        super().__init__()
        self.table = f"model.{table}"
        self.pad = pad
        self.largest_batch = max(1, EVALUATED // (length * model.config.vocab_size))
        self.model = model

    def from_embeddings(self, embedded: Tensor, ids: Tensor) -> Tensor:
        # No token attends to a later one, so padding on the right needs no mask.
        scores: Tensor = self.model(inputs_embeds=embedded, use_cache=False).logits
        return scores


def _additive(attended: Tensor, like: Tensor) -> Tensor:
    """The mask `attended [B, L]` as a term that is added to attention scores, `[B, 1, L, L]`."""
    lowest = torch.finfo(like.dtype).min
    added = torch.zeros(attended.shape, dtype=like.dtype, device=like.device).masked_fill(~attended, lowest)
    return added.unsqueeze(1).expand(-1, attended.shape[-1], -1).unsqueeze(1)


def bert(
    input_shape: Sequence[int],
    classes: int,
    *,
    vocabulary: int,
    pad: int = 0,
    path: str = DEFAULT,
    trained_layers: int | None = None,
    frozen_embedding: bool = False,
    pooling: Literal["mean", "first"] = "mean",
    dropout: float = 0.0,
) -> PretrainedClassifier:
    """The encoder in the folder `path` with a new linear layer on the mean (or first) state.

    `trained_layers` is the number of last layers that are trained besides the new one; None trains all.
    `frozen_embedding` keeps the token embeddings constant.
    """
    length = check_text("bert", input_shape, vocabulary, pad)
    check_rate(dropout)
    if pooling not in ("mean", "first"):
        raise InputError("pooling", pooling, "is not a pooling", 'Use "mean" or "first".')
    folder = find_folder(path, "weights")
    _check_limits(folder, path, length, vocabulary)
    encoder, table = _load(folder, "AutoModel", dropout)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # its output is not used
    model = PretrainedClassifier(encoder, table, pad, classes, pooling, dropout)
    _check_reading(
        model, model.states, lambda ids: encoder(input_ids=ids).last_hidden_state, path, length, vocabulary
    )
    _freeze_below(model, trained_layers, frozen_embedding, ("output.",))
    return model


def gpt(
    input_shape: Sequence[int],
    classes: int,
    *,
    vocabulary: int,
    pad: int = 0,
    path: str,
    trained_layers: int | None = None,
    frozen_embedding: bool = False,
    dropout: float = 0.0,
) -> PretrainedLM:
    """The causal language model in the folder `path`; options as for `bert`."""
    length = check_text("gpt", input_shape, vocabulary, pad)
    check_next_tokens(classes, vocabulary)
    check_rate(dropout)
    folder = find_folder(path, "weights")
    _check_limits(folder, path, length, vocabulary)
    library_model, table = _load(folder, "AutoModelForCausalLM", dropout)
    model = PretrainedLM(library_model, table, pad, length)
    _check_reading(
        model,
        model.from_embeddings,
        lambda ids: library_model(input_ids=ids).logits,
        path,
        length,
        vocabulary,
    )
    _freeze_below(model, trained_layers, frozen_embedding, ("model.lm_head.",))
    return model


def _check_limits(folder: Path, path: str, length: int, vocabulary: int) -> None:
    content = folder_config(folder)
    limit = content.get("max_position_embeddings", content.get("n_positions"))
    if isinstance(limit, int) and length > limit:
        raise InputError(
            "task.text.length",
            length,
            f"the model in {path} reads {limit} tokens at most",
            f"Use 1 to {limit}.",
        )
    size = content.get("vocab_size")
    if isinstance(size, int) and vocabulary > size:
        raise InputError(
            "task.text.vocabulary",
            vocabulary,
            f"the model in {path} knows {size} tokens",
            "Use the tokenizer of the same folder.",
        )


def _check_reading(
    model: TextModel,
    ours: Callable[[Tensor, Tensor], Tensor],
    library: Callable[[Tensor], Tensor],
    path: str,
    length: int,
    vocabulary: int,
) -> None:
    """Refuse a model whose outputs for a batch of a long and a padded text differ from the library's for each alone."""
    ids = torch.arange(2 * length).remainder(max(1, vocabulary - 1)).reshape(2, length)
    ids += ids >= model.pad  # no token is padding
    ids[1, (length + 1) // 2 :] = model.pad
    read = model.mask(ids)
    model.eval()  # where dropout is asked for, a task draws it
    try:
        with torch.no_grad():
            found = ours(model.embed(ids), ids)[read]
            wanted = torch.cat(
                [library(text[kept].unsqueeze(0))[0] for text, kept in zip(ids, read, strict=True)]
            )
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise InputError(
            "path",
            path,
            f"its model fails on {length} tokens given as embeddings ({_reason(error)})",
            "Use a folder like BERT's or GPT-2's, or a smaller task.text.length.",
        ) from error
    if not float((found - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max()):
        raise InputError(
            "path",
            path,
            f"given {length} tokens as embeddings, its outputs differ from those of the library's model",
            "Use an encoder for model bert, a causal language model for gpt, or a smaller task.text.length.",
        )


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _load(folder: Path, kind: str, dropout: float) -> tuple[Any, str]:
    """The library's model in float32, and the name of its token embedding table."""
    library = transformers()
    try:
        model, report = getattr(library, kind).from_pretrained(
            str(folder),
            local_files_only=True,
            use_safetensors=True,
            attn_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise InputError(
            "path",
            str(folder),
            f"cannot be loaded ({_reason(error)})",
            "Save the model again with save_pretrained.",
        ) from error
    other = sorted(entry for entry in report["mismatched_keys"] if "pooler." not in entry[0])
    if other:
        name, held, wanted = other[0]
        raise InputError(
            "path",
            str(folder),
            f"its weights do not match its config.json: {name} is {list(held)} in the file, {list(wanted)} in the "
            "configuration",
            "Save the model again with save_pretrained, which writes both.",
        )
    missing = sorted(name for name in report["missing_keys"] if "pooler." not in name)
    if missing:  # the library would initialise them at random
        raise InputError(
            "path",
            str(folder),
            f"{len(missing)} of the model's weights are missing, among them {missing[0]}",
            "Save the whole model with save_pretrained; gpt needs a language model with its output layer.",
        )
    model.requires_grad_(True).eval()
    for layer in list(model.modules()):
        for name, child in list(layer.named_children()):
            if isinstance(child, nn.Dropout):
                setattr(layer, name, nn.Dropout(dropout) if dropout else nn.Identity())
    weight = model.get_input_embeddings().weight
    (table,) = (name for name, leaf in model.named_parameters() if leaf is weight)
    return model, table


def _freeze_below(
    model: TextModel, trained_layers: int | None, frozen_embedding: bool, head: tuple[str, ...]
) -> None:
    names = [name for name, _ in model.named_parameters()]
    numbers = {name: int(found[1]) for name in names if (found := _LAYER.search(name))}
    count = max(numbers.values(), default=-1) + 1
    if trained_layers is not None and (
        isinstance(trained_layers, bool)
        or not isinstance(trained_layers, int)
        or not 0 <= trained_layers <= count
    ):
        raise InputError(
            "trained_layers",
            trained_layers,
            f"the model has {count} layers",
            f"Use 0 to {count}, or leave it out.",
        )

    def frozen(name: str) -> bool:
        if name == model.table:
            return frozen_embedding or trained_layers is not None
        if trained_layers is None or name.startswith(head):
            return False
        return numbers.get(name, -1) < count - trained_layers

    freeze(model, frozen)
    if not any(True for _ in model.parameters()):
        raise InputError(
            "trained_layers", trained_layers, "leaves nothing to train", "Train at least one layer."
        )
