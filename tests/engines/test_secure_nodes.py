"""A malicious server against deployed nodes: it speaks the wire's own language and knows the code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import Context, RecordDict

from fedveil.engines.flower import roster as roster_module
from fedveil.engines.flower.wire import (
    VERSION,
    Leg,
    Order,
    RefusalError,
    fingerprint,
    pack_leg,
    pack_order,
    read_leg,
    read_reply,
)
from fedveil.errors import FedveilError, InputError
from fedveil.experiment.config import Config
from fedveil.federation import membership
from fedveil.federation.client_app import node_of, secure_node_of
from fedveil.federation.config import SESSION
from fedveil.federation.identity_files import (
    PUBLIC_FILE,
    ROSTER_FILE,
    change_roster,
    join,
    read_roster,
    trust,
)
from fedveil.federation.launch import with_shape
from fedveil.federation.node import open_node
from fedveil.federation.run_settings import RunSettings
from fedveil.methods.method import At
from fedveil.privacy.releases import Plan
from fedveil.secure_sum import primitives
from fedveil.secure_sum.encoding import plain
from fedveil.secure_sum.identities import Terms
from tests.engines.secure import NODES, run_securely, secure_config, write_secure_nodes

PLAN = Plan(NODES, NODES, "all", 9, 1, 240)


class Server:
    """All that a server can send, and the nodes' answers."""

    def __init__(self, folders: list[Path], config: Config | None = None) -> None:
        self.folders = folders
        self.config = with_shape(config or secure_config(run={"rounds": 9}), None)
        self.roster = read_roster(folders[0].parent / ROSTER_FILE)
        given = RunSettings(self.config, 0, "test", folders[0]).to_run_config()
        self.contexts = [
            Context(1, 1, {"fedveil-node": str(folder)}, RecordDict(), dict(given)) for folder in folders
        ]
        node = node_of(self.contexts[0])
        self.task, self.method = node.worker.task, node.worker.method
        server = self.method.init_server(self.task.init(0), PLAN)
        self.down = self.method.broadcast(At(PLAN, 1), server, range(NODES))

    def terms(self, round_: int = 1, attempt: int = 1, **changes: Any) -> Terms:
        names = tuple(sorted(self.roster.clients.values()))
        length = sum(leaf[0].numel() for leaf in self.down.tensors().values())
        made = Terms("run", round_, attempt, names, 4, 1, length, self.roster.roster.digest)
        return replace(made, **changes)

    def ask(self, client: int, leg: Leg) -> Leg:
        node, limit = secure_node_of(self.contexts[client])
        return read_leg(node.answer(pack_leg(leg), limit))

    def order(self, client: int, round_: int = 1, **changes: Any) -> Order:
        mark = fingerprint(self.task, self.method)
        made = Order("run", client, At(PLAN, round_), VERSION, mark, None, (), self.down.to_bytes())
        return replace(made, **changes)

    def advertised(self, terms: Terms, clients: range = range(NODES)) -> list[Any]:
        return [self.ask(i, Leg("advertise", terms.key, plain(terms))).content for i in clients]

    def shared(self, terms: Terms) -> dict[str, list[Any]]:
        """The sealed shares for each node."""
        keys = self.advertised(terms)
        sent = [s for i in range(NODES) for s in self.ask(i, Leg("share", terms.key, keys)).content]
        return {name: [s for s in sent if s["receiver"] == name] for name in terms.nodes}

    def uploaded(self, terms: Terms, orders: dict[int, Order] | None = None) -> list[Leg]:
        given = self.shared(terms)
        return [
            self.ask(
                i,
                Leg(
                    "upload",
                    terms.key,
                    given[terms.nodes[i]],
                    order=(orders or {}).get(i, self.order(i, terms.round)),
                ),
            )
            for i in range(NODES)
        ]

    def confirmed(self, terms: Terms, survivors: list[str], clients: range = range(NODES)) -> list[Any]:
        return [
            {"node": terms.nodes[i], **self.ask(i, Leg("confirm", terms.key, survivors)).content}
            for i in clients
        ]


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(write_secure_nodes(tmp_path / "nodes", seeded=False))


@contextmanager
def refused(reason: str) -> Iterator[None]:
    """The node refuses for this reason."""
    with pytest.raises(RefusalError) as caught:
        yield
    assert caught.value.reason == reason


def test_an_unmasked_upload_is_refused(server: Server) -> None:
    """Its noise is one share only, so an order without masks would take the server's word for the rest."""
    answer = node_of(server.contexts[0]).answer(pack_order(server.order(0)))
    with pytest.raises(RefusalError) as caught:
        read_reply(answer)
    assert caught.value.reason == "policy"
    assert len(open_node(server.folders[0]).guard.ledger) == 0


def test_a_round_is_charged_before_it_is_computed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    given = server.shared(server.terms())
    assert len(open_node(server.folders[0]).guard.ledger) == 0, "keys say nothing of the data"

    def power_cut(*_: Any, **__: Any) -> Any:
        raise RuntimeError("power cut")

    monkeypatch.setattr("fedveil.engines.worker.ClientWorker.update", power_cut)
    with refused("error"):
        server.ask(0, Leg("upload", server.terms().key, given["node-0"], order=server.order(0)))
    assert len(open_node(server.folders[0]).guard.ledger) > 0


@pytest.mark.parametrize("leg", ["share", "upload", "confirm", "unmask"])
def test_a_leg_is_answered_once(server: Server, leg: str) -> None:
    """A second upload under the same masks would show the difference of two noises, a second list another sum."""
    terms = server.terms()
    names = list(terms.nodes)
    if leg == "share":
        keys = server.advertised(terms)
        asked = Leg("share", terms.key, keys)
    elif leg == "upload":
        asked = Leg("upload", terms.key, server.shared(terms)["node-0"], order=server.order(0))
    elif leg == "confirm":
        server.uploaded(terms)
        asked = Leg("confirm", terms.key, names)
    else:
        server.uploaded(terms)
        signed = server.confirmed(terms, names)
        asked = Leg("unmask", terms.key, {"survivors": names, "confirmed": signed})
    server.ask(0, asked)
    with refused("protocol"):
        server.ask(0, asked)


@pytest.mark.parametrize("leg", ["share", "upload", "confirm", "unmask"])
def test_a_restarted_node_drops_out_of_the_round(
    server: Server, leg: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = server.terms()
    names = list(terms.nodes)
    if leg == "share":
        asked = Leg("share", terms.key, server.advertised(terms))
    elif leg == "upload":
        asked = Leg("upload", terms.key, server.shared(terms)["node-0"], order=server.order(0))
    else:
        server.uploaded(terms)
        asked = Leg("confirm", terms.key, names)
        if leg == "unmask":
            content = {"survivors": names, "confirmed": server.confirmed(terms, names)}
            asked = Leg("unmask", terms.key, content)
    monkeypatch.setenv(SESSION, primitives.random_key().hex())
    with refused("protocol"):
        server.ask(0, asked)
    with refused("protocol"):  # nor can the attempt begin again
        server.ask(0, Leg("advertise", terms.key, plain(terms)))
    server.advertised(server.terms(attempt=2))  # another can


def test_models_that_differ_between_nodes_are_refused(server: Server) -> None:
    """Models that make the others answer with nothing would leave one node alone in the sum."""
    other = server.down.map(lambda _, leaf: torch.zeros_like(leaf))
    terms = server.terms()
    server.uploaded(terms, {i: server.order(i, down=other.to_bytes()) for i in range(1, NODES)})
    names = list(terms.nodes)
    signed = server.confirmed(terms, names)
    with refused("protocol"):
        server.ask(0, Leg("unmask", terms.key, {"survivors": names, "confirmed": signed}))


def test_two_lists_of_survivors_never_both_find_enough_signatures(server: Server) -> None:
    """One for some nodes, another for the rest: neither is signed by the threshold's number."""
    terms = server.terms()
    server.uploaded(terms)
    names = list(terms.nodes)
    one, two = names, names[:4]
    signed = [*server.confirmed(terms, one, range(3)), *server.confirmed(terms, two, range(3, 4))]
    for client, shown in ((0, one), (3, two)):
        for given in (signed, signed[:3], signed[3:], [signed[0]] * 4):
            with refused("protocol"):
                server.ask(client, Leg("unmask", terms.key, {"survivors": shown, "confirmed": given}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"threshold": 3}, "protocol"),
        ({"colluders": 0}, "policy"),
        ({"threshold": 5, "colluders": 2}, "protocol"),
        ({"nodes": ("node-0", "node-1", "node-2")}, "protocol"),
        ({"nodes": ("node-0", "node-1", "node-2", "node-3", "node-9")}, "protocol"),
        ({"nodes": ("node-0", "node-1", "node-1", "node-2", "node-3")}, "protocol"),
        ({"roster": bytes(32)}, "protocol"),
        ({"length": 0}, "protocol"),
    ],
)
def test_terms_that_are_not_the_nodes_own_are_refused(
    server: Server, changes: dict[str, Any], reason: str
) -> None:
    terms = server.terms(**changes)
    with refused(reason):
        server.ask(0, Leg("advertise", terms.key, plain(terms)))


def test_a_plan_with_fewer_clients_than_are_invited_is_refused(server: Server) -> None:
    """The charge of a round follows from the plan, its noise from the terms: they must speak of one group."""
    terms = server.terms()
    given = server.shared(terms)
    smaller = Plan(NODES, 4, "fixed", 9, 1, 240)
    with refused("plan"):
        order = server.order(0, at=At(smaller, 1))
        server.ask(0, Leg("upload", terms.key, given["node-0"], order=order))
    assert len(open_node(server.folders[0]).guard.ledger) == 0


@pytest.mark.parametrize(
    "changes", [{"run": "other"}, {"at": At(PLAN, 2)}, {"at": At(PLAN, 1, 1)}, {"client": 1}]
)
def test_orders_of_another_round_are_refused(server: Server, changes: dict[str, Any]) -> None:
    terms = server.terms()
    given = server.shared(terms)
    order = replace(server.order(0), **changes)
    with pytest.raises(RefusalError):
        server.ask(0, Leg("upload", terms.key, given["node-0"], order=order))
    assert len(open_node(server.folders[0]).guard.ledger) == 0


def test_a_vector_of_another_length_is_refused(server: Server) -> None:
    terms = server.terms(length=17)
    given = server.shared(terms)
    with refused("plan"):
        server.ask(0, Leg("upload", terms.key, given["node-0"], order=server.order(0)))


@pytest.mark.parametrize("content", [None, 3, "x", [], {}, [[]], [{"node": 1}], [{"mask_key": "zz"}]])
@pytest.mark.parametrize("leg", ["advertise", "share", "upload", "confirm", "unmask", "other"])
def test_nonsense_is_refused_without_an_error(server: Server, leg: str, content: Any) -> None:
    terms = server.terms()
    if leg != "advertise":
        server.advertised(terms, range(1))
    with pytest.raises(RefusalError):
        server.ask(0, Leg(leg, terms.key, content))


def test_another_version_is_refused(server: Server) -> None:
    terms = server.terms()
    with refused("version"):
        server.ask(0, Leg("advertise", terms.key, plain(terms), version="9.9"))


def test_secrets_of_a_round_are_sealed_on_disk(server: Server) -> None:
    terms = server.terms()
    server.shared(terms)
    place = server.folders[0] / "state" / "secure"
    (file,) = place.glob("*.round")
    assert file.stat().st_mode & 0o077 == 0
    assert b"node-" not in file.read_bytes()
    saved = membership.open_membership(server.folders[0]).store.take(terms.key)
    assert saved is not None
    private = json.loads(saved)[2]
    assert all(
        bytes.fromhex(secret) not in file_bytes for secret in private[:3] for file_bytes in _files(place)
    )


def _files(place: Path) -> list[bytes]:
    return [path.read_bytes() for path in place.iterdir()]


def test_a_node_with_another_roster_is_named_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = write_secure_nodes(tmp_path / "nodes")
    (folders[3] / ROSTER_FILE).unlink()
    with pytest.raises(InputError) as caught:
        run_securely(secure_config(), folders, tmp_path, monkeypatch)
    assert caught.value.field == "roster"
    assert "node-3" in str(caught.value.value)
    assert all(len(open_node(folder).guard.ledger) == 0 for folder in folders)


def test_a_server_without_a_roster_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = write_secure_nodes(tmp_path / "nodes")
    (tmp_path / "nodes" / ROSTER_FILE).unlink()
    with pytest.raises(InputError) as caught:
        run_securely(secure_config(), folders, tmp_path, monkeypatch)
    assert caught.value.field == "roster"


def test_a_node_of_another_protocol_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = write_secure_nodes(tmp_path / "nodes")
    monkeypatch.setattr(roster_module, "PROTOCOL", "fedveil secure sum 2")
    with pytest.raises(FedveilError, match=r"node-0.*its protocol is 'fedveil secure sum 1'"):
        run_securely(secure_config(), folders, tmp_path, monkeypatch)


def test_keys_are_rotated_and_nodes_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotated or revoked key changes the digest; nodes join the sums of the roster they hold only."""
    folders = write_secure_nodes(tmp_path / "nodes")
    place = tmp_path / "nodes" / ROSTER_FILE
    before = read_roster(place)
    with pytest.raises(InputError):
        join(folders[0])
    join(folders[0], rotate=True)
    with pytest.raises(InputError) as caught:
        change_roster(place, [folders[0] / PUBLIC_FILE])
    assert caught.value.field == "--add"
    after = change_roster(place, [folders[0] / PUBLIC_FILE], replace=True)
    assert after.digest != before.digest
    with pytest.raises(InputError) as caught:
        trust(folders[0], place, before.digest)
    assert caught.value.field == "--digest"
    for folder in folders:
        trust(folder, place, after.digest)
    found = run_securely(secure_config(run={"rounds": 1}), folders, tmp_path, monkeypatch)
    assert found.history[-1]["answered"] == NODES

    fewer = change_roster(place, remove=["node-4"])
    with pytest.raises(InputError) as caught:
        trust(folders[4], place, fewer.digest)
    assert caught.value.field == "roster"
    for folder in folders[:4]:
        trust(folder, place, fewer.digest)
    config = secure_config(run={"rounds": 1}, partition={"clients": 4})
    found = run_securely(config, folders[:4], tmp_path / "fewer", monkeypatch)
    assert found.history[-1]["answered"] == 4
