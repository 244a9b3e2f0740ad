"""The server's half of a round: it relays messages, tracks dropouts, and removes the masks from the sum.

A node whose answer violates the protocol counts as a dropout. If fewer nodes than the threshold remain at any leg, the
round is abandoned, and the messages sent so far disclose nothing about any upload.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from fedveil.secure_sum import primitives, shamir
from fedveil.secure_sum.identities import Roster, Terms
from fedveil.secure_sum.masks import Words, mask, pair_key, self_key
from fedveil.secure_sum.messages import (
    AbandonedError,
    Advertisement,
    Confirmation,
    MaskedUpload,
    SealedShares,
    Unmasking,
    survivors_text,
)


class ServerRound:
    """The server in one attempt at one round. Each leg takes the nodes' answers and returns the next messages.

    Guarantees: the sum of the survivors' vectors is exact under every pattern of dropouts, and below the threshold
    nothing is returned (`test_the_sum_is_exact_under_every_pattern_of_dropouts`).
    """

    def __init__(self, roster: Roster, terms: Terms, asked: bytes = b"") -> None:
        """`asked` is the message that all nodes compute with."""
        self._roster = roster
        self._asked = hashlib.sha256(asked).digest()
        self.terms = terms
        self._keys: dict[str, Advertisement] = {}
        self._sharing: tuple[str, ...] = ()
        self._survivors: tuple[str, ...] = ()
        self._total: Words = np.zeros(terms.length, dtype=np.uint32)

    @property
    def survivors(self) -> tuple[str, ...]:
        """The nodes whose uploads are in the sum."""
        return self._survivors

    def advertised(self, answers: Sequence[Advertisement]) -> list[Advertisement]:
        """After leg 1: the keys of all advertising nodes, which each of them is sent."""
        signed = {
            one.node: one
            for one in answers
            if one.node in self.terms.nodes
            and self._roster.is_signed(one.node, one.text(self.terms), one.signature)
        }
        self._require("advertise", len(signed))
        self._keys = dict(sorted(signed.items()))
        return list(self._keys.values())

    def shared(self, answers: Sequence[Sequence[SealedShares]]) -> dict[str, list[SealedShares]]:
        """After leg 2: the sealed shares for each node, from nodes that sent shares to all others."""
        sent = {
            shares[0].sender: shares
            for shares in answers
            if shares
            and {(s.sender, s.receiver) for s in shares}
            == {(shares[0].sender, node) for node in self._keys if node != shares[0].sender}
        }
        self._sharing = tuple(node for node in self._keys if node in sent)
        self._require("share", len(self._sharing))
        for_node: dict[str, list[SealedShares]] = {node: [] for node in self._sharing}
        for sender in self._sharing:
            for share in sent[sender]:
                if share.receiver in for_node:
                    for_node[share.receiver].append(share)
        return for_node

    def uploaded(self, answers: Sequence[MaskedUpload]) -> tuple[str, ...]:
        """After leg 3: the list of survivors, which they are asked to sign."""
        fitting = {
            one.node: one.values
            for one in answers
            if one.node in self._sharing
            and one.values.dtype == np.uint32
            and one.values.shape == self._total.shape
        }
        self._survivors = tuple(node for node in self._sharing if node in fitting)
        self._require("upload", len(self._survivors))
        for node in self._survivors:
            self._total += fitting[node]
        return self._survivors

    def confirmed(self, answers: Sequence[Confirmation]) -> list[Confirmation]:
        """After leg 4: the signatures, which every survivor is sent with the list."""
        text = survivors_text(self.terms, self._survivors, self._asked)
        valid = {
            one.node: one
            for one in answers
            if one.node in self._survivors and self._roster.is_signed(one.node, text, one.signature)
        }
        self._require("confirm", len(valid))
        return list(valid.values())

    def total(self, answers: Sequence[Unmasking]) -> Words:
        """After leg 5: the sum of the survivors' vectors, modulo 2^32."""
        dropouts = [node for node in self._sharing if node not in self._survivors]
        fitting = {
            one.node: one
            for one in answers
            if one.node in self._survivors
            and set(one.seeds) == set(self._survivors)
            and set(one.mask_keys) == set(dropouts)
        }
        self._require("unmask", len(fitting))
        total = self._total.copy()
        for node in self._survivors:
            seed = self._secret({one.node: one.seeds[node] for one in fitting.values()})
            total -= mask(self_key(self.terms, node, seed), len(total))
        for node in dropouts:
            private = self._secret({one.node: one.mask_keys[node] for one in fitting.values()})
            if primitives.agreement_public(private) != self._keys[node].mask_key:
                raise AbandonedError(
                    self.terms, "unmask", len(fitting), f"the shares of {node}'s key are wrong"
                )
            self._remove_pair_masks(total, node, private)
        return total

    def _remove_pair_masks(self, total: Words, dropout: str, private: bytes) -> None:
        """Remove, in place, the masks that the survivors share with a dropout."""
        for node in self._survivors:
            key = pair_key(self.terms, dropout, private, node, self._keys[node].mask_key)
            if node < dropout:  # the survivor added it
                total -= mask(key, len(total))
            else:
                total += mask(key, len(total))

    def _secret(self, shares: Mapping[str, bytes]) -> bytes:
        try:
            return shamir.combine(
                {self.terms.place(node): share for node, share in shares.items()}, self.terms.threshold
            )
        except ValueError as error:
            raise AbandonedError(self.terms, "unmask", len(shares), str(error)) from error

    def _require(self, leg: str, count: int) -> None:
        if count < self.terms.threshold:
            raise AbandonedError(self.terms, leg, count)
