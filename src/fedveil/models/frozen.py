"""Frozen parts of a model: buffers, which are neither sent, nor noised, nor differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def freeze(model: nn.Module, frozen: Callable[[str], bool]) -> None:
    """Turn the parameters whose names `frozen` accepts into buffers of the same names, in place."""
    for prefix, layer in model.named_modules():
        for short, leaf in list(layer.named_parameters(recurse=False)):
            if frozen(f"{prefix}.{short}" if prefix else short):
                delattr(layer, short)
                layer.register_buffer(short, leaf.detach().clone())
