"""Examples with a client axis: what a method's client side is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedveil.errors import DataError, InputError
from fedveil.task import Batch


@dataclass(frozen=True)
class ClientData:
    """The examples of K clients, padded to the largest of them.

    `x` is `[K, n, ...]`, `y` is `[K, n]`, `sizes` is `[K]`; rows from `sizes[k]` on are padding.
    """

    x: Tensor
    y: Tensor
    sizes: Tensor

    @property
    def count(self) -> int:
        return int(self.x.shape[0])

    @property
    def largest(self) -> int:
        return int(self.x.shape[1])

    def mask(self) -> Tensor:
        """True where an example is real, `[K, n]`."""
        return torch.arange(self.largest, device=self.sizes.device) < self.sizes[:, None]

    def rows(self, index: Sequence[int]) -> ClientData:
        picked = torch.as_tensor(list(index), dtype=torch.long, device=self.x.device)
        return ClientData(self.x.index_select(0, picked), self.y.index_select(0, picked), self.sizes[picked])

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
    """Where the clients' examples live. Only the cohort's are ever loaded."""

    @property
    def sizes(self) -> Sequence[int]: ...

    def load(self, clients: Sequence[int]) -> ClientData: ...


class ArrayClients:
    """Clients whose examples are rows of two arrays: `parts[k]` lists those of client k."""

    def __init__(self, x: Tensor, y: Tensor, parts: Sequence[Tensor]) -> None:
        if len(parts) == 0:
            raise InputError("clients", 0, "there is no client", "Give at least one client's examples.")
        if x.shape[0] != y.shape[0]:
            raise DataError(f"x has {x.shape[0]} examples and y has {y.shape[0]}; they must be as many.")
        check_finite(x, "x")
        self.x = x
        self.y = y
        self.parts = [part.to(torch.long) for part in parts]
        self._sizes = [len(part) for part in self.parts]
        self._starts = [_start_of_run(part) for part in self.parts]

    @classmethod
    def from_arrays(cls, clients: Sequence[tuple[Tensor, Tensor]]) -> ArrayClients:
        """One (x, y) pair per client."""
        if not clients:
            raise InputError("clients", [], "there is no client", "Give at least one (x, y) pair.")
        sizes = [len(x) for x, _ in clients]
        parts = list(torch.split(torch.arange(sum(sizes)), sizes))
        return cls(torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients]), parts)

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
        """The rows of these clients if they have one size and lie one after another, in order."""
        start, size = self._starts[clients[0]], self._sizes[clients[0]]
        for number, client in enumerate(clients):
            if self._starts[client] != start + number * size or self._sizes[client] != size or start < 0:
                return None
        return slice(start, start + size * len(clients))


def _start_of_run(part: Tensor) -> int:
    """Where this part begins if its rows lie one after another, else -1."""
    if not len(part):
        return -1
    start = int(part[0])
    return start if torch.equal(part, torch.arange(start, start + len(part))) else -1


class LazyClients:
    """Clients whose examples are made or read when they take part: memory does not grow with their number."""

    def __init__(self, sizes: Sequence[int], make: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        self._sizes = sizes
        self._make = make

    @property
    def sizes(self) -> Sequence[int]:
        return self._sizes

    def load(self, clients: Sequence[int]) -> ClientData:
        made = ArrayClients.from_arrays([self._make(k) for k in clients])
        return made.load(range(len(clients)))


def check_finite(x: Tensor, field: str) -> None:
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0]) if x.dim() > 1 else 0
        raise DataError(f"{field}: example {bad} holds NaN or infinity. Clean or drop it before training.")
