"""Splitting of a client's examples into the batches of one epoch."""

from __future__ import annotations

import functools
from typing import Literal

LastBatch = Literal["keep", "drop", "merge"]


def batch_sizes(examples: int, batch_size: int, last_batch: LastBatch) -> list[int]:
    """The sizes of the batches of one epoch, in order; empty for a client without examples.

    A remainder gets the same step size as a full batch, so the gradient noise of two or three examples can undo what
    the epoch has learnt. "merge" therefore adds a remainder of less than half a batch to the previous batch; "keep"
    trains on it as a batch, and "drop" leaves it out of this epoch. A client with less than one batch trains on all.
    """
    whole, rest = divmod(examples, batch_size)
    if whole == 0 or rest == 0:
        return [batch_size] * whole + [rest] * (rest > 0)
    if last_batch == "drop":
        return [batch_size] * whole
    if last_batch == "merge" and 2 * rest < batch_size:
        return [*[batch_size] * (whole - 1), batch_size + rest]
    return [*[batch_size] * whole, rest]


def batch_of_epoch(examples: int, batch_size: int, last_batch: LastBatch, index: int) -> tuple[int, int]:
    """Where batch `index` of an epoch starts, and its size; 0 if there is no such batch."""
    sizes = _sizes(examples, batch_size, last_batch)
    return index * batch_size, sizes[index] if index < len(sizes) else 0


def largest_batch(batch_size: int, last_batch: LastBatch) -> int:
    """The most examples that a batch may have, whatever a client's number of examples."""
    return batch_size + (batch_size - 1) // 2 if last_batch == "merge" else batch_size


@functools.lru_cache(maxsize=1024)
def _sizes(examples: int, batch_size: int, last_batch: LastBatch) -> tuple[int, ...]:
    return tuple(batch_sizes(examples, batch_size, last_batch))
