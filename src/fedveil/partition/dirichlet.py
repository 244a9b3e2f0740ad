"""Clients whose shares of each class are drawn from a Dirichlet distribution (Hsu, Qi and Brown, 2019)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fedveil.errors import InputError
from fedveil.partition.partition import Partition, check_clients, labels_array, partition_of

if TYPE_CHECKING:
    from torch import Tensor

_TRIES = 1000


def dirichlet(
    y: Tensor,
    clients: int,
    alpha: float,
    rng: np.random.Generator,
    min_size: int = 1,
    *,
    allow_empty: bool = False,
) -> Partition:
    """Split each class by proportions from Dirichlet(alpha, ..., alpha) over the clients.

    Every example is used once; a client's count of a class is within one of its proportion times the class's
    size. The proportions are drawn again, up to 1000 times, until every client holds `min_size` examples
    (0 with `allow_empty`); if no draw succeeds, the error suggests other settings.
    """
    labels = labels_array(y)
    check_clients(clients, len(labels), allow_empty=allow_empty)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
        raise InputError(
            "alpha", alpha, "is not a concentration", "Use a number above 0; smaller is more uneven."
        )
    if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 0:
        raise InputError("min_size", min_size, "is not a size", "Use a whole number from 0 on.")
    if min_size < 1 and not allow_empty:
        raise InputError("min_size", min_size, "would allow empty clients", "Use 1 or set allow_empty.")
    needed = 0 if allow_empty else min_size
    if needed * clients > len(labels):
        raise InputError(
            "min_size",
            min_size,
            f"{clients} clients would need {needed * clients} of {len(labels)} examples",
            f"Use at most {len(labels) // clients}.",
        )
    classes, sizes = np.unique(labels, return_counts=True)
    for _ in range(_TRIES):
        shares = rng.dirichlet(np.full(clients, float(alpha)), size=len(classes))
        cuts = np.rint(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
        cuts[:, -1] = sizes
        counts = np.diff(cuts, axis=1, prepend=0)
        if counts.sum(axis=0).min() >= needed:
            break
    else:
        raise InputError(
            "alpha",
            alpha,
            f"in {_TRIES} draws some of the {clients} clients always had fewer than {needed} examples",
            "Use a larger alpha, fewer clients or a smaller min_size, or set allow_empty.",
        )
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label, row in zip(classes, cuts, strict=True):
        members = rng.permutation(np.flatnonzero(labels == label))
        for part, piece in zip(parts, np.split(members, row[:-1]), strict=True):
            part.append(piece)
    return partition_of([np.concatenate(part) for part in parts])
