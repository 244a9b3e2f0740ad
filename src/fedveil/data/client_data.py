"""Examples with a client axis, the input of a method's client half."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fedveil.errors import DataError, InputError
from fedveil.lazy_torch import torch
from fedveil.task import Batch

if TYPE_CHECKING:
    from torch import Tensor

Array: TypeAlias = "Tensor | npt.NDArray[Any]"


@dataclass(frozen=True)
class ClientData:
    """The examples of K clients, padded to the largest of them.

    Args:
        x: Inputs `[K, n, ...]`.
        y: Labels `[K, n]`.
        sizes: Number of examples of each client, `[K]`; rows from `sizes[k]` on are padding.
        declared: The classes that each client declares publicly, regardless of its examples; None if label sets are
            read from the examples.
    """

    x: Tensor
    y: Tensor
    sizes: Tensor
    declared: tuple[tuple[int, ...], ...] | None = None

    @property
    def count(self) -> int:
        return int(self.x.shape[0])

    @property
    def largest(self) -> int:
        return int(self.x.shape[1])

    def mask(self) -> Tensor:
        """False on padding, `[K, n]`."""
        return torch.arange(self.largest, device=self.sizes.device) < self.sizes[:, None]

    def rows(self, index: Sequence[int]) -> ClientData:
        picked = torch.as_tensor(list(index), dtype=torch.long, device=self.x.device)
        declared = None if self.declared is None else tuple(self.declared[k] for k in index)
        x, y = self.x.index_select(0, picked), self.y.index_select(0, picked)
        return ClientData(x, y, self.sizes[picked], declared)

    def everything(self) -> Batch:
        """All examples as one batch per client."""
        full = bool((self.sizes == self.largest).all())
        return Batch(self.x, self.y, None if full else self.mask())

    def take(self, positions: Tensor, mask: Tensor | None = None) -> Batch:
        """The batch of these positions `[K, B]` (each within the client's own examples)."""
        k, n = self.x.shape[:2]
        offset = torch.arange(k, device=positions.device)[:, None] * n
        flat = (positions + offset).reshape(-1)
        x = self.x.flatten(0, 1).index_select(0, flat).reshape(k, -1, *self.x.shape[2:])
        y = self.y.flatten(0, 1).index_select(0, flat).reshape(k, -1, *self.y.shape[2:])
        return Batch(x, y, mask)


class Clients(Protocol):
    """The clients' examples. Only those of a cohort are loaded."""

    @property
    def sizes(self) -> Sequence[int]: ...

    def load(self, clients: Sequence[int]) -> ClientData: ...


def client_ids(clients: Clients) -> Sequence[int]:
    """The clients that can be loaded: all of them, or a node's own (`ids`)."""
    ids: Sequence[int] = getattr(clients, "ids", range(len(clients.sizes)))
    return ids


class ArrayClients:
    """Clients whose examples are rows of two arrays.

    Args:
        x: All examples, `[N, ...]`.
        y: Their labels, `[N]`.
        parts: The rows of each client.
        numbers: The clients' numbers in error messages, if they are not 0, 1, 2, ...
    """

    def __init__(
        self, x: Tensor, y: Tensor, parts: Sequence[Tensor], *, numbers: Sequence[int] | None = None
    ) -> None:
        if len(parts) == 0:
            raise InputError("clients", 0, "must not be empty", "Give at least one client's examples.")
        if x.shape[0] != y.shape[0]:
            raise DataError(
                f"x has {x.shape[0]} examples and y has {y.shape[0]}; the numbers must be equal.", field="y"
            )
        if (bad := first_not_finite(x)) is not None:
            raise _not_finite(bad, parts, numbers or range(len(parts)))
        self.x = x
        self.y = y
        self.parts = [part.to(torch.long) for part in parts]
        self._sizes = [len(part) for part in self.parts]
        self._starts = [_start_of_run(part) for part in self.parts]

    @classmethod
    def from_arrays(
        cls, clients: Sequence[tuple[Array, Array]], *, numbers: Sequence[int] | None = None
    ) -> ArrayClients:
        """From one (x, y) pair of tensors or NumPy arrays per client, all with the same shape and type.

        NumPy's floating-point numbers become torch's default type, and integer labels int64.
        """
        if not clients:
            raise InputError("clients", [], "must not be empty", "Give at least one (x, y) pair.")
        pairs = [(tensor_of(x), labels_of(y)) for x, y in clients]
        for number, (x, y) in zip(numbers or range(len(pairs)), pairs, strict=True):
            _require_alike(number, x, y, *pairs[0])
        sizes = [len(x) for x, _ in pairs]
        parts = list(torch.split(torch.arange(sum(sizes)), sizes))
        return cls(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]), parts, numbers=numbers)

    @property
    def sizes(self) -> Sequence[int]:
        return self._sizes

    def load(self, clients: Sequence[int]) -> ClientData:
        if clients and (run := self._one_run(clients)) is not None:  # a view, nothing to copy
            shape = (len(clients), self._sizes[clients[0]])
            x, y = self.x[run], self.y[run]
            sizes = torch.full(shape[:1], shape[1])
            return ClientData(x.reshape(*shape, *x.shape[1:]), y.reshape(*shape, *y.shape[1:]), sizes)
        parts = [self.parts[k] for k in clients]
        sizes = torch.tensor([len(part) for part in parts])
        largest = int(sizes.max()) if len(parts) else 0
        if all(len(part) == largest for part in parts):
            index = torch.stack(parts)
        else:
            index = torch.zeros(len(parts), largest, dtype=torch.long)
            for row, part in zip(index, parts, strict=True):
                row[: len(part)] = part
        shape = (len(parts), largest)
        x = self.x.index_select(0, index.reshape(-1)).reshape(*shape, *self.x.shape[1:])
        y = self.y.index_select(0, index.reshape(-1)).reshape(*shape, *self.y.shape[1:])
        return ClientData(x, y, sizes)

    def _one_run(self, clients: Sequence[int]) -> slice | None:
        """The rows of these clients as a slice, if they have equal sizes and are contiguous, in order."""
        start, size = self._starts[clients[0]], self._sizes[clients[0]]
        for number, client in enumerate(clients):
            if self._starts[client] != start + number * size or self._sizes[client] != size or start < 0:
                return None
        return slice(start, start + size * len(clients))


def _start_of_run(part: Tensor) -> int:
    """The first row of this part if its rows are contiguous, else -1."""
    if not len(part):
        return -1
    start = int(part[0])
    return start if torch.equal(part, torch.arange(start, start + len(part))) else -1


def digest_of(clients: Clients, test: tuple[Tensor, Tensor] | None) -> str | None:
    """A digest of these examples; None for clients whose examples are made on demand."""
    if not isinstance(clients, ArrayClients):
        return None
    digest = hashlib.blake2b(digest_size=16)
    for values in (clients.x, clients.y, *clients.parts, *(test or ())):
        digest.update(f"{values.dtype} {list(values.shape)}".encode())
        if values.numel():  # a client may hold nothing, and torch cannot view an empty tensor as bytes
            digest.update(values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class LazyClients:
    """Clients whose examples are made or read when they participate: memory does not grow with their number.

    Args:
        sizes: Number of examples of each client.
        make: Makes the inputs and labels of a client, given its number.
    """

    def __init__(self, sizes: Sequence[int], make: Callable[[int], tuple[Array, Array]]) -> None:
        self._sizes = sizes
        self._make = make

    @property
    def sizes(self) -> Sequence[int]:
        return self._sizes

    def load(self, clients: Sequence[int]) -> ClientData:
        made = ArrayClients.from_arrays([self._make(k) for k in clients], numbers=clients)
        for client, size in zip(clients, made.sizes, strict=True):
            if size != self._sizes[client]:  # batches and accounting depend on the declared size
                raise DataError(
                    f"client {client}: {size} examples were made where sizes says {self._sizes[client]}. "
                    "Give the same number.",
                    field="sizes",
                    value=client,
                )
        return made.load(range(len(clients)))


def first_not_finite(x: Tensor) -> int | None:
    """The first example with NaN or infinity."""
    if not x.is_floating_point() or bool(torch.isfinite(x).all()):
        return None
    return int((~torch.isfinite(x)).reshape(len(x), -1).any(1).nonzero()[0])


def _not_finite(example: int, parts: Sequence[Tensor], numbers: Sequence[int]) -> DataError:
    problem = "contains NaN or infinity. Clean or drop it before training."
    for number, part in zip(numbers, parts, strict=True):
        if (place := (part == example).nonzero()).numel():
            where = (number, int(place[0]))
            return DataError(f"x: example {where[1]} of client {number} {problem}", field="x", value=where)
    return DataError(f"x: example {example} {problem}", field="x", value=example)


def tensor_of(values: Array) -> Tensor:
    """The values as a tensor; NumPy's floating-point numbers become torch's default type."""
    if isinstance(values, torch.Tensor):
        return values
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"an array has the type {array.dtype}. Give numbers.", field="dtype", value=str(array.dtype)
        )
    made = torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)))
    return made.to(torch.get_default_dtype()) if made.is_floating_point() else made


def labels_of(values: Array) -> Tensor:
    """Labels as a tensor; integers of any type become int64, floating-point labels (for custom losses) are kept."""
    labels = tensor_of(values)
    return labels if labels.is_floating_point() else labels.to(torch.int64)


def _require_alike(client: int, x: Tensor, y: Tensor, first_x: Tensor, first_y: Tensor) -> None:
    if not x.dim() or not y.dim() or len(x) != len(y):
        shapes = f"x has shape {list(x.shape)} and y {list(y.shape)}"
        raise DataError(f"client {client}: {shapes}; give a label for each example.", field="y", value=client)
    for name, own, other in (("x", x, first_x), ("y", y, first_y)):
        if own.shape[1:] != other.shape[1:] or own.dtype != other.dtype:
            raise DataError(
                f"client {client}: {name} has {_described(own)} where the others have {_described(other)}. "
                "Give all clients the same shape and type.",
                field=name,
                value=client,
            )


def _described(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} of shape {list(values.shape[1:])}"
