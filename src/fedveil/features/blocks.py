"""Work on records in blocks, such that a record's result is a function of that record alone, down to the last bit.

Vectorised kernels may round the first record of a batch otherwise than the last one, and a short batch otherwise than
a long one. A record that is removed would then move the last digits of those behind it, and one record would change
more than its own contribution. So blocks have one size, the last one filled up with zeros, and a size is used only if
a look at made-up records shows that all places of a block compute alike.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from fedveil.lazy_torch import torch
from fedveil.streams import named_stream

if TYPE_CHECKING:
    from torch import Tensor


def in_blocks(compute: Callable[[Tensor], Tensor], records: Tensor, size: int) -> Tensor:
    """`compute(records)` `[n, ...]`, where `compute` treats records one by one but for the order of its arithmetic.

    Guarantees: records that are added, removed or changed leave the bits of the others' results alone
    (`test_a_removed_record_changes_no_bit_of_the_others_features`).
    """
    # One thread for each block: torch's own threads would wait for one another after every small operation.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        size = size if size > 1 and _alike(compute, records, size) else 1
        first = compute(_block(records, 0, size))
        out = first.new_empty(len(records), *first.shape[1:])

        def work(start: int) -> None:
            kept = out[start : start + size]
            kept.copy_(compute(_block(records, start, size))[: len(kept)])

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(0, len(records), size)))
    finally:
        torch.set_num_threads(threads)
    return out


def _block(records: Tensor, start: int, size: int) -> Tensor:
    """So many records, in memory of their own: where they lay must not matter either."""
    block = records.new_zeros(size, *records.shape[1:])
    part = records[start : start + size]
    block[: len(part)] = part
    return block


def _alike(compute: Callable[[Tensor], Tensor], like: Tensor, size: int) -> bool:
    """Whether made-up records have the same results, bit by bit, when each is moved on by one place."""
    drawn = named_stream(0, "made-up records").random((size, *like.shape[1:]))
    records = torch.from_numpy(drawn).to(like.dtype)
    return torch.equal(compute(records).roll(1, 0), compute(records.roll(1, 0)))
