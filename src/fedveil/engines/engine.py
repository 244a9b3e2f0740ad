"""The interface between a run and its clients, implemented by the simulator and by federations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from fedveil.errors import DivergedError
from fedveil.lazy_torch import torch
from fedveil.messages import Message, Record
from fedveil.methods.method import At
from fedveil.tree import State, flat_rows

if TYPE_CHECKING:
    from torch import Tensor

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Answers:
    """The uploads of the clients that answered, in their order; `up` is None if nobody or too few answered.

    `missing` has the reasons of clients that refused or dropped out.
    """

    clients: tuple[int, ...]
    up: Message | None
    missing: Mapping[int, str] = field(default_factory=dict)
    row_size: int | None = None
    """If the rows of `up` are sums of uploads (`Method.exact_sum`): the size of one client's upload in bytes."""

    @property
    def summed(self) -> bool:
        return self.row_size is not None

    @property
    def row_bytes(self) -> int:
        """The payload of one client's upload, in bytes."""
        if self.row_size is not None:
            return self.row_size
        return 0 if self.up is None else self.up.row_bytes()


class Engine(Protocol):
    def exchange(self, clients: Sequence[int], down: Message, at: At) -> Answers: ...

    def leave_out(self, client: int, at: At, problem: str) -> bool:
        """Drop this client for the rest of the round. False in simulation, where a bad answer is fedveil's own bug."""
        ...

    def own(self, record: R) -> R:
        """The record in memory that later exchanges do not overwrite."""
        ...

    def state(self) -> Mapping[int, State]:
        """The clients' states, for a checkpoint."""
        ...

    def restore(self, state: Mapping[int, State]) -> None: ...

    def saved(self) -> None:
        """Called when a checkpoint of the last `state()` is on disk."""
        ...

    def close(self) -> None: ...


def require_finite(up: Message, clients: Sequence[int], at: At) -> None:
    """Refuse an upload with NaN or infinity, naming its client."""
    for name, leaf in up.tensors().items():
        if surely_finite(leaf):
            continue
        bad = ~flat_rows(torch.isfinite(leaf)).all(1)
        if bool(bad.any()):
            client = clients[int(bad.nonzero()[0])]
            raise DivergedError(
                f"round {at.round}: the upload of client {client} is not finite in {name!r}. "
                "Lower the learning rate, clip, or look at that client's data; the last checkpoint is kept.",
                field="upload",
                value=(client, name),
            )


def surely_finite(leaf: Tensor) -> bool:
    """Whether the sum is finite, a cheap sufficient condition; elements are checked only if it fails."""
    return not leaf.is_floating_point() or bool(torch.isfinite(leaf.sum()))
