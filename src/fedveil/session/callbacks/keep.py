"""Callbacks that keep what went over the wire, for figures."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fedveil.figures.fedlap import Sets
from fedveil.messages import Message
from fedveil.methods.fedceo import NoisyModel, Server
from fedveil.methods.method import At
from fedveil.session.loop import Callback, RoundEnd
from fedveil.tree import Params


class KeepSmoothing(Callback):
    """Keeps the uploads of the last smoothing round and what the server made of them."""

    def __init__(self) -> None:
        self.at: At | None = None
        self.before: Params = {}
        self.after: Params = {}
        self._uploads: Params = {}

    def exchange_ends(self, at: At, cohort: Sequence[int], down: Message, up: Message | None) -> None:
        if isinstance(up, NoisyModel):
            self._uploads = {name: leaf.clone() for name, leaf in up.params.items()}

    def round_ends(self, end: RoundEnd) -> None:
        if isinstance(end.server, Server) and end.server.personal:
            self.at, self.before, self.after = end.at, self._uploads, end.server.personal


class KeepSets(Callback):
    """Keeps the synthetic sets of these rounds."""

    def __init__(self, rounds: Collection[int]) -> None:
        self._rounds = frozenset(rounds)
        self.found: dict[int, Sets] = {}

    def exchange_ends(self, at: At, cohort: Sequence[int], down: Message, up: Message | None) -> None:
        if at.round not in self._rounds or up is None:
            return
        sent, held = up.tensors(), down.tensors()
        model = {name.removeprefix("params/"): leaf.clone() for name, leaf in held.items() if "/" in name}
        self.found[at.round] = Sets(sent["images"].clone(), sent["labels"].clone(), model)
