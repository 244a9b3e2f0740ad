"""A node's half of a secure sum over Flower, where each leg may run in a separate process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import RecordDict

from fedveil.engines.flower.node import Node
from fedveil.engines.flower.wire import (
    LARGEST_MESSAGE,
    VERSION,
    Leg,
    RefusalError,
    pack_leg,
    read_leg,
    refuse,
)
from fedveil.errors import InputError
from fedveil.methods.secure import IntegerUpload, SecurelyAggregated
from fedveil.privacy.secure_noise import group_of
from fedveil.secure_sum.encoding import (
    listed,
    names,
    plain,
    read_advertisement,
    read_confirmation,
    read_shares,
    read_terms,
)
from fedveil.secure_sum.identities import Identity, Roster
from fedveil.secure_sum.journal import Journal
from fedveil.secure_sum.messages import RefusedError
from fedveil.secure_sum.node import NodeRound
from fedveil.secure_sum.round_store import RoundStore

log = logging.getLogger("flwr.fedveil")


@dataclass(frozen=True)
class Membership:
    """A node's own part of secure sums: identity, roster, journal and store.

    `colluders` is the number of colluders that a sum must tolerate, by the node's policy.
    """

    identity: Identity
    roster: Roster
    journal: Journal
    store: RoundStore
    colluders: int


class SecureNode:
    """Answers the five legs of rounds, each at most once.

    Guarantees: uploads are sent masked only, and a round is charged before its upload is computed
    (`test_an_unmasked_upload_is_refused`, `test_a_round_is_charged_before_it_is_computed`).

    Args:
        member: Its keys, roster and journal.
        method: The method of the run.
        node: Opens the client with its data, for the leg that computes.
    """

    def __init__(self, member: Membership, method: SecurelyAggregated, node: Callable[[], Node]) -> None:
        self._member = member
        self._method = method
        self._node = node

    def answer(self, content: RecordDict, limit: int = LARGEST_MESSAGE) -> RecordDict:
        """The answer to a leg, or a fixed reason for a refusal. Never raises."""
        name = self._member.identity.node
        try:
            return pack_leg(self._work(read_leg(content, limit)))
        except RefusedError as refusal:  # already logged by the protocol
            return refuse(RefusalError("protocol", str(refusal)), name)
        except RefusalError as refusal:
            log.warning("node %s refuses: %s", name, refusal)
            return refuse(refusal, name)
        except InputError as error:
            log.warning("node %s refuses: %s", name, error)
            return refuse(RefusalError("configuration", str(error), error.field), name)
        except Exception:
            log.exception("node %s failed", name)
            return refuse(RefusalError("error", "failed"), name)

    def _work(self, leg: Leg) -> Leg:
        if leg.version != VERSION:
            raise RefusalError("version", f"the server's fedveil is {leg.version!r:.40}, ours {VERSION!r}")
        answer = Leg(leg.name, leg.key, None)
        with self._member.store.locked(leg.key[0]):
            try:
                round_ = self._begun(leg) if leg.name == "advertise" else self._taken(leg)
                if leg.name == "upload":
                    answer = self._uploaded(round_, leg)
                else:
                    answer = replace(answer, content=plain(_answered(round_, leg)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise RefusalError(
                    "message", f"the leg {leg.name!r:.20} cannot be read: {type(error).__name__}"
                ) from error
            if leg.name != "unmask":
                self._member.store.keep(leg.key, round_.saved())
        return answer

    def _begun(self, leg: Leg) -> NodeRound:
        terms, member = read_terms(leg.content), self._member
        if terms.key != leg.key:
            raise RefusalError("message", "the terms are of another attempt")
        if terms.colluders < member.colluders:
            raise RefusalError(
                "policy",
                f"the sum tolerates {terms.colluders} colluders, this node requires {member.colluders}",
                "aggregation.colluders",
            )
        return NodeRound(member.identity, member.roster, self._method.settings, terms, member.journal)

    def _taken(self, leg: Leg) -> NodeRound:
        saved = self._member.store.take(leg.key)
        if saved is None:
            text = (
                f"no state is stored for the leg {leg.name!r:.20} of {leg.key}: restarted, or answered before"
            )
            raise RefusalError("protocol", text)
        return NodeRound.resumed(self._member.identity, self._member.roster, self._member.journal, saved)

    def _uploaded(self, round_: NodeRound, leg: Leg) -> Leg:
        """Leg 3: compute the upload of the order, and mask it."""
        order, terms = leg.order, round_.terms
        if order is None or (order.run, order.at.round, order.at.exchange) != (*terms.key[:2], 0):
            raise RefusalError("message", "the order is missing, or of another round")
        group = group_of(self._method.settings, order.at.plan)
        if group != terms.group:
            raise RefusalError("plan", f"the plan has {group}, the terms have {terms.group}")
        shares = [read_shares(one) for one in listed(leg.content)]
        up, remembers = self._node().compute(order)
        assert isinstance(up, IntegerUpload)
        words = up.words()
        if len(words) != terms.length:
            raise RefusalError("plan", f"the upload has {len(words)} numbers, the terms have {terms.length}")
        masked = round_.upload(shares, words, order.down)
        body = masked.values.astype("<u4").tobytes()
        return Leg(leg.name, leg.key, None, body=body, remembers=remembers)


def _answered(round_: NodeRound, leg: Leg) -> Any:
    """The answer to a leg without training."""
    content = leg.content
    if leg.name == "advertise":
        return round_.advertise()
    if leg.name == "share":
        return round_.share([read_advertisement(one) for one in listed(content)])
    if leg.name == "confirm":
        return round_.confirm(names(content))
    if leg.name == "unmask":
        confirmed = [read_confirmation(one) for one in listed(content["confirmed"])]
        return round_.unmask(names(content["survivors"]), confirmed)
    raise RefusalError("message", f"there is no leg {leg.name!r:.20}")
