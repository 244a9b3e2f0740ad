"""Parts of a model that are not trained: constants, so they are neither sent, nor noised, nor differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def freeze(model: nn.Module, frozen: Callable[[str], bool]) -> None:
    """Make constants (buffers) of the parameters whose names `frozen` picks, in place; their names stay."""
    for prefix, layer in model.named_modules():
        for short, leaf in list(layer.named_parameters(recurse=False)):
            if frozen(f"{prefix}.{short}" if prefix else short):
                delattr(layer, short)
                layer.register_buffer(short, leaf.detach().clone())
