"""The last layer of a decoder of images."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PixelRange(nn.Module):
    """Maps numbers to the pixel range and reshapes them to images."""

    def __init__(self, shape: tuple[int, ...], box: tuple[Tensor, Tensor] | None) -> None:
        super().__init__()
        self.shape = shape
        self.box = box

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(*x.shape[:-1], *self.shape)
        if self.box is None:
            return x
        low, high = self.box
        return low + (high - low) * torch.sigmoid(x)
