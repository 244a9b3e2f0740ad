"""Identities: each node's long-term key, the roster of all public keys, and the terms of one round."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fedveil.errors import InputError
from fedveil.secure_sum import primitives
from fedveil.secure_sum.settings import Group

PROTOCOL = "fedveil secure sum 1"


@dataclass(frozen=True)
class Identity:
    """A node's name and its long-term Ed25519 key, generated on the node; the private half never leaves it."""

    node: str
    private: bytes = field(repr=False)

    @classmethod
    def generate(cls, node: str) -> Identity:
        return cls(node, primitives.random_key())

    @cached_property
    def public(self) -> bytes:
        return primitives.signing_public(self.private)

    def sign(self, text: bytes) -> bytes:
        return primitives.sign(self.private, text)


@dataclass(frozen=True)
class Roster:
    """The public key of every node. Operators compare its digest out of band.

    Raises:
        InputError: A key has the wrong length, or two nodes have the same key.
    """

    keys: Mapping[str, bytes]

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", dict(sorted(self.keys.items())))
        for node, key in self.keys.items():
            if not node or len(key) != primitives.KEY_BYTES:
                raise InputError("roster", node, "has no Ed25519 public key of 32 bytes", "Export it again.")
        if len(set(self.keys.values())) != len(self.keys):
            twice = [node for node, key in self.keys.items() if list(self.keys.values()).count(key) > 1]
            raise InputError("roster", twice, "have the same key", "Each node generates its own.")

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over all names and keys; every message is bound to it."""
        return hashlib.sha256(
            packed("roster", *(part for item in self.keys.items() for part in item))
        ).digest()

    def is_signed(self, node: str, text: bytes, signature: bytes) -> bool:
        return node in self.keys and primitives.is_signed(self.keys[node], text, signature)


@dataclass(frozen=True)
class Terms:
    """The parameters that all parties of one round must agree on. Every key and signature is bound to them.

    Attributes:
        attempt: A round that was abandoned is repeated as another attempt, with fresh keys and noise.
        nodes: The invited nodes, sorted.
        length: The length of the summed vectors.
        roster: The digest of the roster.
    """

    run: str
    round: int
    attempt: int
    nodes: tuple[str, ...]
    threshold: int
    colluders: int
    length: int
    roster: bytes

    @cached_property
    def digest(self) -> bytes:
        numbers = (self.round, self.attempt, len(self.nodes), self.threshold, self.colluders, self.length)
        return hashlib.sha256(packed("terms", self.run, *numbers, self.roster, *self.nodes)).digest()

    @property
    def group(self) -> Group:
        return Group(len(self.nodes), self.threshold, self.colluders)

    @property
    def key(self) -> tuple[str, int, int]:
        """Identifies the attempt, which a node answers at most once."""
        return self.run, self.round, self.attempt

    def place(self, node: str) -> int:
        """The node's number, from 1, among the invited nodes: the point of its share of a secret."""
        return self.nodes.index(node) + 1

    def bound(self, purpose: str, *parts: str | bytes) -> bytes:
        """The bytes that a signature or key of this purpose is bound to in this round."""
        return packed(purpose, self.digest, *parts)


def packed(*parts: str | int | bytes) -> bytes:
    """An injective encoding of the parts, prefixed with the protocol's name."""
    encoded = [str(p).encode() if isinstance(p, str | int) else p for p in (PROTOCOL, *parts)]
    kinds = (type(p).__name__[:1].encode() for p in (PROTOCOL, *parts))
    return b"".join(kind + len(p).to_bytes(8) + p for kind, p in zip(kinds, encoded, strict=True))
