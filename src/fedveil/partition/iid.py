"""Every client holds a random sample of the same size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedveil.partition.partition import Partition, check_clients, labels_array, partition_of

if TYPE_CHECKING:
    from torch import Tensor


def iid(y: Tensor, clients: int, rng: np.random.Generator, *, allow_empty: bool = False) -> Partition:
    """Shuffle and cut: sizes differ by at most one, and every example is used once."""
    n = len(labels_array(y))
    check_clients(clients, n, allow_empty=allow_empty)
    return partition_of(np.array_split(rng.permutation(n), clients))
