"""A node's half of an exchange: one client, K = 1, with the same method objects as in simulation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flwr.app import RecordDict

from fedveil.engines.flower.checks import require_downlink
from fedveil.engines.flower.states import StateStore
from fedveil.engines.flower.wire import (
    LARGEST_MESSAGE,
    VERSION,
    Introduction,
    Order,
    RefusalError,
    Reply,
    fingerprint,
    introduce,
    pack_reply,
    read_order,
    refuse,
    require_same,
)
from fedveil.engines.worker import ClientWorker, one_thread
from fedveil.errors import FedveilError, InputError
from fedveil.messages import Message, MessageError
from fedveil.methods.secure import secure_part
from fedveil.secure_sum.identities import PROTOCOL

log = logging.getLogger("flwr.fedveil")
Admit = Callable[[Order, Message], None]


@dataclass(frozen=True)
class Node:
    """One client of a federation: its identity, task, method and state.

    `admit` is called before each round and refuses by raising; when it returns, the charge has been written.
    """

    name: str
    client: int
    size: int
    worker: ClientWorker
    states: Path
    admit: Admit
    limit: int = LARGEST_MESSAGE
    roster: str = ""
    """The digest of its roster for secure sums."""

    def introduction(self) -> RecordDict:
        mark = fingerprint(self.worker.task, self.worker.method)
        who = Introduction(self.name, self.client, self.size, VERSION, mark, PROTOCOL, self.roster)
        return introduce(who)

    def answer(self, content: RecordDict) -> RecordDict:
        """The upload for this order, or the reason of a refusal. Never raises.

        Only the kind of a refusal is sent to the server; its text, which may contain data, stays in the node's log.
        """
        try:
            return pack_reply(self._work(read_order(content, self.limit)))
        except RefusalError as refusal:
            log.warning("client %d refuses: %s", self.client, refusal)
            return refuse(refusal, self.name)
        except Exception:
            log.exception("client %d failed", self.client)
            return refuse(RefusalError("error", "failed"), self.name)

    def _work(self, order: Order) -> Reply:
        if secure_part(self.worker.method) is not None:
            raise RefusalError("policy", "uploads of a secure sum are sent masked only")
        up, remembers = self.compute(order)
        mark = fingerprint(self.worker.task, self.worker.method)
        return Reply(self.client, order.at.round, order.at.exchange, VERSION, mark, remembers, up.to_bytes())

    def compute(self, order: Order) -> tuple[Message, bool]:
        """The upload for the order, charged before it is computed, and whether the node keeps a state of it."""
        worker, at = self.worker, order.at
        mark = fingerprint(worker.task, worker.method)
        require_same((order.version, order.fingerprint), (VERSION, mark), "the server's")
        self._require_plan(order)
        down = self._read(order)
        self.admit(order, down)
        store = StateStore(self.states, order.run)
        held = None if order.state is None else store.load(order.state)
        if order.state is not None and held is None:
            log.warning("client %d has no state after exchange %s; it starts again", self.client, order.state)
        known = {} if held is None else {self.client: held}
        with one_thread():
            up, after = worker.update([self.client], down, known, at)
        version = (at.round, at.exchange)
        if after:
            store.save(version, {name: leaf[0] for name, leaf in after.items()})
            store.forget(version, order.needed)
        return up, bool(after)

    def _require_plan(self, order: Order) -> None:
        if order.client != self.client:
            raise RefusalError("plan", f"this is client {self.client}, not {order.client}")
        plan = order.at.plan
        if not plan.records_per_client <= max(1, self.size) <= plan.largest_client:
            raise RefusalError("plan", "the plan's range of client sizes does not include this client's")
        if order.at.exchange >= self.worker.method.exchanges(plan):
            raise RefusalError("plan", f"a round has no exchange {order.at.exchange}")

    def _read(self, order: Order) -> Message:
        try:
            down = self.worker.method.down_type.from_bytes(order.down)
        except MessageError as error:
            raise RefusalError("message", str(error)) from error
        require_downlink(self.worker.task, down)
        return down


def admit_all(_order: Order, _down: Message) -> None:
    """Accept every round: a simulated client has no policy."""


def refused_by(error: Exception, name: str) -> RecordDict:
    """The refusal of a node that cannot start; the text of the error stays in the node's log."""
    trace = None if isinstance(error, FedveilError) else error
    log.warning("node %s cannot participate: %s", name, error, exc_info=trace)
    # Raised before any example is read, so it depends on the configuration only.
    if isinstance(error, InputError):
        error = RefusalError("configuration", str(error), error.field)
    return refuse(error if isinstance(error, RefusalError) else RefusalError("error", "failed"), name)
