"""The loss of a language model: each token is predicted from those before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedveil.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # a target without weight: padding, or the end of a text


def next_token_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of each text `[B]`: the mean over its targets `y [B, L]` that are not `IGNORED`.

    A text without any target counts as 0.
    """
    each = token_losses(outputs, y)
    counted = (y != IGNORED).to(each.dtype)
    return each.sum(-1) / counted.sum(-1).clamp(min=1)


def token_losses(outputs: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of each target `[B, L]`, 0 where it is ignored."""
    wanted = y.clamp(min=0).unsqueeze(-1)
    logged = torch.log_softmax(outputs, dim=-1).gather(-1, wanted).squeeze(-1)
    return torch.where(y == IGNORED, torch.zeros_like(logged), -logged)
