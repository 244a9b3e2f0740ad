"""The engine of a federation: every client is a Flower node, reached through Flower's grid."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from flwr.app import Message as Envelope
from flwr.app import RecordDict
from flwr.serverapp import Grid

from fedveil.engines.engine import Answers
from fedveil.engines.flower.checks import UploadChecks, require_explained
from fedveil.engines.flower.roster import Roster, send_and_receive
from fedveil.engines.flower.states import StateStore
from fedveil.engines.flower.wire import (
    EXCHANGE,
    LARGEST_MESSAGE,
    LEG,
    VERSION,
    Leg,
    Order,
    RefusalError,
    Version,
    fingerprint,
    pack_order,
    read_leg,
    read_reply,
    read_upload,
    require_same,
    size_of,
)
from fedveil.errors import FedveilError
from fedveil.messages import Message, Record
from fedveil.methods.method import AnyMethod, At
from fedveil.privacy.releases import Plan
from fedveil.task import Task
from fedveil.tree import State

log = logging.getLogger("flwr.fedveil")
R = TypeVar("R", bound=Record)
ROUND_TIMEOUT = 3600.0  # the timeout of an exchange in seconds if no deadline is set
_RESTORED: Version = (0, 0)
_CHECKPOINTS = 2  # the number of checkpoints kept on disk


@dataclass(frozen=True)
class Limits:
    """The deadline of an exchange, the largest upload, and the smallest number of answers."""

    deadline: float | None = None
    max_message: int = LARGEST_MESSAGE
    min_clients: int = 0


class FlowerEngine:
    """Sends messages to the cohort's nodes, one client each, and uses only intact, finite and expected answers.

    A client that misses an exchange drops out of the round. With `states` the clients' states are files of this
    machine (a simulation), else they stay on the nodes and a checkpoint has only their versions.
    """

    def __init__(
        self,
        grid: Grid,
        roster: Roster,
        task: Task,
        method: AnyMethod,
        plan: Plan,
        *,
        run: str,
        limits: Limits,
        classes: int | None = None,
        states: Path | None = None,
    ) -> None:
        self._grid = grid
        self._roster = roster
        self._method = method
        self.run = run
        self._limits = limits
        self._fingerprint = fingerprint(task, method)
        self._device = task.device
        self._checks = UploadChecks(task, plan, classes)
        self._states = states
        self._accepted: dict[int, Version] = {}
        self._at_round_end: dict[int, Version] = {}
        self._on_disk: deque[dict[int, Version]] = deque(maxlen=_CHECKPOINTS)
        self._cache: dict[int, tuple[Version, State]] = {}
        self.missing: dict[int, str] = {}

    def exchange(self, clients: Sequence[int], down: Message, at: At) -> Answers:
        self.begin(at)
        sent: dict[int, Message] = {}
        messages: list[Envelope] = []
        timeout = self._limits.deadline or ROUND_TIMEOUT
        for row, client in enumerate(clients):
            if client in self.missing:
                continue
            node = self._roster.node(client)
            if node is None:
                self.drop(client, at, "no node of it is online")
                continue
            sent[client] = down.rows([row])
            content = pack_order(self.order(client, sent[client], at))
            messages.append(Envelope(content, node, EXCHANGE, ttl=timeout, group_id=f"{at.round}"))
        remembering: set[int] = set()
        uploads = self._collect(sent, messages, timeout, at, remembering)
        for client, problem in self._checks.mismatched(uploads).items():
            del uploads[client]
            self.drop(client, at, problem)
        for client in sent.keys() - uploads.keys() - self.missing.keys():
            self.drop(client, at, f"no answer within {timeout:g} s, or its node went offline")
        answered = sorted(uploads)
        if not answered or len(answered) < self._limits.min_clients:
            return Answers((), None, dict(self.missing))
        self.accept(remembering.intersection(answered), at)
        up = self._method.up_type.concatenate([uploads[client] for client in answered])
        return Answers(tuple(answered), self.on_device(up), dict(self.missing))

    def begin(self, at: At) -> None:
        """Start a round: reset dropouts, and update the list of online nodes."""
        if at.exchange == 0:
            self.missing.clear()
            self._roster.refresh()

    def accept(self, clients: Iterable[int], at: At) -> None:
        """Mark the states of these clients after this exchange as the current ones."""
        self._accepted |= dict.fromkeys(clients, (at.round, at.exchange))

    def on_device(self, up: Message) -> Message:
        return up.map(lambda _, leaf: leaf.to(self._device))

    def ask_leg(
        self, asked: Mapping[int, RecordDict], name: str, key: tuple[str, int, int], at: At
    ) -> tuple[dict[int, Leg], int, int]:
        """The answers of these clients to a leg of a secure sum, and the bytes sent and received."""
        timeout = self._limits.deadline or ROUND_TIMEOUT
        nodes = {client: self._roster.node(client) for client in asked}
        messages = [
            Envelope(asked[client], node, LEG, ttl=timeout, group_id=f"{at.round}")
            for client, node in nodes.items()
            if node is not None
        ]
        found: dict[int, Leg] = {}
        received = 0
        for reply in send_and_receive(self._grid, messages, timeout) if messages else []:
            if reply.has_error():
                log.warning("round %d: a node failed: %s", at.round, reply.error.reason)
                continue
            client = self._roster.client(reply.metadata.src_node_id)
            if client is None or client not in asked:
                continue
            received += size_of(reply.content)
            try:
                leg = read_leg(reply.content, self._limits.max_message)
                if (leg.name, leg.key, leg.version) != (name, key, VERSION):
                    raise RefusalError("message", f"it answers the leg {leg.name!r:.20} of {leg.key}")
                found[client] = leg
            except RefusalError as refusal:
                self.drop(client, at, str(refusal))
        for client in asked.keys() - found.keys() - self.missing.keys():
            absent = "no node of it is online"
            late = f"no answer to {name!r} within {timeout:g} s, or its node went offline"
            self.drop(client, at, absent if nodes[client] is None else late)
        return found, sum(size_of(message.content) for message in messages), received

    def order(self, client: int, down: Message, at: At) -> Order:
        held = [self._at_round_end, *self._on_disk, self._accepted]
        needed = sorted({versions[client] for versions in held if client in versions})
        state = self._accepted.get(client)
        body = down.to_bytes()
        return Order(self.run, client, at, VERSION, self._fingerprint, state, tuple(needed), body)

    def _collect(
        self,
        sent: Mapping[int, Message],
        messages: Sequence[Envelope],
        timeout: float,
        at: At,
        remembering: set[int],
    ) -> dict[int, Message]:
        """The valid uploads; clients that keep a state are added to `remembering`."""
        uploads: dict[int, Message] = {}
        for reply in send_and_receive(self._grid, messages, timeout) if messages else []:
            if reply.has_error():  # such a reply does not name its node; missing clients are determined below
                log.warning("round %d: a node failed: %s", at.round, reply.error.reason)
                continue
            node = reply.metadata.src_node_id
            client = self._roster.client(node)
            if client is None or client not in sent:
                log.warning("round %d: %s answered without being asked", at.round, self._roster.names(node))
                continue
            try:
                uploads[client], remembers = self._read(client, sent[client], reply, at)
                if remembers:
                    remembering.add(client)
            except RefusalError as refusal:
                self.drop(client, at, str(refusal))
        return uploads

    def _read(self, client: int, sent: Message, reply: Envelope, at: At) -> tuple[Message, bool]:
        answer = read_reply(reply.content, self._limits.max_message)
        require_same((answer.version, answer.fingerprint), (VERSION, self._fingerprint), "its")
        if (answer.client, answer.round, answer.exchange) != (client, at.round, at.exchange):
            raise RefusalError("message", f"it answers for client {answer.client} of round {answer.round}")
        up = read_upload(self._method, answer.up)
        self._checks.require_fit(sent, up)
        require_explained(self._method, at, sent, up)
        return up, answer.remembers

    def drop(self, client: int, at: At, problem: str) -> None:
        self.missing[client] = problem
        node = self._roster.node(client)
        where = "" if node is None else f", {self._roster.names(node)},"
        log.warning(
            "round %d, exchange %d: client %d%s dropped out: %s",
            at.round,
            at.exchange,
            client,
            where,
            problem,
        )

    def leave_out(self, client: int, at: At, problem: str) -> bool:
        if self._states is not None:
            return False  # a simulation
        self.drop(client, at, problem)
        return True

    def own(self, record: R) -> R:
        return record

    def state(self) -> Mapping[int, State]:
        self._at_round_end = dict(self._accepted)
        if self._states is None:
            return {client: {"version": torch.tensor(version)} for client, version in self._accepted.items()}
        for client, version in self._accepted.items():
            if client not in self._cache or self._cache[client][0] != version:
                held = StateStore(self._states / str(client), self.run).load(version)
                if held is None:
                    raise FedveilError(
                        f"the state of client {client} is missing in {self._states}",
                        field="state",
                        value=client,
                    )
                self._cache[client] = (version, held)
        return {client: state for client, (_, state) in self._cache.items()}

    def restore(self, state: Mapping[int, State]) -> None:
        if self._states is None:
            for client, held in state.items():
                round_, exchange = held["version"].tolist()
                self._accepted[client] = (int(round_), int(exchange))
        else:
            for client, held in state.items():
                StateStore(self._states / str(client), self.run).save(_RESTORED, held)
                self._accepted[client] = _RESTORED
                self._cache[client] = (_RESTORED, dict(held))
        self._at_round_end = dict(self._accepted)
        self._on_disk.append(dict(self._accepted))

    def saved(self) -> None:
        """Delete state versions that no kept checkpoint needs."""
        self._on_disk.append(dict(self._at_round_end))

    def close(self) -> None:
        """Do nothing: the nodes keep running."""
