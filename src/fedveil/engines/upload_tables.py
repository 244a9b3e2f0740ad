"""Where a worker process leaves its uploads: rows of shared tables that the simulator reads.

Trained parameters that a method uploads as they are need not be copied there: once an exchange has shown which they
are and where they go, training is lent those rows to begin with.
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
    """The tables of an earlier exchange of this kind, and which of them held which trained parameter as it was."""

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
    """Takes the uploads of one chunk of clients after another."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._given: Expected | None = None
        self._expected: Expected | None = None  # what was given, if there is room for it
        self._tables: dict[str, Tensor] = {}
        self._to_lend: dict[str, Tensor] = {}
        self._rows: slice | Tensor = slice(0, 0)
        self._lent: Params | None = None

    def open(self, rows: Sequence[int], expected: Expected | None) -> None:
        """From now on these rows are filled, most likely of the expected tables."""
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
        """Unwritten parameters of k clients, the rows of the expected tables where they can be. Only lent once."""
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
        """Whether there is room for tables of `total` such rows."""
        return self._memory.fits(layout(tensors, rows=total))

    def put(self, tensors: Mapping[str, Tensor], total: int) -> Expected | None:
        """Writes the tensors into tables of `total` rows and says where; None if they are not what was expected.

        Then memory was lent where now something else may lie: the exchange must be done again, expecting nothing.
        """
        leaves = layout(tensors, rows=total)
        if self._expected is not None and leaves != self._expected.leaves:
            return None
        places = self._tables
        if self._expected is None:
            require_room(self._memory, leaves)
            places = {leaf.name: self._memory.view(leaf) for leaf in leaves}
        moved = {name: leaf for name, leaf in tensors.items() if not self._is_there(leaf, places[name])}
        # What was lent may be uploaded as something else: out of the way before anything is written over it.
        moved = {name: leaf.clone() if self._memory.holds(leaf) else leaf for name, leaf in moved.items()}
        for name, leaf in moved.items():
            places[name][self._rows] = leaf
        return Expected(leaves, self._kept_as_trained(tensors))

    def _is_there(self, leaf: Tensor, table: Tensor) -> bool:
        return isinstance(self._rows, slice) and _same_memory(leaf, table[self._rows])

    def _kept_as_trained(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Which upload is which parameter that was trained in the memory lent, unchanged."""
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
