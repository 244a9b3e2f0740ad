"""Scores of regression and survival models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedveil.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def r_squared(predicted: Tensor, y: Tensor) -> float | None:
    """The share of explained variance; None if the variance is zero."""
    y, predicted = y.double(), predicted.double()
    total = float((y - y.mean()).square().sum())
    return None if total == 0 else 1.0 - float((y - predicted).square().sum()) / total


def concordance(risk: Tensor, time: Tensor, event: Tensor, *, rows: int = 1024) -> float | None:
    """Harrell's concordance index: the share of pairs of known order that the risks order correctly; ties count half.

    The order of a pair is known if the earlier time is an event. None if there is no such pair.
    """
    risk, time = risk.double(), time.double()
    agreed, pairs = 0.0, 0
    for start in range(0, len(risk), rows):
        part = slice(start, start + rows)
        known = (time[part, None] < time[None, :]) & event[part, None]
        higher = risk[part, None] - risk[None, :]
        agreed += float(((higher > 0) & known).sum()) + 0.5 * float(((higher == 0) & known).sum())
        pairs += int(known.sum())
    return agreed / pairs if pairs else None


def root_mean_square(error: Tensor) -> float:
    return float(torch.sqrt(error.double().square().mean()))
