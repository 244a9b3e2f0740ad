"""Dropout whose masks are drawn from the clients' random streams."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class StreamDropout(nn.Dropout):
    """Dropout whose masks are passed in, so that each client's masks come from its own stream."""

    masks: Sequence[Tensor] | None = None
    index: int = 0

    def forward(self, x: Tensor) -> Tensor:
        return x if self.masks is None else x * self.masks[self.index]


def own_dropouts(module: nn.Module) -> list[StreamDropout]:
    """Replace every dropout layer, in place, by a `StreamDropout`; returns them in order of definition."""
    found: list[StreamDropout] = []
    for parent in module.modules():
        for name, child in parent.named_children():
            if isinstance(child, (nn.modules.dropout._DropoutNd)):
                layer = StreamDropout(child.p)
                layer.index = len(found)
                found.append(layer)
                setattr(parent, name, layer)
    return found
