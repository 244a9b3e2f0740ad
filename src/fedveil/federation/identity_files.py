"""The keys of secure sums on disk: each node's identity, generated on the node, and the roster of all nodes."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from fedveil.atomic_files import write_atomically
from fedveil.errors import InputError
from fedveil.federation.certificates import write_new
from fedveil.federation.config import NODE_FILE, ROSTER, NodeConfig
from fedveil.secure_sum.identities import Identity, Roster
from fedveil.validation import read_toml

IDENTITY_FILE = "identity.key"
PUBLIC_FILE = "identity.toml"
ROSTER_FILE = "roster.toml"


@dataclass(frozen=True)
class Entry:
    """One node of a roster: its name, its client and its public key."""

    name: str
    client: int
    key: bytes


@dataclass(frozen=True)
class Listed:
    """A roster with the client number of each node."""

    entries: tuple[Entry, ...]

    @property
    def roster(self) -> Roster:
        return Roster({entry.name: entry.key for entry in self.entries})

    @property
    def clients(self) -> dict[int, str]:
        return {entry.client: entry.name for entry in self.entries}

    @property
    def digest(self) -> str:
        """The digest that operators compare over another channel than the server."""
        return self.roster.digest.hex()


def join(folder: Path, *, rotate: bool = False) -> Entry:
    """Generate the node's identity; `identity.toml` has the public half, for the coordinator.

    Args:
        folder: The node's folder.
        rotate: Replace an existing identity, whose key is not used any more.
    """
    config = read_toml(folder / NODE_FILE, NodeConfig)
    path = folder / IDENTITY_FILE
    if path.exists() and not rotate:
        raise InputError(
            "identity",
            str(path),
            "this node already has an identity",
            "Send identity.toml to the coordinator, or generate another identity with --rotate.",
        )
    made = Identity.generate(config.name)
    path.unlink(missing_ok=True)
    write_new(path, made.private.hex().encode() + b"\n", 0o600)
    entry = Entry(config.name, config.client, made.public)
    write_atomically(folder / PUBLIC_FILE, _toml([entry]))
    return entry


def read_identity(folder: Path) -> Identity:
    """Read the node's identity.

    Raises:
        InputError: It does not exist, or others may read it.
    """
    path = folder / IDENTITY_FILE
    name = read_toml(folder / NODE_FILE, NodeConfig).name
    if not path.exists():
        raise InputError("identity", str(path), "does not exist", "Run `fedveil deploy join` on this node.")
    if path.stat().st_mode & 0o077:
        raise InputError("identity", str(path), "others may read it", f"Run: chmod 600 {path}")
    try:
        return Identity(name, bytes.fromhex(path.read_text().strip()))
    except ValueError as error:
        raise InputError(
            "identity", str(path), "is damaged", "Run `fedveil deploy join --rotate`."
        ) from error


def read_roster(path: Path) -> Listed:
    """Read a roster file.

    Raises:
        InputError: It is missing or damaged, or two entries have the same key or client.
    """
    try:
        found = tomllib.loads(path.read_text())
        entries = tuple(
            Entry(str(name), _client(part["client"]), bytes.fromhex(str(part["key"])))
            for name, part in sorted(found.items())
        )
    except FileNotFoundError as error:
        raise InputError(
            "roster",
            str(path),
            "does not exist",
            "Collect the nodes' identity.toml with `fedveil deploy roster`, then `fedveil deploy trust` on each.",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("roster", str(path), "cannot be read", "Write it again.") from error
    listed = Listed(entries)
    if len(listed.clients) != len(entries):
        raise InputError("roster", str(path), "two nodes are the same client", "Give each its own.")
    if not entries:
        raise InputError("roster", str(path), "is empty", "Add nodes with `fedveil deploy roster`.")
    listed.roster  # noqa: B018  refuses invalid and repeated keys
    return listed


def server_roster() -> Listed:
    """The roster of the server that started this process."""
    return read_roster(Path(os.environ.get(ROSTER, ROSTER_FILE)))


def change_roster(
    path: Path, add: Iterable[Path] = (), remove: Iterable[str] = (), *, replace: bool = False
) -> Listed:
    """Add nodes by their `identity.toml`, remove nodes that leave or are revoked; returns the new roster.

    Args:
        path: The server's roster file.
        add: Identity files of new nodes.
        remove: Names of nodes to remove.
        replace: Allow another key for a registered node (its key was rotated).
    """
    known = {entry.name: entry for entry in read_roster(path).entries} if path.exists() else {}
    for name in remove:
        if known.pop(name, None) is None:
            raise InputError("--remove", name, "is not in the roster", f"Use one of {sorted(known)}.")
    for file in add:
        for entry in read_roster(file).entries:
            if known.get(entry.name, entry) != entry and not replace:
                raise InputError(
                    "--add",
                    entry.name,
                    "is in the roster with another key or client",
                    "Ask its operator whether the key was rotated, then use --replace.",
                )
            known[entry.name] = entry
    listed = Listed(tuple(known[name] for name in sorted(known)))
    if not listed.entries:
        raise InputError("roster", str(path), "would be empty", "Add nodes.")
    if len(listed.clients) != len(known):
        raise InputError("--add", sorted(known), "two nodes are the same client", "Give each its own.")
    _ = listed.digest
    write_atomically(path, _toml(listed.entries))
    return listed


def trust(folder: Path, file: Path, digest: str) -> Listed:
    """Install this as the node's roster, if it has the agreed digest and contains this node's key."""
    listed, own = read_roster(file), read_identity(folder)
    if "".join(digest.split()).lower() != listed.digest:
        raise InputError(
            "--digest",
            digest,
            f"the roster has {listed.digest}",
            "The roster or the digest was changed: ask the other operators.",
        )
    if listed.roster.keys.get(own.node) != own.public:
        raise InputError(
            "roster", own.node, "has another key for this node, or none", "Send identity.toml to the server."
        )
    write_atomically(folder / ROSTER_FILE, _toml(listed.entries))
    return listed


def _toml(entries: Iterable[Entry]) -> bytes:
    content: Mapping[str, object] = {e.name: {"client": e.client, "key": e.key.hex()} for e in entries}
    return tomli_w.dumps(content).encode()


def _client(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("not a client")
    return value
