"""A whole round of the protocol in this process, with nodes that drop out where a test says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedveil.secure_sum.identities import Identity, Roster, Terms
from fedveil.secure_sum.journal import Journal
from fedveil.secure_sum.masks import Words
from fedveil.secure_sum.node import NodeRound
from fedveil.secure_sum.server import ServerRound
from fedveil.secure_sum.settings import SecureSum

LEGS = ("advertise", "share", "upload", "confirm", "unmask")
NEVER = len(LEGS)


@dataclass
class Federation:
    """Nodes with keys, journals and a roster; rounds are run through `run`."""

    count: int
    settings: SecureSum = field(default_factory=SecureSum)
    length: int = 8
    identities: list[Identity] = field(init=False)
    roster: Roster = field(init=False)
    journals: dict[str, Journal] = field(init=False)

    def __post_init__(self) -> None:
        self.identities = [Identity.generate(f"node-{i:03d}") for i in range(self.count)]
        self.roster = Roster({one.node: one.public for one in self.identities})
        self.journals = {one.node: Journal() for one in self.identities}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.roster.keys)

    def terms(self, round_: int = 1, attempt: int = 1, run: str = "test") -> Terms:
        group = self.settings.group(self.count)
        return Terms(
            run,
            round_,
            attempt,
            self.names,
            group.threshold,
            group.colluders,
            self.length,
            self.roster.digest,
        )

    def node(self, index: int, terms: Terms) -> NodeRound:
        identity = self.identities[index]
        return NodeRound(identity, self.roster, self.settings, terms, self.journals[identity.node])

    def nodes(self, terms: Terms) -> dict[str, NodeRound]:
        return {one.node: self.node(i, terms) for i, one in enumerate(self.identities)}

    def values(self, seed: int = 0) -> dict[str, Words]:
        rng = np.random.default_rng(seed)
        return {name: rng.integers(0, 2**32, self.length, dtype=np.uint32) for name in self.names}

    def run(
        self, values: Mapping[str, Words], leaves: Mapping[str, int] | None = None, terms: Terms | None = None
    ) -> tuple[Words, tuple[str, ...]]:
        """The sum and the survivors; node v does not answer from leg `leaves[v]` (0..4) on."""
        agreed = terms or self.terms()
        nodes, server = self.nodes(agreed), ServerRound(self.roster, agreed)
        last = dict.fromkeys(nodes, NEVER) | dict(leaves or {})

        def present(leg: int) -> list[NodeRound]:
            return [node for name, node in nodes.items() if last[name] > leg]

        keys = server.advertised([node.advertise() for node in present(0)])
        sealed = server.shared([node.share(keys) for node in present(1)])
        survivors = server.uploaded(
            [node.upload(sealed[node.node], values[node.node]) for node in present(2)]
        )
        signed = server.confirmed([node.confirm(survivors) for node in present(3)])
        total = server.total([node.unmask(survivors, signed) for node in present(4)])
        return total, survivors


def modular_sum(values: Mapping[str, Words], names: tuple[str, ...]) -> Words:
    total = sum(values[name].astype(np.uint64) for name in names)
    return np.asarray(total % 2**32, dtype=np.uint32)
