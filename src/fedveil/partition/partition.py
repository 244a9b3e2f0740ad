"""A partition: which client holds which examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedveil.errors import InputError
from fedveil.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Partition:
    """`parts[k]` lists the examples of client k in ascending order; no example is listed twice."""

    parts: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise InputError("clients", 0, "the partition has no client", "Use at least one client.")
        together = torch.cat(self.parts)
        if len(together) != len(torch.unique(together)):
            raise InputError("parts", len(self.parts), "an example is listed twice", "List each once.")

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(part) for part in self.parts)

    def counts(self, y: Tensor, num_classes: int) -> Tensor:
        """How many examples of each class each client holds, `[clients, classes]`."""
        return torch.stack([torch.bincount(y[part], minlength=num_classes) for part in self.parts])


def partition_of(parts: Sequence[np.ndarray]) -> Partition:
    """A partition from arrays of positions, which are sorted here."""
    return Partition(tuple(torch.from_numpy(np.sort(part).astype(np.int64)) for part in parts))


def labels_array(y: Tensor) -> np.ndarray:
    """The labels as an array; refuses empty labels and labels that are not whole numbers."""
    if y.dim() != 1 or y.is_floating_point() or y.dtype == torch.bool:
        raise InputError(
            "y", [str(y.dtype), list(y.shape)], "are not integer labels", "Give int64 labels [n]."
        )
    if len(y) == 0:
        raise InputError("y", [], "there are no examples to split", "Give at least one example.")
    return y.numpy()


def check_clients(clients: object, examples: int, *, allow_empty: bool = False) -> int:
    """The number of clients, checked: with so many examples none need be empty."""
    if isinstance(clients, bool) or not isinstance(clients, int) or clients < 1:
        raise InputError("clients", clients, "is not a number of clients", "Use a whole number from 1 on.")
    if clients > examples and not allow_empty:
        raise InputError(
            "clients",
            clients,
            f"more clients than the {examples} examples, so some would be empty",
            f"Use at most {examples} clients, or set allow_empty.",
        )
    return clients


def check_positive_int(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(field, value, "is not a positive whole number", "Use a whole number from 1 on.")
    return value


def refuse_empty(partition: Partition, *, allow_empty: bool, remedy: str) -> Partition:
    """The partition; refuses one with an empty client unless `allow_empty`."""
    if not allow_empty and 0 in partition.sizes:
        raise InputError(
            "clients",
            len(partition),
            f"client {partition.sizes.index(0)} would have no example",
            f"{remedy}, or set allow_empty.",
        )
    return partition
