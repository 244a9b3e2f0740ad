"""Dropout whose masks come from the streams of clients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class StreamDropout(nn.Dropout):
    """Dropout whose masks are handed in, so that they come from the client's own stream."""

    masks: Sequence[Tensor] | None = None
    index: int = 0

    def forward(self, x: Tensor) -> Tensor:
        return x if self.masks is None else x * self.masks[self.index]


def own_dropouts(module: nn.Module) -> list[StreamDropout]:
    """Every dropout layer replaced in place by one that takes its masks from us, in order of definition."""
    found: list[StreamDropout] = []
    for parent in module.modules():
        for name, child in parent.named_children():
            if isinstance(child, (nn.modules.dropout._DropoutNd)):
                layer = StreamDropout(child.p)
                layer.index = len(found)
                found.append(layer)
                setattr(parent, name, layer)
    return found
