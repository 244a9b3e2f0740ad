"""The federation's own certificate authority, the server's certificate and the nodes' keys."""

from __future__ import annotations

import datetime
import ipaddress
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedveil.errors import InputError

CA_DAYS = 3650
SERVER_DAYS = 825
_LOCAL = ("localhost", "127.0.0.1")  # the server's own processes connect over loopback

PrivateKey = ec.EllipticCurvePrivateKey


def write_new(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a new file, created with this mode."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        raise InputError("file", str(path), "already exists", "Choose another folder.") from error
    with os.fdopen(file, "wb") as stream:
        stream.write(data)


def write_private(path: Path, key: PrivateKey, *, openssh: bool = False) -> None:
    """Write the private key, readable by its owner only (mode 0600)."""
    kind = serialization.PrivateFormat.OpenSSH if openssh else serialization.PrivateFormat.PKCS8
    data = key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
    write_new(path, data, 0o600)


def make_authority(folder: Path) -> tuple[PrivateKey, x509.Certificate]:
    """Write `ca.key` and `ca.crt`. Whoever has the key can impersonate the server."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("fedveil federation")
    certificate = (
        _builder(name, name, key, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write_private(folder / "ca.key", key)
    write_new(folder / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM))
    return key, certificate


def make_server_certificate(
    folder: Path, names: Sequence[str], ca_key: PrivateKey, ca: x509.Certificate
) -> None:
    """Write `server.key` and `server.crt`, valid for these names and addresses and for loopback."""
    key = ec.generate_private_key(ec.SECP384R1())
    known = [_general_name(name) for name in dict.fromkeys([*names, *_LOCAL])]
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    certificate = (
        _builder(_name(names[0]), ca.subject, key, SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(known), critical=False)
        .add_extension(authority, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    write_private(folder / "server.key", key)
    write_new(folder / "server.crt", certificate.public_bytes(serialization.Encoding.PEM))


def renew_server_certificate(authority: Path, server: Path, names: Sequence[str]) -> None:
    """Replace `server.key` and `server.crt` in the folder `server`, signed by the authority that its nodes trust."""
    try:
        ca_key = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
        ca = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
        believed = x509.load_pem_x509_certificate((server / "ca.crt").read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            "authority",
            str(authority),
            f"cannot be used: {error}",
            "Give the folder `authority` written by `deploy init`.",
        ) from error
    if ca != believed or not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise InputError(
            "authority",
            str(authority),
            f"is not the authority of {server}",
            "Give the one it was created with.",
        )
    with tempfile.TemporaryDirectory(prefix="new-", dir=server) as place:
        make_server_certificate(Path(place), names, ca_key, ca)
        for name in ("server.key", "server.crt"):
            (Path(place) / name).replace(server / name)


def make_node_key(folder: Path) -> bytes:
    """Write `node.key` and `node.pub` (OpenSSH, NIST P-384); returns the public key."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_private(folder / "node.key", key, openssh=True)
    write_new(folder / "node.pub", public + b"\n")
    return public


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _builder(subject: x509.Name, issuer: x509.Name, key: PrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # tolerance for clocks that differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
