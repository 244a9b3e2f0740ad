"""Split a dataset among clients in one call."""

from __future__ import annotations

from typing import Any

from fedveil.data.client_data import ArrayClients
from fedveil.data.dataset import Dataset, Examples
from fedveil.partition.registry import Kind, make_partition
from fedveil.streams import named_stream


def share(
    dataset: Dataset | Examples,
    clients: int | None = None,
    kind: Kind = "iid",
    *,
    seed: int = 0,
    **options: Any,
) -> ArrayClients:
    """Split examples among clients.

    Args:
        dataset: A dataset, whose training examples are used, or examples.
        clients: Number of clients; may be omitted where the kind determines it, as "user" does.
        kind: The kind of partition, as in `make_partition`.
        seed: The seed of the random draws.
        options: Further arguments of `make_partition`.

    Returns:
        The clients.
    """
    examples = dataset if isinstance(dataset, Examples) else dataset.train
    labels = dataset.y if isinstance(dataset, Examples) else dataset.labels
    stream = named_stream(seed, "partition")
    parts = make_partition(kind, labels, clients, stream, users=examples.users, **options).parts
    return ArrayClients(examples.x, examples.y, parts)
