"""Messages between nodes and server in the five legs of a round, and the errors of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedveil.errors import FedveilError
from fedveil.secure_sum.identities import Terms
from fedveil.secure_sum.masks import Words


class RefusedError(FedveilError):
    """A node refuses to answer, because a message violates the protocol. It leaves the round."""

    def __init__(self, node: str, terms: Terms, problem: str) -> None:
        where = f"run {terms.run!r}, round {terms.round}, attempt {terms.attempt}"
        super().__init__(f"{node} refuses ({where}): {problem}")
        self.node = node
        self.problem = problem


class AbandonedError(FedveilError):
    """Too few nodes answered, or their answers are inconsistent: nothing about their uploads is disclosed."""

    def __init__(self, terms: Terms, leg: str, answered: int, problem: str = "") -> None:
        super().__init__(
            f"round {terms.round}, attempt {terms.attempt} is abandoned at {leg!r}: "
            + (problem or f"{answered} of {len(terms.nodes)} nodes answered, {terms.threshold} are needed")
        )
        self.leg = leg
        self.answered = answered


@dataclass(frozen=True)
class Advertisement:
    """Leg 1: a node's two public X25519 keys of this round, signed with the terms."""

    node: str
    mask_key: bytes
    share_key: bytes
    signature: bytes

    def text(self, terms: Terms) -> bytes:
        """The signed bytes."""
        return terms.bound("advertise", self.node, self.mask_key, self.share_key)


@dataclass(frozen=True)
class SealedShares:
    """Leg 2: one node's shares for another, of its mask key and of its seed; only the receiver can open them."""

    sender: str
    receiver: str
    sealed: bytes

    def bound_to(self, terms: Terms) -> bytes:
        return terms.bound("shares", self.sender, self.receiver)


@dataclass(frozen=True)
class MaskedUpload:
    """Leg 3: a node's vector with all its masks, modulo 2^32."""

    node: str
    values: Words


@dataclass(frozen=True)
class Confirmation:
    """Leg 4: a node's signature on the list of survivors."""

    node: str
    signature: bytes


def survivors_text(terms: Terms, survivors: Sequence[str], asked: bytes) -> bytes:
    """The bytes that survivors sign: their names, and the SHA-256 of the message they computed with."""
    return terms.bound("survivors", asked, *sorted(survivors))


@dataclass(frozen=True)
class Unmasking:
    """Leg 5: one node's shares of the survivors' seeds and of the dropouts' mask keys, never both for one node."""

    node: str
    seeds: Mapping[str, bytes]
    mask_keys: Mapping[str, bytes]
