"""The mapping of online nodes to clients.

A node with a key is the client for which its key was registered. Nodes without keys (in a simulation, or a trial on
loopback) are identified by their introduction, never by Flower's number.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import httpx
from flwr.app import Message as Envelope
from flwr.serverapp import Grid

from fedveil.engines.flower.wire import (
    HELLO,
    VERSION,
    Introduction,
    RefusalError,
    hello,
    read_introduction,
    require_same,
)
from fedveil.errors import FedveilError
from fedveil.secure_sum.identities import PROTOCOL

log = logging.getLogger("flwr.fedveil")
_SOON, _LATER = 0.1, 2.0
HELLO_SECONDS = 120.0  # how long a round waits for the introduction of a new node
HELLO_VALID = (
    300.0  # a later answer is still accepted, since a slow node would have to start again if asked again
)
ASK_AGAIN_SECONDS = 600.0  # a refused node is asked again after this time, since it may have been fixed
CONNECT_TIMEOUT = 120.0  # seconds
T = TypeVar("T")


def send_and_receive(grid: Grid, messages: Sequence[Envelope], timeout: float) -> list[Envelope]:
    """The replies that arrive in time. A reply that cannot be decoded only drops its sender."""
    return receive(grid, {number for number in send(grid, messages) if number}, timeout)


def send(grid: Grid, messages: Sequence[Envelope]) -> list[str]:
    """Send messages; returns the id of each, empty for one that could not be sent."""
    return list(with_retries(lambda: grid.push_messages(messages)))


def receive(grid: Grid, waiting: set[str], timeout: float) -> list[Envelope]:
    """The replies to these messages that arrive in time; ids left in `waiting` are unanswered."""
    replies: list[Envelope] = []
    end = time.monotonic() + timeout
    pause = _SOON
    while waiting:
        for got in _pull(grid, waiting):
            waiting.discard(got.metadata.reply_to_message_id)
            replies.append(got)
        if not waiting or time.monotonic() >= end:
            break
        time.sleep(min(pause, max(0.0, end - time.monotonic())))
        pause = min(_LATER, 1.5 * pause)
    return replies


def with_retries(ask: Callable[[], T]) -> T:
    """The answer, with retries while the SuperLink cannot be reached."""
    end = time.monotonic() + CONNECT_TIMEOUT
    while True:
        try:
            return ask()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if time.monotonic() > end:
                raise FedveilError(
                    f"Flower's SuperLink could not be reached for {CONNECT_TIMEOUT:g} s. Start it again.",
                    field="superlink",
                ) from error
            log.warning("Flower's SuperLink cannot be reached: %s", type(error).__name__)
            time.sleep(_LATER)


def _pull(grid: Grid, waiting: set[str]) -> Iterable[Envelope]:
    try:
        return list(grid.pull_messages(sorted(waiting)))
    except httpx.TransportError as error:  # retried until the timeout of the exchange
        log.warning("Flower's SuperLink did not answer: %s", type(error).__name__)
        return []
    except (ValueError, TypeError, KeyError):
        pass
    got: list[Envelope] = []
    for number in sorted(waiting):
        try:
            got.extend(with_retries(partial(grid.pull_messages, [number])))
        except (ValueError, TypeError, KeyError) as error:
            log.warning("a reply cannot be decoded and is dropped: %s", type(error).__name__)
            waiting.discard(number)
    return got


@dataclass(frozen=True)
class Member:
    """The owner of a registered key: a node's name, its client, and the key's fingerprint."""

    name: str
    client: int
    key: str


class Roster:
    """The nodes that have introduced themselves. If two claim the same client, the first one stays.

    `members` are the registered nodes by Flower's number, which is authenticated by the node's key.

    **Guarantees** With `members`, nobody is admitted under another node's name or client
    (`tests/engines/test_impostors.py::test_an_impostor_is_refused_and_named_by_its_key`).
    """

    def __init__(
        self,
        grid: Grid,
        fingerprint: str | None = None,
        members: Mapping[int, Member] | None = None,
        agreed: str | None = None,
    ) -> None:
        """`agreed` is the digest of the roster that all nodes of a secure sum must have."""
        self._grid = grid
        self._agreed = agreed
        self.other_rosters: dict[str, str] = {}
        self.fingerprint = fingerprint
        self._members = members
        self.refusals: dict[str, str] = {}
        self._known: dict[int, Introduction] = {}
        self._refused: dict[int, float] = {}
        self._asked: dict[str, int] = {}

    @property
    def clients(self) -> dict[int, Introduction]:
        return {who.client: who for who in self._known.values()}

    def node(self, client: int) -> int | None:
        return next((node for node, who in self._known.items() if who.client == client), None)

    def names(self, node: int) -> str:
        """A node's name and Flower's number, for the log."""
        member = None if self._members is None else self._members.get(node)
        if member is not None:
            return f"node {member.name!r} ({node})"
        who = self._known.get(node)
        return f"node {node}" if who is None else f"node {who.name!r} ({node})"

    def client(self, node: int) -> int | None:
        who = self._known.get(node)
        return None if who is None else who.client

    def refresh(self, timeout: float = HELLO_SECONDS, *, waits: bool = False) -> None:
        """Remove nodes that went offline and request introductions of new ones.

        It waits for the answers of nodes that were not asked before, or of all that are missing (`waits`).
        """
        here = set(with_retries(self._grid.get_node_ids))
        for node in self._known.keys() - here:
            log.warning("%s went offline", self.names(node))
            del self._known[node]
        since = time.monotonic() - ASK_AGAIN_SECONDS
        self._refused = {node: when for node, when in self._refused.items() if node in here and when > since}
        self._asked = {number: node for number, node in self._asked.items() if node in here}
        new = sorted(here - self._known.keys() - self._refused.keys() - set(self._asked.values()))
        messages = [Envelope(hello(), node, HELLO, ttl=HELLO_VALID, group_id="hello") for node in new]
        if messages:
            numbers = send(self._grid, messages)
            self._asked |= {number: node for number, node in zip(numbers, new, strict=True) if number}
        unanswered = set(self._asked)
        replies = receive(self._grid, unanswered, timeout if new or waits else 0.0)
        read = {reply.metadata.reply_to_message_id for reply in replies}
        damaged = [node for number, node in self._asked.items() if number not in unanswered | read]
        self._refused |= dict.fromkeys(damaged, time.monotonic())
        self._asked = {number: node for number, node in self._asked.items() if number in unanswered}
        for reply in replies:
            if reply.has_error():
                log.warning("a node did not introduce itself: %s", reply.error.reason)
                continue
            self._read(reply)

    def _read(self, reply: Envelope) -> None:
        node = reply.metadata.src_node_id
        name = self.names(node)
        try:
            who = read_introduction(reply.content)
            if self._members is None:
                name = f"node {who.name!r} ({node})"
            self._admit(node, who)
            self.refusals.pop(name, None)
        except RefusalError as refusal:
            self._refused[node] = time.monotonic()
            self.refusals[name] = str(refusal)
            log.warning("%s is refused: %s", name, refusal)

    def _require_own(self, node: int, who: Introduction) -> None:
        """Refuse who claims another name or client than its key was registered for."""
        if self._members is None:
            return
        member = self._members.get(node)
        if member is None:
            raise RefusalError("plan", f"its key is not registered; it says that it is {who.name!r}")
        if (who.name, who.client) != (member.name, member.client):
            raise RefusalError(
                "plan",
                f"its key {member.key} is that of node {member.name!r}, client {member.client}, "
                f"but it says that it is node {who.name!r}, client {who.client}",
            )

    def _require_agreed(self, who: Introduction) -> None:
        if self._agreed is None:
            return
        if who.protocol != PROTOCOL:
            raise RefusalError("version", f"its protocol is {who.protocol!r:.40}, ours {PROTOCOL!r}")
        self.other_rosters.pop(who.name, None)
        if who.roster != self._agreed:
            self.other_rosters[who.name] = who.roster
            held = f"holds the roster {who.roster[:16]!r}" if who.roster else "holds no roster"
            raise RefusalError("configuration", f"it {held}, the server {self._agreed[:16]!r}")

    def _admit(self, node: int, who: Introduction) -> None:
        self._require_own(node, who)
        require_same((who.version, who.fingerprint), (VERSION, self.fingerprint or who.fingerprint), "its")
        self._require_agreed(who)
        other = self.node(who.client)
        if other is not None and other != node:
            raise RefusalError(
                "plan", f"it says that it is client {who.client}, which {self.names(other)} is"
            )
        self._known[node] = who
        log.info("%s is client %d with %d examples", self.names(node), who.client, who.size)

    def wait_for(self, count: int, timeout: float) -> None:
        """Wait until so many nodes are online, admitted or not, or until the timeout."""
        end = time.monotonic() + timeout
        reported = -1
        while True:
            self.refresh(_LATER, waits=True)
            here = len(self._known) + len(self._refused)
            if here >= count or time.monotonic() >= end:
                return
            if here != reported:
                log.info("%d of %d nodes are online; waiting for the others up to %g s", here, count, timeout)
                reported = here
            time.sleep(1.0)
