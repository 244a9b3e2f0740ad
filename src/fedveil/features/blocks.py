"""Processing of records in blocks, such that a record's result depends only on that record, down to the last bit.

Vectorised kernels may round records differently by position in a batch and by size of the batch. Removing a record
could then change the last digits of those after it, so that one record would affect more than its own contribution. So
blocks have equal size, the last one padded with zeros, and a size is used only if a test with artificial records shows
that all positions of a block give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from fedveil.lazy_torch import torch
from fedveil.streams import named_stream

if TYPE_CHECKING:
    from torch import Tensor


def in_blocks(
    compute: Callable[[Tensor], Tensor],
    records: Tensor,
    size: int,
    on_progress: Callable[[int], None] = lambda _done: None,
) -> Tensor:
    """`compute(records)` `[n, ...]`, for a `compute` that is independent between records except for rounding.

    `on_progress` is called with the number of records that are done.

    Guarantees: adding, removing or changing a record does not affect the bits of the others' results
    (`test_a_removed_record_changes_no_bit_of_the_others_features`).
    """
    # One thread per block: torch's own threads would synchronise after every small operation.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        size = size if size > 1 and _alike(compute, records, size) else 1
        first = compute(_block(records, 0, size))
        out = first.new_empty(len(records), *first.shape[1:])

        def work(start: int) -> None:
            kept = out[start : start + size]
            kept.copy_(compute(_block(records, start, size))[: len(kept)])

        starts = range(0, len(records), size)
        with ThreadPoolExecutor(threads) as pool:
            for start, _ in zip(starts, pool.map(work, starts), strict=True):
                on_progress(min(start + size, len(records)))
    finally:
        torch.set_num_threads(threads)
    return out


def _block(records: Tensor, start: int, size: int) -> Tensor:
    """A block of records in separate memory, so that results do not depend on alignment."""
    block = records.new_zeros(size, *records.shape[1:])
    part = records[start : start + size]
    block[: len(part)] = part
    return block


def _alike(compute: Callable[[Tensor], Tensor], like: Tensor, size: int) -> bool:
    """Whether artificial records have the same results, bit by bit, when they are shifted by one position."""
    drawn = named_stream(0, "made-up records").random((size, *like.shape[1:]))
    records = torch.from_numpy(drawn).to(like.dtype)
    return torch.equal(compute(records).roll(1, 0), compute(records.roll(1, 0)))
