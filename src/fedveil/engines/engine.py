"""What a run asks of the thing that reaches the clients: the simulator here, or a federation."""

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
    """The uploads of the clients that answered, in their order; `up` is None when nobody did, or too few.

    `missing` says of those who refused or dropped out why they did.
    """

    clients: tuple[int, ...]
    up: Message | None
    missing: Mapping[int, str] = field(default_factory=dict)
    row_size: int | None = None
    """Where `up` holds sums of uploads, each a row (`Method.exact_sum`): the bytes of one client's own upload."""

    @property
    def summed(self) -> bool:
        return self.row_size is not None

    @property
    def row_bytes(self) -> int:
        """What one client sent, in bytes of payload."""
        if self.row_size is not None:
            return self.row_size
        return 0 if self.up is None else self.up.row_bytes()


class Engine(Protocol):
    def exchange(self, clients: Sequence[int], down: Message, at: At) -> Answers: ...

    def leave_out(self, client: int, at: At, problem: str) -> bool:
        """Do without this client for the rest of the round; False where its answers are our own, and so the problem."""
        ...

    def own(self, record: R) -> R:
        """The record safe to keep: no later exchange overwrites anything in it."""
        ...

    def state(self) -> Mapping[int, State]:
        """What each client remembers, for a checkpoint."""
        ...

    def restore(self, state: Mapping[int, State]) -> None: ...

    def saved(self) -> None:
        """A checkpoint of the last `state()` is on disk."""
        ...

    def close(self) -> None: ...


def require_finite(up: Message, clients: Sequence[int], at: At) -> None:
    """Refuse an upload that holds NaN or infinity, by its client."""
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
    """The sum is finite unless an element is not, or the sum itself overflows: look closer only then."""
    return not leaf.is_floating_point() or bool(torch.isfinite(leaf.sum()))
