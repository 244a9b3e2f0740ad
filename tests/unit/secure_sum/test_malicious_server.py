"""A server that breaks the protocol is refused by the node, and the refusal is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil.secure_sum import primitives
from fedveil.secure_sum.identities import Identity, Roster
from fedveil.secure_sum.journal import Journal
from fedveil.secure_sum.masks import Words
from fedveil.secure_sum.messages import (
    AbandonedError,
    Advertisement,
    Confirmation,
    RefusedError,
    SealedShares,
)
from fedveil.secure_sum.node import NodeRound
from fedveil.secure_sum.server import ServerRound
from fedveil.secure_sum.settings import SecureSum
from tests.unit.secure_sum.in_process import Federation

Refusal = Callable[[], AbstractContextManager[None]]
ZEROS: Words = np.zeros(8, dtype=np.uint32)


@pytest.fixture
def refusal(caplog: pytest.LogCaptureFixture) -> Refusal:
    @contextmanager
    def expect() -> Iterator[None]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fedveil.secure_sum"), pytest.raises(RefusedError) as caught:
            yield
        assert str(caught.value) in caplog.text

    return expect


@pytest.fixture
def five() -> Federation:
    return Federation(5)


def started(federation: Federation, round_: int = 1) -> tuple[list[NodeRound], list[Advertisement]]:
    nodes = list(federation.nodes(federation.terms(round_)).values())
    return nodes, [node.advertise() for node in nodes]


def shared(federation: Federation, round_: int = 1) -> tuple[list[NodeRound], list[SealedShares]]:
    nodes, keys = started(federation, round_)
    return nodes, [share for node in nodes for share in node.share(keys)]


def to(node: NodeRound, shares: list[SealedShares]) -> list[SealedShares]:
    return [share for share in shares if share.receiver == node.node]


def uploaded(federation: Federation) -> list[NodeRound]:
    nodes, shares = shared(federation)
    for node in nodes:
        node.upload(to(node, shares), ZEROS)
    return nodes


def resigned(one: Advertisement, federation: Federation, by: Identity, round_: int = 1) -> Advertisement:
    return replace(one, signature=by.sign(one.text(federation.terms(round_))))


def test_swapped_unsigned_and_replayed_keys_are_refused(five: Federation, refusal: Refusal) -> None:
    """A man in the middle puts in keys of his own, with no, another's or an old signature."""
    _, old = started(five, 1)
    stranger = Identity.generate("node-000")
    fakes: tuple[Callable[[Advertisement], Advertisement], ...] = (
        lambda one: replace(one, mask_key=primitives.agreement_public(primitives.random_key())),
        lambda one: replace(one, mask_key=one.share_key, share_key=one.mask_key),
        lambda one: replace(one, signature=b""),
        lambda one: replace(one, signature=bytes(64)),
        lambda one: resigned(one, five, stranger, 2),
        lambda _: old[0],
        lambda one: replace(one, mask_key=b"short"),
    )
    for fake in fakes:
        five.journals = {name: Journal() for name in five.names}
        nodes, keys = started(five, 2)
        with refusal():
            nodes[1].share([fake(keys[0]), *keys[1:]])
        with refusal():  # it takes no further part
            nodes[1].share(keys)


def test_keys_that_are_no_keys_or_used_twice_are_refused(five: Federation, refusal: Refusal) -> None:
    nodes, keys = started(five)
    weak = resigned(replace(keys[0], share_key=bytes(32)), five, five.identities[0])
    with refusal():
        nodes[1].share([weak, *keys[1:]])
    same = resigned(replace(keys[0], mask_key=keys[2].mask_key), five, five.identities[0])
    with refusal():
        nodes[3].share([same, *keys[1:]])


def test_unknown_and_duplicate_nodes_are_refused(five: Federation, refusal: Refusal) -> None:
    nodes, keys = started(five)
    stranger = Identity.generate("stranger")
    with refusal():
        nodes[0].share([*keys, resigned(replace(keys[0], node="stranger"), five, stranger)])
    with refusal():
        nodes[1].share([*keys, keys[0]])
    with refusal():
        nodes[2].share(keys[:3])  # below the threshold
    with refusal():
        nodes[3].share([key for key in keys if key.node != nodes[3].node])


@pytest.mark.parametrize(
    "change",
    [
        {"threshold": 3},
        {"threshold": 5},
        {"colluders": 0},
        {"roster": bytes(32)},
        {"length": 0},
        {"nodes": ("node-000", "node-001", "node-002", "node-003", "node-003")},
        {"nodes": ("node-000", "node-001", "node-002", "node-003", "stranger")},
        {"nodes": ("node-001", "node-002", "node-003", "node-004")},
        {"nodes": ("node-001", "node-000", "node-002", "node-003", "node-004")},
        {"nodes": ("node-000", "node-001")},
    ],
)
def test_terms_that_are_not_the_nodes_own_are_refused(
    five: Federation, refusal: Refusal, change: dict[str, Any]
) -> None:
    with refusal():
        five.node(0, replace(five.terms(), **change))


def test_a_node_whose_key_is_not_on_the_roster_refuses(five: Federation, refusal: Refusal) -> None:
    other = Roster(dict(five.roster.keys) | {"node-000": Identity.generate("node-000").public})
    with refusal():
        NodeRound(
            five.identities[0], other, SecureSum(), replace(five.terms(), roster=other.digest), Journal()
        )


def test_altered_misdirected_and_replayed_shares_are_refused(five: Federation, refusal: Refusal) -> None:
    _, old = shared(five, 1)
    fakes: tuple[Callable[[SealedShares], SealedShares], ...] = (
        lambda share: replace(share, sealed=share.sealed[:-1] + bytes([share.sealed[-1] ^ 1])),
        lambda share: replace(share, sealed=next(s for s in old if s.receiver == share.receiver).sealed),
        lambda share: replace(share, receiver="node-004"),
        lambda share: replace(share, sender="stranger"),
        lambda share: replace(share, sender="node-004"),
        lambda share: replace(share, sealed=b""),
    )
    for fake in fakes:
        five.journals = {name: Journal() for name in five.names}
        nodes, shares = shared(five, 2)
        first, *others = to(nodes[0], shares)
        with refusal():
            nodes[0].upload([fake(first), *others], ZEROS)


def test_too_few_or_repeated_shares_are_refused(five: Federation, refusal: Refusal) -> None:
    nodes, shares = shared(five)
    with refusal():
        nodes[0].upload(to(nodes[0], shares)[:2], ZEROS)
    mine = to(nodes[1], shares)
    with refusal():
        nodes[1].upload([*mine, mine[0]], ZEROS)


def test_lists_of_survivors_that_do_not_fit_are_refused(five: Federation, refusal: Refusal) -> None:
    names = list(five.names)
    for survivors in ([*names, names[0]], [*names[:4], "stranger"], names[:3], names[1:]):
        five.journals = {name: Journal() for name in five.names}
        node = uploaded(five)[0]
        with refusal():
            node.confirm(survivors)


def test_lists_of_survivors_that_differ_between_nodes_are_refused(five: Federation, refusal: Refusal) -> None:
    """Two nodes get different lists of dropouts: neither finds enough signatures on its own list."""
    nodes = uploaded(five)
    names = five.names
    all_, some = names, names[:4]
    signed = [node.confirm(all_ if i in (0, 4) else some) for i, node in enumerate(nodes)]  # two and three
    with refusal():
        nodes[0].unmask(all_, signed)
    with refusal():
        nodes[1].unmask(some, signed[1:4])
    with refusal():
        nodes[2].unmask(all_, signed)  # not the list that it signed


def test_overlapping_lists_cannot_give_both_secrets_of_a_node(five: Federation) -> None:
    """Survivors and dropouts are told apart by the one list that was signed."""
    nodes = uploaded(five)
    survivors = five.names[:4]
    signed = [node.confirm(survivors) for node in nodes[:4]]
    for node in nodes[:4]:
        answer = node.unmask(survivors, signed)
        assert set(answer.seeds) == set(survivors)
        assert set(answer.mask_keys) == {"node-004"}
        assert not set(answer.seeds) & set(answer.mask_keys)


def test_signatures_that_do_not_count_are_refused(five: Federation, refusal: Refusal) -> None:
    names = five.names
    changes: tuple[Callable[[list[Confirmation]], list[Confirmation]], ...] = (
        lambda signed: signed[:3],
        lambda signed: [signed[0], *signed[:3]],
        lambda signed: [*signed[:3], replace(signed[3], signature=bytes(64))],
        lambda signed: [*signed[:4], Confirmation("stranger", signed[4].signature)],
    )
    for change in changes:
        five.journals = {name: Journal() for name in names}
        nodes = uploaded(five)
        signed = [node.confirm(names) for node in nodes]
        with refusal():
            nodes[0].unmask(names, change(signed))


def test_a_second_unmasking_is_refused(five: Federation, refusal: Refusal) -> None:
    nodes = uploaded(five)
    signed = [node.confirm(five.names) for node in nodes]
    nodes[0].unmask(five.names, signed)
    with refusal():
        nodes[0].unmask(five.names, signed)
    with refusal():
        nodes[0].confirm(five.names[:4])


def test_legs_out_of_order_are_refused(five: Federation, refusal: Refusal) -> None:
    nodes, keys = started(five)
    with refusal():
        nodes[0].confirm(five.names)
    with refusal():
        nodes[1].unmask(five.names, [])
    with refusal():
        nodes[2].advertise()
    with refusal():
        nodes[3].upload([], ZEROS)
    assert keys


def test_a_restarted_node_drops_out(five: Federation, refusal: Refusal, tmp_path: Path) -> None:
    """Its journal is on disk: the same attempt is refused, another is not."""
    path = tmp_path / "journal"
    five.journals["node-000"] = Journal(path)
    five.node(0, five.terms()).advertise()
    five.journals["node-000"] = Journal(path)  # the process starts again
    with refusal():
        five.node(0, five.terms())
    five.node(0, five.terms(attempt=2)).advertise()
    five.node(0, five.terms(run="another")).advertise()
    with refusal():
        five.node(0, five.terms(attempt=2))


def test_an_answer_is_recorded_before_it_is_given(five: Federation, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    five.journals["node-000"] = Journal(path)
    nodes = uploaded(five)
    signed = [node.confirm(five.names) for node in nodes]
    nodes[0].unmask(five.names, signed)
    assert [line.split(",")[0] for line in path.read_text().splitlines()] == ['["begun"', '["unmasked"']
    assert not Journal(path).record("unmasked", five.terms().key)


def test_wrong_answers_of_nodes_count_as_dropouts_or_end_the_round(five: Federation) -> None:
    terms = five.terms()
    nodes, server = list(five.nodes(terms).values()), ServerRound(five.roster, terms)
    keys = [node.advertise() for node in nodes]
    relayed = server.advertised([replace(keys[0], mask_key=bytes(32)), *keys[1:]])
    assert [one.node for one in relayed] == list(five.names[1:])
    sealed = server.shared([node.share(relayed) for node in nodes[1:]])
    sent = [node.upload(sealed[node.node], ZEROS) for node in nodes[1:]]
    with pytest.raises(AbandonedError) as caught:
        server.uploaded([*sent[:3], replace(sent[3], values=sent[3].values[:5])])
    assert caught.value.leg == "upload"
    survivors = server.uploaded(sent)
    signed = server.confirmed([node.confirm(survivors) for node in nodes[1:]])
    answers = [node.unmask(survivors, signed) for node in nodes[1:]]
    wrong = replace(answers[0], seeds={name: bytes(33) for name in survivors})
    with pytest.raises(AbandonedError):
        server.total([*answers[1:], replace(wrong, node="node-000")])
    assert (server.total(answers) == 0).all()


def test_a_journal_is_read_again_before_it_is_written(tmp_path: Path) -> None:
    """Two processes that were asked at once; and one that was killed while it wrote."""
    path = tmp_path / "journal.jsonl"
    one, other = Journal(path), Journal(path)
    key = ("run", 1, 1)
    assert one.record("begun", key)
    assert not other.record("begun", key)
    with path.open("a") as file:
        file.write('["unmasked", "ru')
    third = Journal(path)
    assert third.record("unmasked", key)
    assert not Journal(path).record("unmasked", key)
    assert not Journal(path).record("begun", key)
