"""The engine of a federation with secure sums: an exchange has five legs, after which the server knows only a sum."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedveil.atomic_files import write_atomically
from fedveil.engines.engine import Answers
from fedveil.engines.flower.engine import FlowerEngine
from fedveil.engines.flower.wire import Leg, pack_leg
from fedveil.errors import FedveilError, InputError
from fedveil.messages import Message, Record
from fedveil.methods.method import At
from fedveil.methods.secure import IntegerUpload, SecurelyAggregated
from fedveil.privacy.secure_noise import group_of
from fedveil.secure_sum.encoding import (
    listed,
    plain,
    read_advertisement,
    read_confirmation,
    read_shares,
    read_unmasking,
)
from fedveil.secure_sum.identities import Roster, Terms
from fedveil.secure_sum.masks import Words
from fedveil.secure_sum.messages import AbandonedError, MaskedUpload
from fedveil.secure_sum.server import ServerRound
from fedveil.tree import State

log = logging.getLogger("flwr.fedveil")
ATTEMPTS = "attempts.json"
LEGS = "legs.jsonl"
R = TypeVar("R", bound=Record)
T = TypeVar("T")


@dataclass(frozen=True)
class LegReport:
    """The traffic and time of one leg; `nodes` is the number of nodes that answered."""

    round: int
    attempt: int
    leg: str
    asked: int
    nodes: int
    bytes_down: int
    bytes_up: int
    seconds: float


class SecureEngine:
    """Runs the server's half of the protocol through the nodes of a `FlowerEngine`.

    Guarantees: what it returns is the sum modulo 2^32 of at least the threshold's number of uploads, or nothing
    (`test_a_deployment_ends_with_the_bits_of_the_simulator`, `test_below_the_threshold_a_round_is_abandoned`).

    Args:
        flower: Reaches the nodes.
        roster: All nodes' public keys.
        clients: The node name of each client.
        folder: The folder for the attempt counter and the reports of legs.
    """

    def __init__(
        self,
        flower: FlowerEngine,
        method: SecurelyAggregated,
        roster: Roster,
        clients: Mapping[int, str],
        folder: Path,
    ) -> None:
        self._flower = flower
        self._method = method
        self._roster = roster
        self._names = clients
        self._folder = folder

    def exchange(self, clients: Sequence[int], down: Message, at: At) -> Answers:
        flower = self._flower
        flower.begin(at)
        terms = self._terms(clients, down, at)
        by_name = {self._names[client]: client for client in clients}
        legs = _Legs(flower, terms, by_name, at, self._report)
        try:
            words, survivors, remembering = legs.run(self._roster, down)
        except AbandonedError as error:
            log.warning("%s", error)
            return Answers((), None, dict(flower.missing))
        answered = tuple(sorted(by_name[name] for name in survivors))
        flower.accept([client for client in remembering if client in answered], at)
        up = IntegerUpload.of_words(words, self._method.shapes(down), len(answered))
        return Answers(answered, flower.on_device(up), dict(flower.missing))

    def _terms(self, clients: Sequence[int], down: Message, at: At) -> Terms:
        if down.count != 1 or at.exchange:
            raise FedveilError(
                "a secure sum needs one message for all nodes and one exchange in a round",
                field="aggregation.kind",
            )
        if unknown := [client for client in clients if client not in self._names]:
            raise InputError("roster", unknown, "has no node of these clients", "Add them to the roster.")
        group = group_of(self._method.settings, at.plan)
        nodes = tuple(sorted(self._names[client] for client in clients))
        length = sum(shape.numel() for shape in self._method.shapes(down).values())
        attempt = self._next_attempt(at.round)
        run = self._flower.run
        return Terms(
            run, at.round, attempt, nodes, group.threshold, group.colluders, length, self._roster.digest
        )

    def _next_attempt(self, round_: int) -> int:
        """The number of the next attempt at a round, persistent across restarts. Nodes answer each at most once."""
        path = self._folder / ATTEMPTS
        known: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
        known[str(round_)] = known.get(str(round_), 0) + 1
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(known).encode())
        return known[str(round_)]

    def _report(self, report: LegReport) -> None:
        with (self._folder / LEGS).open("a") as file:
            file.write(json.dumps(asdict(report)) + "\n")

    def leave_out(self, client: int, at: At, problem: str) -> bool:
        return False  # a term cannot be removed from the sum

    def own(self, record: R) -> R:
        return self._flower.own(record)

    def state(self) -> Mapping[int, State]:
        return self._flower.state()

    def restore(self, state: Mapping[int, State]) -> None:
        self._flower.restore(state)

    def saved(self) -> None:
        self._flower.saved()

    def close(self) -> None:
        self._flower.close()


@dataclass(frozen=True)
class _Legs:
    """One attempt at a round."""

    flower: FlowerEngine
    terms: Terms
    clients: Mapping[str, int]
    at: At
    report: Callable[[LegReport], None]

    def run(self, roster: Roster, down: Message) -> tuple[Words, tuple[str, ...], list[int]]:
        """The sum, the clients whose uploads are in it, and those that keep a state of this exchange."""
        asked, length = down.to_bytes(), self.terms.length
        server = ServerRound(roster, self.terms, asked)
        remembering: list[int] = []

        def uploaded(name: str, leg: Leg) -> MaskedUpload:
            if leg.remembers:
                remembering.append(self.clients[name])
            if leg.body is None or len(leg.body) != 4 * length:
                raise ValueError("an upload of another length")
            return MaskedUpload(name, np.frombuffer(leg.body, dtype="<u4").astype(np.uint32))

        first = dict.fromkeys(self.terms.nodes, plain(self.terms))
        keys = server.advertised(
            self._leg("advertise", first, lambda name, leg: read_advertisement(leg.content, name))
        )
        self._drop(first, [one.node for one in keys], "its keys are not signed for these terms")
        sent = dict.fromkeys([one.node for one in keys], plain(keys))
        sealed = server.shared(
            self._leg(
                "share", sent, lambda name, leg: [read_shares(one, name) for one in listed(leg.content)]
            )
        )
        self._drop(sent, sealed, "its shares are invalid")
        given = {name: plain(shares) for name, shares in sealed.items()}
        survivors = server.uploaded(self._leg("upload", given, uploaded, down))
        self._drop(given, survivors, "its upload is invalid")
        lists = {name: list(survivors) for name in survivors}
        signed = server.confirmed(
            self._leg("confirm", lists, lambda name, leg: read_confirmation(leg.content, name))
        )
        last = {"survivors": list(survivors), "confirmed": plain(signed)}
        shown = self._leg(
            "unmask",
            dict.fromkeys([one.node for one in signed], last),
            lambda name, leg: read_unmasking(leg.content, name),
        )
        return server.total(shown), survivors, remembering

    def _leg(
        self,
        name: str,
        content: Mapping[str, Any],
        read: Callable[[str, Leg], T],
        down: Message | None = None,
    ) -> list[T]:
        """The answers of the nodes, in the order of their names; nodes that do not answer drop out."""
        began = time.monotonic()
        asked = {}
        for node, part in content.items():
            client = self.clients[node]
            order = None if down is None else self.flower.order(client, down, self.at)
            asked[client] = pack_leg(Leg(name, self.terms.key, part, order=order))
        answers, sent, received = self.flower.ask_leg(asked, name, self.terms.key, self.at)
        found = []
        for node, client in sorted(self.clients.items()):
            if client in answers:
                try:
                    found.append(read(node, answers[client]))
                except (ValueError, TypeError, AttributeError, KeyError) as error:
                    problem = f"its answer to {name!r} cannot be read ({type(error).__name__})"
                    self.flower.drop(client, self.at, problem)
        seconds = time.monotonic() - began
        self.report(
            LegReport(
                self.at.round, self.terms.attempt, name, len(asked), len(found), sent, received, seconds
            )
        )
        log.info(
            "round %d, attempt %d, %s: %d of %d nodes, %d bytes down, %d up, %.1f s",
            *(self.at.round, self.terms.attempt, name, len(found), len(asked), sent, received, seconds),
        )
        return found

    def _drop(self, asked: Mapping[str, Any], kept: Collection[str], problem: str) -> None:
        """Log nodes that answered but drop out because of their answer."""
        for name in asked:
            client = self.clients[name]
            if name not in kept and client not in self.flower.missing:
                self.flower.drop(client, self.at, problem)
