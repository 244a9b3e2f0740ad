"""Partitions by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

import numpy as np

from fedveil.errors import InputError
from fedveil.partition.by_class import class_groups, classes_per_client, shards
from fedveil.partition.by_user import by_user
from fedveil.partition.dirichlet import dirichlet
from fedveil.partition.iid import iid
from fedveil.partition.partition import Partition

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["iid", "dirichlet", "classes", "shards", "user"]
Number = TypeVar("Number", int, float)
KINDS: tuple[str, ...] = get_args(Kind)

_USED_BY = {
    "alpha": "dirichlet",
    "min_size": "dirichlet",
    "classes_per_client": "classes",
    "groups": "classes",
    "shards_per_client": "shards",
    "users": "user",
}


def make_partition(
    kind: Kind,
    y: Tensor,
    clients: int | None,
    rng: np.random.Generator,
    *,
    alpha: float | None = None,
    classes_per_client: int | None = None,
    shards_per_client: int | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    users: Tensor | None = None,
    min_size: int | None = None,
    allow_empty: bool = False,
) -> Partition:
    """Split examples among clients.

    Args:
        kind: The kind of partition: a value of `Kind`.
        y: The labels.
        clients: Number of clients; None for "user" (one per user) and for "classes" with groups (one per group).
        rng: The random generator.
        alpha: For "dirichlet": small values give clients few classes.
        classes_per_client: For kinds by class: number of classes of each client.
        shards_per_client: For "shards": number of shards of each client.
        groups: For "classes": the classes of each group.
        users: The user of each example; may accompany any kind, since it describes the data.
        min_size: For "dirichlet": draw again until every client has so many examples.
        allow_empty: Accept clients without examples.

    Returns:
        The rows of each client.

    Raises:
        InputError: The kind lacks a setting that it needs, or a setting does not apply to it.
    """
    if kind not in KINDS:
        raise InputError("kind", kind, "no such partition", f"Use one of: {', '.join(KINDS)}.")
    given = {
        "alpha": alpha,
        "min_size": min_size,
        "classes_per_client": classes_per_client,
        "groups": groups,
        "shards_per_client": shards_per_client,
    }
    for field, value in given.items():
        if value is not None and _USED_BY[field] != kind:
            raise InputError(
                field, value, f"does not apply to a {kind} partition", f'It belongs to "{_USED_BY[field]}".'
            )
    if kind == "user":
        if users is None:
            raise InputError("kind", kind, "the data has no user ids", "Use another kind of partition.")
        if len(users) != len(y):
            raise InputError("users", len(users), f"there are {len(y)} labels", "Give one id per example.")
        return by_user(users, clients)
    if kind == "classes" and groups is not None:
        return _grouped(y, clients, groups, classes_per_client, allow_empty)
    if clients is None:
        raise InputError("clients", None, f"is required by a {kind} partition", "Give the number of clients.")
    if kind == "iid":
        return iid(y, clients, rng, allow_empty=allow_empty)
    if kind == "dirichlet":
        size = (0 if allow_empty else 1) if min_size is None else min_size
        return dirichlet(y, clients, _needed("alpha", alpha, kind), rng, size, allow_empty=allow_empty)
    if kind == "shards":
        number = _needed("shards_per_client", shards_per_client, kind)
        return shards(y, clients, number, rng, allow_empty=allow_empty)
    return _dealt(y, clients, _needed("classes_per_client", classes_per_client, kind), rng, allow_empty)


def _needed(field: str, value: Number | None, kind: str) -> Number:
    if value is None:
        raise InputError(field, None, f"is required by a {kind} partition", f"Give {field}.")
    return value


def _dealt(y: Tensor, clients: int, n: int, rng: np.random.Generator, allow_empty: bool) -> Partition:
    return classes_per_client(y, clients, n, rng, allow_empty=allow_empty)


def _grouped(
    y: Tensor,
    clients: int | None,
    groups: Sequence[Sequence[int]],
    number: int | None,
    allow_empty: bool,
) -> Partition:
    partition = class_groups(y, groups, allow_empty=allow_empty)
    if clients is not None and clients != len(partition):
        raise InputError(
            "clients", clients, f"does not match the {len(partition)} groups", "Give one group per client."
        )
    if number is not None and any(len(group) != number for group in groups):
        raise InputError(
            "classes_per_client",
            number,
            "does not match the sizes of the groups",
            "Give only one of the two.",
        )
    return partition
