"""Splitting of a client's examples into the batches of one epoch."""

from __future__ import annotations

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
