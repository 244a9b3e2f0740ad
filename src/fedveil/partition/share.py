"""From a dataset to clients in one call."""

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
    """The dataset's training examples, or these examples, shared out among clients.

    `clients` may be left out where the kind tells their number, as `"user"` does; `options` are those of
    `make_partition`.
    """
    examples = dataset if isinstance(dataset, Examples) else dataset.train
    labels = dataset.y if isinstance(dataset, Examples) else dataset.labels
    stream = named_stream(seed, "partition")
    parts = make_partition(kind, labels, clients, stream, users=examples.users, **options).parts
    return ArrayClients(examples.x, examples.y, parts)
