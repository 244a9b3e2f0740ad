"""What a run asks of the thing that reaches the clients: the simulator here, or a federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from fedveil.messages import Message, Record
from fedveil.methods.method import At
from fedveil.tree import State

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Answers:
    """The uploads of the clients that answered, in their order; `up` is None when nobody did, or too few.

    `missing` says of those who refused or dropped out why they did.
    """

    clients: tuple[int, ...]
    up: Message | None
    missing: Mapping[int, str] = field(default_factory=dict)


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
