"""A node's half of a round: five legs, each of which checks what the server relayed before it answers.

Bonawitz et al.: Practical Secure Aggregation for Privacy-Preserving Machine Learning. CCS 2017, the variant against a
malicious server, on the complete graph. The server may send arbitrary messages: a node that receives one that the
protocol does not allow refuses, logs the reason, and leaves the round.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from fedveil.errors import InputError
from fedveil.secure_sum import primitives, shamir
from fedveil.secure_sum.encoding import octets, plain, read_advertisement, read_terms
from fedveil.secure_sum.identities import Identity, Roster, Terms
from fedveil.secure_sum.journal import Journal
from fedveil.secure_sum.masks import Words, add_pair_masks, mask, pair_key, self_key
from fedveil.secure_sum.messages import (
    Advertisement,
    Confirmation,
    MaskedUpload,
    RefusedError,
    SealedShares,
    Unmasking,
    survivors_text,
)
from fedveil.secure_sum.settings import SecureSum

log = logging.getLogger("fedveil.secure_sum")
_LEGS = ("advertise", "share", "upload", "confirm", "unmask", "done")


class NodeRound:
    """One node in one attempt at one round.

    Guarantees:
        A share of either the seed or the mask key of a node is sent, never of both, and each at most once
        (`test_a_second_unmasking_is_refused`, `test_a_restarted_node_drops_out`).
        Keys are accepted only if the roster's nodes signed them for these terms
        (`test_swapped_unsigned_and_replayed_keys_are_refused`).
        Shares are sent only for a list of survivors that t of them signed
        (`test_lists_of_survivors_that_differ_between_nodes_are_refused`), and only if these t computed with the same
        model (`test_models_that_differ_between_nodes_are_refused`).

    Args:
        identity: The node's long-term key.
        roster: The node's own copy, compared out of band.
        settings: The node's own threshold and colluders; terms that differ are refused.
        journal: The node's record of earlier rounds.
    """

    def __init__(
        self, identity: Identity, roster: Roster, settings: SecureSum, terms: Terms, journal: Journal
    ) -> None:
        self._identity = identity
        self._roster = roster
        self._terms = terms
        self._journal = journal
        self._leg = "advertise"
        self._keys: dict[str, Advertisement] = {}
        self._held: dict[str, tuple[bytes, bytes]] = {}
        self._survivors: tuple[str, ...] = ()
        self._asked = b""
        with self._refusing():
            self._check_terms(settings)
            if not journal.record("begun", terms.key):
                self._refuse("this attempt was begun before; a restarted node drops out of it")
        self._mask_private = primitives.random_key()
        self._share_private = primitives.random_key()
        self._seed = primitives.random_key()

    @property
    def node(self) -> str:
        return self._identity.node

    def advertise(self) -> Advertisement:
        """Leg 1: the public keys of this round."""
        with self._in("advertise"):
            unsigned = Advertisement(self.node, *self._own_keys(), b"")
            return replace(unsigned, signature=self._identity.sign(unsigned.text(self._terms)))

    def share(self, advertised: Sequence[Advertisement]) -> list[SealedShares]:
        """Leg 2: shares of the mask key and the seed, sealed for each node that advertised."""
        with self._in("share"):
            self._keys = self._checked_keys(advertised)
            places = {node: self._terms.place(node) for node in self._keys}
            of_key, of_seed = (
                shamir.split(secret, self._terms.threshold, list(places.values()))
                for secret in (self._mask_private, self._seed)
            )
            self._held = {self.node: (of_key[places[self.node]], of_seed[places[self.node]])}
            return [
                self._sealed(node, of_key[x] + of_seed[x]) for node, x in places.items() if node != self.node
            ]

    @property
    def terms(self) -> Terms:
        return self._terms

    def saved(self) -> bytes:
        """The state that the next leg needs. It contains the node's secrets of this round."""
        held = {node: list(shares) for node, shares in self._held.items()}
        private = [self._mask_private, self._share_private, self._seed, self._asked]
        content = [self._terms, self._leg, private, list(self._keys.values()), held, self._survivors]
        return json.dumps(plain(content)).encode()

    @classmethod
    def resumed(cls, identity: Identity, roster: Roster, journal: Journal, saved: bytes) -> NodeRound:
        """Restore the round from `saved`, on the same node."""
        terms, leg, private, keys, held, survivors = json.loads(saved)
        found = cls.__new__(cls)
        found._identity, found._roster, found._journal = identity, roster, journal
        found._terms, found._leg, found._survivors = read_terms(terms), leg, tuple(survivors)
        found._mask_private, found._share_private, found._seed, found._asked = map(bytes.fromhex, private)
        found._keys = {one.node: one for one in map(read_advertisement, keys)}
        found._held = {node: (octets(key), octets(seed)) for node, (key, seed) in held.items()}
        return found

    def upload(self, shares: Sequence[SealedShares], values: Words, asked: bytes = b"") -> MaskedUpload:
        """Leg 3: the vector, masked with every node whose shares arrived; `asked` is the message behind it."""
        if values.dtype.name != "uint32" or values.shape != (self._terms.length,):
            raise ValueError(f"{self._terms.length} numbers modulo 2^32 are to be summed")
        with self._in("upload"):
            for share in shares:
                self._hold(share)
            self._require_enough(len(self._held), "sent shares")
            self._asked = hashlib.sha256(asked).digest()
            total = values.copy()
            total += mask(self_key(self._terms, self.node, self._seed), len(total))
            add_pair_masks(
                total, self.node, ((node, self._pair_key(node)) for node in self._held if node != self.node)
            )
            return MaskedUpload(self.node, total)

    def confirm(self, survivors: Sequence[str]) -> Confirmation:
        """Leg 4: sign the list of nodes whose uploads are summed; only one list is signed."""
        with self._in("confirm"):
            self._check_nodes(survivors, "survivors")
            if unknown := sorted(set(survivors) - set(self._held)):
                self._refuse(f"the survivors {unknown} sent no shares")
            if self.node not in survivors:
                self._refuse("the list of survivors leaves out this node, which uploaded")
            self._require_enough(len(survivors), "survived")
            self._survivors = tuple(sorted(survivors))
            return Confirmation(
                self.node, self._identity.sign(survivors_text(self._terms, self._survivors, self._asked))
            )

    def unmask(self, survivors: Sequence[str], confirmed: Sequence[Confirmation]) -> Unmasking:
        """Leg 5: shares of the survivors' seeds and of the dropouts' mask keys; recorded before they are sent."""
        with self._in("unmask"):
            self._check_nodes(survivors, "survivors")
            if tuple(sorted(survivors)) != self._survivors:
                self._refuse("the list of survivors is not the one that this node signed")
            signers = [confirmation.node for confirmation in confirmed]
            self._check_nodes(signers, "signers")
            if outside := sorted(set(signers) - set(self._survivors)):
                self._refuse(f"{outside} signed, but did not survive")
            text = survivors_text(self._terms, self._survivors, self._asked)
            for confirmation in confirmed:
                if not self._roster.is_signed(confirmation.node, text, confirmation.signature):
                    self._refuse(f"{confirmation.node} did not sign this list of survivors and this model")
            self._require_enough(len(signers), "signed the list of survivors")
            if not self._journal.record("unmasked", self._terms.key):
                self._refuse("this attempt was unmasked before")
            dropouts = [node for node in self._held if node not in self._survivors]
            return Unmasking(
                self.node,
                {node: self._held[node][1] for node in self._survivors},
                {node: self._held[node][0] for node in dropouts},
            )

    # Checks.

    def _check_terms(self, settings: SecureSum) -> None:
        terms = self._terms
        self._check_nodes(terms.nodes, "invited nodes")
        if terms.nodes != tuple(sorted(terms.nodes)):
            self._refuse("the invited nodes are not sorted")
        if terms.roster != self._roster.digest:
            self._refuse(
                f"the roster {terms.roster.hex()[:16]} is not this node's, {self._roster.digest.hex()[:16]}"
            )
        if self._roster.keys.get(self.node) != self._identity.public or self.node not in terms.nodes:
            self._refuse("this node is not invited, or the roster has another key for it")
        try:
            expected = settings.group(len(terms.nodes))
        except InputError as error:
            self._refuse(str(error))
        if (terms.threshold, terms.colluders) != (expected.threshold, expected.colluders):
            self._refuse(
                f"threshold {terms.threshold} and colluders {terms.colluders} differ from this node's, "
                f"{expected.threshold} and {expected.colluders}"
            )
        if terms.length < 1:
            self._refuse("the length of the vectors is zero")

    def _check_nodes(self, nodes: Sequence[str], what: str) -> None:
        """Refuse unknown and repeated nodes."""
        if len(set(nodes)) != len(nodes):
            self._refuse(f"a node occurs twice among the {what}")
        known = self._roster.keys if what == "invited nodes" else self._terms.nodes
        if unknown := sorted(set(nodes) - set(known)):
            self._refuse(f"{unknown} among the {what} are unknown")

    def _checked_keys(self, advertised: Sequence[Advertisement]) -> dict[str, Advertisement]:
        self._check_nodes([one.node for one in advertised], "nodes that advertised")
        self._require_enough(len(advertised), "advertised")
        for one in advertised:
            if not self._roster.is_signed(one.node, one.text(self._terms), one.signature):
                self._refuse(f"the keys of {one.node} are not signed by it for these terms")
        keys = [key for one in advertised for key in (one.mask_key, one.share_key)]
        if len(set(keys)) != len(keys):
            self._refuse("a public key is used twice")
        found = {one.node: one for one in advertised}
        own = found.get(self.node)
        if own is None or (own.mask_key, own.share_key) != self._own_keys():
            self._refuse("this node's own keys are missing or altered")
        return found

    def _hold(self, share: SealedShares) -> None:
        if share.receiver != self.node or share.sender not in self._keys or share.sender in self._held:
            self._refuse(f"shares of {share.sender} for {share.receiver} are not for this node and round")
        opened = primitives.unseal(
            self._share_key(share.sender, self.node), share.sealed, share.bound_to(self._terms)
        )
        if opened is None or len(opened) != 2 * shamir.SHARE_BYTES:
            self._refuse(f"the shares of {share.sender} were altered or are of another round")
        self._held[share.sender] = opened[: shamir.SHARE_BYTES], opened[shamir.SHARE_BYTES :]

    def _require_enough(self, count: int, what: str) -> None:
        if count < self._terms.threshold:
            self._refuse(f"only {count} nodes {what}, the threshold is {self._terms.threshold}")

    # Keys.

    def _own_keys(self) -> tuple[bytes, bytes]:
        return primitives.agreement_public(self._mask_private), primitives.agreement_public(
            self._share_private
        )

    def _sealed(self, receiver: str, shares: bytes) -> SealedShares:
        empty = SealedShares(self.node, receiver, b"")
        sealed = primitives.seal(self._share_key(self.node, receiver), shares, empty.bound_to(self._terms))
        return SealedShares(self.node, receiver, sealed)

    def _share_key(self, sender: str, receiver: str) -> bytes:
        """The key of the one message that `sender` seals for `receiver` in this round."""
        other = receiver if sender == self.node else sender
        with self._no_key(other):
            secret = primitives.agree(self._share_private, self._keys[other].share_key)
        return primitives.derive(secret, self._terms.bound("share key", sender, receiver))

    def _pair_key(self, other: str) -> bytes:
        with self._no_key(other):
            return pair_key(self._terms, self.node, self._mask_private, other, self._keys[other].mask_key)

    @contextmanager
    def _no_key(self, other: str) -> Iterator[None]:
        try:
            yield
        except ValueError:
            self._refuse(f"{other} advertised an invalid key")

    # Order of the legs, and refusals.

    @contextmanager
    def _in(self, leg: str) -> Iterator[None]:
        """Refuse a leg that is out of order; the next is due only if this one succeeds."""
        with self._refusing():
            if self._leg != leg:
                self._refuse(f"{leg!r} is requested where {self._leg!r} is due")
            self._leg = "refused"
            yield
            self._leg = _LEGS[_LEGS.index(leg) + 1]

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except RefusedError as refusal:
            self._leg = "refused"
            log.warning("%s", refusal)
            raise

    def _refuse(self, problem: str) -> NoReturn:
        raise RefusedError(self.node, self._terms, problem)
