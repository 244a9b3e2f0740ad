"""The certificates do what TLS asks of them, and no private key is readable by others."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest

pytest.importorskip("cryptography")
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedveil.federation.certificates import make_authority, make_node_key, make_server_certificate, write_new
from tests.refusals import refuses


def shake_hands(server: Path, ca: Path, name: str) -> str | None:
    """Connect over TLS as a node does; the protocol version."""
    at_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    at_server.load_cert_chain(server / "server.crt", server / "server.key")
    at_client = ssl.create_default_context(cafile=str(ca))
    at_client.verify_flags |= ssl.VERIFY_X509_STRICT
    here, there = socket.socketpair()

    def serve() -> None:
        try:
            at_server.wrap_socket(there, server_side=True).close()
        except OSError:
            there.close()  # the other side hung up: it did not believe the certificate

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with at_client.wrap_socket(here, server_hostname=name) as secure:
            return secure.version()
    finally:
        here.close()
        thread.join()


@pytest.fixture
def made(tmp_path: Path) -> Path:
    for name in ("ca", "server", "other"):
        (tmp_path / name).mkdir()
    key, ca = make_authority(tmp_path / "ca")
    make_server_certificate(tmp_path / "server", ["fl.example.org", "10.1.2.3"], key, ca)
    make_authority(tmp_path / "other")
    return tmp_path


@pytest.mark.parametrize("name", ["fl.example.org", "10.1.2.3", "localhost", "127.0.0.1"])
def test_the_server_is_trusted_under_its_names(made: Path, name: str) -> None:
    assert shake_hands(made / "server", made / "ca" / "ca.crt", name) == "TLSv1.3"


def test_another_name_or_authority_is_not_trusted(made: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
        shake_hands(made / "server", made / "ca" / "ca.crt", "evil.example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(made / "server", made / "other" / "ca.crt", "fl.example.org")


def test_node_keys_are_openssh_p384_and_belong_together(tmp_path: Path) -> None:
    public = make_node_key(tmp_path)
    private = load_ssh_private_key((tmp_path / "node.key").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    loaded = load_ssh_public_key((tmp_path / "node.pub").read_bytes())
    assert isinstance(loaded, ec.EllipticCurvePublicKey)
    assert loaded.public_numbers() == private.public_key().public_numbers()
    assert (tmp_path / "node.pub").read_bytes() == public + b"\n"


def test_private_keys_are_for_their_owner_only_and_never_overwritten(made: Path) -> None:
    make_node_key(made / "other")
    for key in ("ca/ca.key", "server/server.key", "other/node.key"):
        assert stat.S_IMODE((made / key).stat().st_mode) == 0o600
    with refuses("file"):
        write_new(made / "ca" / "ca.key", b"")
