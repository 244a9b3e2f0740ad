"""Memory shared by the simulator and its worker processes, so that uploads are written once and not sent."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedveil.errors import FedveilError
from fedveil.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

ALIGN = 64
_DTYPES = frozenset(
    ("float16", "bfloat16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64")
)


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise KeyError(name)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Leaf:
    """The location of one tensor `[rows, *shape]`."""

    name: str
    dtype: str
    rows: int
    shape: tuple[int, ...]
    offset: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return _dtype(self.dtype)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def rows_are_aligned(self) -> bool:
        """Whether every row is aligned like separate memory, since rounding of products may depend on alignment."""
        return self.row_bytes % ALIGN == 0

    def to_json(self) -> list[Any]:
        return [self.name, self.dtype, self.rows, list(self.shape), self.offset]

    @classmethod
    def from_json(cls, item: Sequence[Any]) -> Leaf:
        name, dtype, rows, shape, offset = item
        return cls(name, dtype, rows, tuple(shape), offset)


def layout(tensors: Mapping[str, Tensor], rows: int | None = None) -> list[Leaf]:
    """Locations for these tensors, one after another; with `rows`, as tables with that many rows."""
    leaves = []
    offset = 0
    for name, tensor in tensors.items():
        count = tensor.shape[0] if rows is None else rows
        leaf = Leaf(name, dtype_name(tensor.dtype), count, tuple(tensor.shape[1:]), offset)
        leaves.append(leaf)
        offset += -(-leaf.nbytes // ALIGN) * ALIGN
    return leaves


class SharedMemory:
    """A block shared with forked processes and with those that open its file.

    Pages are allocated when they are first written.
    """

    def __init__(self, capacity: int, file: int = -1) -> None:
        self.capacity = capacity
        self._block = mmap.mmap(file, capacity)
        self._start = torch.frombuffer(self._block, dtype=torch.uint8, count=1).data_ptr()

    def fits(self, leaves: Sequence[Leaf]) -> bool:
        return all(leaf.offset + leaf.nbytes <= self.capacity for leaf in leaves)

    def view(self, leaf: Leaf) -> Tensor:
        dtype = leaf.torch_dtype
        if leaf.nbytes == 0:
            return torch.empty((leaf.rows, *leaf.shape), dtype=dtype)
        count = leaf.nbytes // dtype.itemsize
        flat = torch.frombuffer(self._block, dtype=dtype, count=count, offset=leaf.offset)
        return flat.reshape(leaf.rows, *leaf.shape)

    def holds(self, tensor: Tensor) -> bool:
        return self._start <= tensor.untyped_storage().data_ptr() < self._start + self.capacity


def require_room(memory: SharedMemory, leaves: Sequence[Leaf]) -> None:
    if not memory.fits(leaves):
        raise FedveilError(
            "this method's messages are larger than the memory shared with worker processes. "
            "Set run.workers = 1.",
            field="run.workers",
        )
