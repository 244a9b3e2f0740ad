"""From a dataset to clients in one call."""

from __future__ import annotations

from typing import Any

from fedveil.data.client_data import ArrayClients
from fedveil.data.dataset import Dataset
from fedveil.partition.registry import Kind, make_partition
from fedveil.streams import named_stream


def share(
    dataset: Dataset, clients: int | None = None, kind: Kind = "iid", *, seed: int = 0, **options: Any
) -> ArrayClients:
    """The dataset's training examples shared out among clients; `options` are those of `make_partition`.

    `clients` may be left out where the kind tells their number, as `"user"` does.
    """
    stream = named_stream(seed, "partition")
    parts = make_partition(kind, dataset.labels, clients, stream, users=dataset.train.users, **options).parts
    return ArrayClients(dataset.train.x, dataset.train.y, parts)
