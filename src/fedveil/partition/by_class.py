"""Clients that hold few classes: given groups, a number of classes each, or label shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedveil.errors import InputError
from fedveil.partition.partition import (
    Partition,
    check_clients,
    check_positive_int,
    labels_array,
    partition_of,
    refuse_empty,
)

if TYPE_CHECKING:
    from torch import Tensor


def class_groups(y: Tensor, groups: Sequence[Sequence[int]], *, allow_empty: bool = False) -> Partition:
    """Client k holds every example of the classes in `groups[k]`; the groups share no class.

    FedLAP-DP's setting is `[(5, 6), (1, 2), (0, 8), (9, 3), (4, 7)]`.
    """
    labels = labels_array(y)
    listed = isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups)
    if not listed or not all(type(label) is int for group in groups for label in group):
        raise InputError("groups", groups, "not groups of classes", "Give a list of lists of classes.")
    flat = [label for group in groups for label in group]
    if len(flat) != len(set(flat)):
        twice = next(label for label in flat if flat.count(label) > 1)
        raise InputError("groups", groups, f"class {twice} is listed twice", "List each class once.")
    if missing := sorted(set(np.unique(labels).tolist()) - set(flat)):
        raise InputError(
            "groups", groups, f"no client would hold class {missing[0]}", "Put every class in one group."
        )
    parts = [np.flatnonzero(np.isin(labels, np.asarray(group, dtype=np.int64))) for group in groups]
    remedy = "Give each group a class that has examples"
    return refuse_empty(partition_of(parts), allow_empty=allow_empty, remedy=remedy)


def classes_per_client(
    y: Tensor, clients: int, n: int, rng: np.random.Generator, *, allow_empty: bool = False
) -> Partition:
    """Every client gets `n` different classes; the examples of a class are split equally among its clients.

    Classes are assigned at random such that the numbers of clients of any two classes differ by at most one;
    when `clients * n` is the number of classes, no class is shared.
    """
    labels = labels_array(y)
    check_clients(clients, len(labels), allow_empty=allow_empty)
    classes = np.unique(labels)
    if check_positive_int("classes_per_client", n) > len(classes):
        raise InputError(
            "classes_per_client", n, f"there are {len(classes)} classes", f"Use at most {len(classes)}."
        )
    if clients * n < len(classes):
        raise InputError(
            "classes_per_client",
            n,
            f"{clients} clients with {n} each leave some of the {len(classes)} classes unassigned",
            f"Use at least {-(-len(classes) // clients)}.",
        )
    holders: list[list[int]] = [[] for _ in classes]
    for client in range(clients):
        held = np.array([len(holder) for holder in holders])
        # The classes with the fewest clients, ties at random.
        for which in np.lexsort((rng.random(len(classes)), held))[:n]:
            holders[int(which)].append(client)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label, holder in zip(classes, holders, strict=True):
        members = rng.permutation(np.flatnonzero(labels == label))
        for client, piece in zip(holder, np.array_split(members, len(holder)), strict=True):
            parts[client].append(piece)
    return refuse_empty(
        partition_of([np.concatenate(part) for part in parts]),
        allow_empty=allow_empty,
        remedy="Use fewer clients or more classes per client",
    )


def shards(
    y: Tensor, clients: int, shards_per_client: int, rng: np.random.Generator, *, allow_empty: bool = False
) -> Partition:
    """Sort by label, cut into `clients * shards_per_client` equal shards, assign them to clients at random.

    Shard sizes differ by at most one, and a shard spans neighbouring labels only (McMahan et al., 2017;
    FedCEO uses 2 shards per client).
    """
    labels = labels_array(y)
    check_clients(clients, len(labels), allow_empty=allow_empty)
    number = clients * check_positive_int("shards_per_client", shards_per_client)
    if number > len(labels) and not allow_empty:
        raise InputError(
            "shards_per_client",
            shards_per_client,
            f"{number} shards of {len(labels)} examples, so some would be empty",
            f"Use at most {len(labels) // clients}.",
        )
    shuffled = rng.permutation(len(labels))
    pieces = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], number)
    dealt = rng.permutation(number).reshape(clients, shards_per_client)
    return partition_of([np.concatenate([pieces[shard] for shard in hand]) for hand in dealt])
