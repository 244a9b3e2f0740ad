"""A node's part in secure sums, opened from its own folder."""

from __future__ import annotations

import os
from pathlib import Path

from fedveil.engines.flower.secure_node import Membership
from fedveil.federation.config import NODE_FILE, POLICY_FILE, SESSION, NodeConfig
from fedveil.federation.identity_files import ROSTER_FILE, read_identity, read_roster
from fedveil.federation.policy import Policy
from fedveil.secure_sum import primitives
from fedveil.secure_sum.journal import Journal
from fedveil.secure_sum.round_store import RoundStore
from fedveil.validation import read_toml

_THIS_PROCESS = primitives.random_key()
"""The session secret of a node that was not started by `fedveil deploy node`."""


def open_membership(folder: Path) -> Membership:
    """Open the node's identity, roster and journal.

    Raises:
        InputError: It has no identity or no roster.
    """
    config = read_toml(folder / NODE_FILE, NodeConfig)
    place = folder / config.state / "secure"
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    given = os.environ.get(SESSION)
    session = _THIS_PROCESS if given is None else bytes.fromhex(given)
    return Membership(
        read_identity(folder),
        read_roster(folder / ROSTER_FILE).roster,
        Journal(place / "journal.jsonl"),
        RoundStore(place, session),
        read_toml(folder / POLICY_FILE, Policy).colluders,
    )


def roster_digest(folder: Path) -> str:
    """The digest of the node's roster, which it sends to the server; empty if it has none."""
    path = folder / ROSTER_FILE
    return read_roster(path).digest if path.exists() else ""
