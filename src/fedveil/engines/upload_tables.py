"""Shared tables into which workers write their uploads, for the simulator to read.

Trained parameters that a method uploads unchanged need not be copied: once an exchange has shown which parameters these
are, training gets the rows of the tables as its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedveil.engines.shared_memory import Leaf, SharedMemory, layout, require_room
from fedveil.lazy_torch import torch
from fedveil.tree import Params, own_memory

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Expected:
    """The tables of an earlier exchange of this kind, and which of them had which trained parameter unchanged."""

    leaves: list[Leaf]
    trained: dict[str, str]

    def for_rows(self, total: int) -> Expected:
        """The same tables for another number of clients."""
        kinds = {leaf.name: torch.empty(0, *leaf.shape, dtype=leaf.torch_dtype) for leaf in self.leaves}
        return Expected(layout(kinds, rows=total), self.trained)

    def to_json(self) -> dict[str, Any]:
        return {"leaves": [leaf.to_json() for leaf in self.leaves], "trained": self.trained}

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> Expected:
        return cls([Leaf.from_json(leaf) for leaf in item["leaves"]], dict(item["trained"]))


class UploadTables:
    """Receives the uploads of successive chunks of clients."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._given: Expected | None = None
        self._expected: Expected | None = None  # the expected tables, if there is room for them
        self._tables: dict[str, Tensor] = {}
        self._to_lend: dict[str, Tensor] = {}
        self._rows: slice | Tensor = slice(0, 0)
        self._lent: Params | None = None

    def open(self, rows: Sequence[int], expected: Expected | None) -> None:
        """Select the rows to be written next, probably of the expected tables."""
        first, last = rows[0], rows[-1]
        together = list(rows) == list(range(first, last + 1))
        self._rows = slice(first, last + 1) if together else torch.tensor(rows)
        self._lent = None
        if expected is not self._given:
            self._expect(expected)

    def _expect(self, expected: Expected | None) -> None:
        self._given = expected
        self._expected = expected if expected is not None and self._memory.fits(expected.leaves) else None
        leaves = {} if self._expected is None else {leaf.name: leaf for leaf in self._expected.leaves}
        trained = {} if self._expected is None else self._expected.trained
        self._tables = {name: self._memory.view(leaf) for name, leaf in leaves.items()}
        self._to_lend = {
            parameter: self._tables[name]
            for parameter, name in trained.items()
            if leaves[name].rows_are_aligned
        }

    def lend(self, like: Params, k: int) -> Params:
        """Uninitialised parameters of k clients, in the rows of the expected tables if possible. Lent only once."""
        memory = own_memory(like, k)
        if self._lent is not None:
            return memory
        self._lent = memory
        for name, own in memory.items():
            if name in self._to_lend and isinstance(self._rows, slice):
                rows = self._to_lend[name][self._rows]
                if rows.shape == own.shape and rows.dtype == own.dtype and rows.device == own.device:
                    memory[name] = rows
        return memory

    def fit(self, tensors: Mapping[str, Tensor], total: int) -> bool:
        """Whether tables of `total` such rows fit."""
        return self._memory.fits(layout(tensors, rows=total))

    def put(self, tensors: Mapping[str, Tensor], total: int) -> Expected | None:
        """Write the tensors into tables of `total` rows; returns the tables, or None if the tensors were unexpected.

        In that case lent memory may have been overwritten: the exchange must be repeated without expectation.
        """
        leaves = layout(tensors, rows=total)
        if self._expected is not None and leaves != self._expected.leaves:
            return None
        places = self._tables
        if self._expected is None:
            require_room(self._memory, leaves)
            places = {leaf.name: self._memory.view(leaf) for leaf in leaves}
        moved = {name: leaf for name, leaf in tensors.items() if not self._is_there(leaf, places[name])}
        # Lent memory may be part of another upload: copy it before its rows are overwritten.
        moved = {name: leaf.clone() if self._memory.holds(leaf) else leaf for name, leaf in moved.items()}
        for name, leaf in moved.items():
            places[name][self._rows] = leaf
        return Expected(leaves, self._kept_as_trained(tensors))

    def _is_there(self, leaf: Tensor, table: Tensor) -> bool:
        return isinstance(self._rows, slice) and _same_memory(leaf, table[self._rows])

    def _kept_as_trained(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """The uploads that are parameters trained in lent memory, unchanged."""
        return {
            parameter: name
            for parameter, lent in (self._lent or {}).items()
            for name, leaf in tensors.items()
            if _same_memory(leaf, lent)
        }


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.stride() == b.stride()
    )
