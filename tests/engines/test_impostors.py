"""A node is who its key says: it cannot take the name, the client or the replies of another."""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w

pytest.importorskip("flwr")
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.superlink.routers.fleet import router
from starlette.exceptions import HTTPException

from fedveil.errors import FedveilError, InputError
from fedveil.federation.config import MEMBERS, SERVER_FILE, ServerConfig
from fedveil.federation.create import Federation, init
from fedveil.federation.members import key_fingerprint, registered_members
from fedveil.federation.processes import register_keys
from fedveil.federation.run_settings import LOG
from fedveil.federation.superlink import key_of as shown_key
from fedveil.federation.superlink import own_replies_only
from fedveil.validation import read_toml
from tests.engines.test_deployed_nodes import NODES, deployed, federated, write_nodes


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    """The nodes' public keys."""
    init(tmp_path / "f", Federation(nodes=NODES))
    return [(tmp_path / "f" / "server" / "keys" / f"node-{k}.pub").read_text() for k in range(NODES)]


def registry(place: Path, keys: list[str]) -> Path:
    """As the server writes it: the node with Flower's number 1000 + k holds key k."""
    path = place / "registered.json"
    entries = {f"node-{k}": {"id": str(1000 + k), "key": key, "client": k} for k, key in enumerate(keys)}
    path.write_text(json.dumps(entries))
    return path


def pretend(folder: Path, **changes: object) -> None:
    path = folder / "node.toml"
    path.write_text(tomli_w.dumps(tomllib.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "claim", [{"client": 0}, {"name": "node-0"}, {"name": "node-0", "client": 0}, {"client": 2}]
)
def test_an_impostor_is_refused_and_named_by_its_key(
    claim: dict[str, object], keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked before the node it poses as, which would otherwise be turned away in its place."""
    monkeypatch.setenv(MEMBERS, str(registry(tmp_path, [keys[1], keys[0], keys[2]])))
    entries = json.loads((tmp_path / "registered.json").read_text())
    swapped = {"node-1": entries["node-0"] | {"client": 1}, "node-0": entries["node-1"] | {"client": 0}}
    (tmp_path / "registered.json").write_text(json.dumps(entries | swapped))
    folders = write_nodes(tmp_path / "nodes")
    folders[0], folders[1] = folders[1], folders[0]  # node-1 answers first
    pretend(folders[0], **claim)
    result = deployed(federated("fedavg", cohort=NODES), folders, tmp_path)
    assert [line["answered"] for line in result.history] == [2, 2]
    assert result.folder is not None
    log = (result.folder / LOG).read_text()
    assert f"node 'node-1' (1000) is refused: its key {key_fingerprint(keys[1])} is that of" in log
    assert "node 'node-0' (1001) is client 0" in log


def test_an_unregistered_node_is_refused(
    keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEMBERS, str(registry(tmp_path, keys[:2])))
    result = deployed(federated("fedavg", cohort=NODES), write_nodes(tmp_path / "nodes"), tmp_path)
    assert [line["answered"] for line in result.history] == [2, 2]
    assert result.folder is not None
    assert "node 1002 is refused: its key is not registered" in (result.folder / LOG).read_text()
    assert result.summary["deployed"] is True
    assert result.summary["client_names"] == ["node-0", "node-1"]


def test_an_unreadable_registry_admits_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "registered.json"
    monkeypatch.setenv(MEMBERS, str(path))
    for text in (None, "{", "[]", '{"a": {"id": "1"}}'):
        if text is not None:
            path.write_text(text)
        with pytest.raises(FedveilError):
            registered_members()


def test_keys_are_named_as_ssh_keygen_and_the_servers_log_name_them(keys: list[str]) -> None:
    from base64 import b64encode

    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

    pem = load_ssh_public_key(keys[0].encode()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    scope: dict[str, Any] = {"headers": [(FLEET_HTTP_PUBLIC_KEY_HEADER.encode(), b64encode(pem))]}
    assert shown_key(scope) == f"with the key {key_fingerprint(keys[0])}"


def test_a_new_server_knows_the_place_of_every_key(tmp_path: Path) -> None:
    init(tmp_path / "f", Federation(nodes=3))
    folder = tmp_path / "f" / "server"
    config = read_toml(folder / SERVER_FILE, ServerConfig)
    assert config.clients == {"node-0": 0, "node-1": 1, "node-2": 2}
    content = tomllib.loads((folder / SERVER_FILE).read_text())
    content["clients"].pop("node-2")
    (folder / SERVER_FILE).write_text(tomli_w.dumps(content))
    with pytest.raises(InputError) as caught:
        register_keys(folder)
    assert caught.value.field == "clients.node-2"
    content["clients"]["node-2"] = 1
    (folder / SERVER_FILE).write_text(tomli_w.dumps(content))
    with pytest.raises(InputError) as caught:
        read_toml(folder / SERVER_FILE, ServerConfig)
    assert "clients" in caught.value.field


def test_a_reply_in_anothers_name_is_refused() -> None:
    """A registered node may push messages, but only its own."""

    def request(source: int) -> SimpleNamespace:
        metadata = SimpleNamespace(src_node_id=source)
        return SimpleNamespace(
            node=SimpleNamespace(node_id=7), messages_list=[SimpleNamespace(metadata=metadata)]
        )

    push: Callable[..., Any] = own_replies_only(lambda **_: "stored")
    assert push(request=request(7), state=None) == "stored"
    with pytest.raises(HTTPException):
        push(request=request(8), state=None)
    assert "fleet_handlers.push_messages(" in inspect.getsource(router), "where Flower asks"
