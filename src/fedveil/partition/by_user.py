"""One client per person whose data it is, or groups of persons."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from fedveil.errors import InputError
from fedveil.partition.partition import Partition, check_clients, labels_array, partition_of

if TYPE_CHECKING:
    from torch import Tensor


def by_user(users: Tensor, clients: int | None = None) -> Partition:
    """One client per user, in the order of their ids; or whole users grouped into `clients` clients.

    Grouping assigns users in descending order of size, each to the client with the fewest examples so far;
    no user is split over two clients.
    """
    ids = labels_array(users)
    order = np.argsort(ids, kind="stable")
    _, starts = np.unique(ids[order], return_index=True)
    pieces = np.split(order, starts[1:])
    if clients is None:
        return partition_of(pieces)
    check_clients(clients, len(ids))
    if clients > len(pieces):
        raise InputError(
            "clients", clients, f"there are {len(pieces)} users", f"Use at most {len(pieces)} clients."
        )
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    fewest = [(0, client) for client in range(clients)]
    for piece in sorted(pieces, key=len, reverse=True):
        size, client = heapq.heappop(fewest)
        parts[client].append(piece)
        heapq.heappush(fewest, (size + len(piece), client))
    return partition_of([np.concatenate(part) for part in parts])
