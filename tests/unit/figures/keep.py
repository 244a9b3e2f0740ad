"""A callback that keeps messages in memory, for the tests of figures."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedveil.messages import Message
from fedveil.methods.method import At
from fedveil.session.loop import Callback, RoundEnd


@dataclass(frozen=True)
class Kept:
    """The last answered exchange of a round, and the server's state after the round."""

    at: At
    down: Any
    up: Any
    server: Any


def _own(_: str, leaf: Tensor) -> Tensor:
    return leaf.clone()


class KeepRounds(Callback):
    """Keeps these rounds in `found`; a round without answers is not kept."""

    def __init__(self, rounds: Collection[int]) -> None:
        self._rounds = frozenset(rounds)
        self._last: tuple[At, Message, Message] | None = None
        self.found: dict[int, Kept] = {}

    def exchange_ends(self, at: At, cohort: Sequence[int], down: Message, up: Message | None) -> None:
        if at.round in self._rounds and up is not None:  # copied, since the engine may reuse the memory
            self._last = at, down.map(_own), up.map(_own)

    def round_ends(self, end: RoundEnd) -> None:
        if self._last is not None:
            self.found[end.at.round] = Kept(*self._last, end.server)
        self._last = None
