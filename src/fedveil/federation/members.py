"""The server's registry of nodes by their keys, for the process of a run."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil.engines.flower.roster import Member
from fedveil.errors import FedveilError
from fedveil.federation.config import MEMBERS


def registered_members() -> Mapping[int, Member] | None:
    """The registered nodes by Flower's number, which a node authenticates with its key; None without keys."""
    place = os.environ.get(MEMBERS)
    if place is None:
        return None
    try:
        entries: dict[str, dict[str, Any]] = json.loads(Path(place).read_text())
        return {
            int(entry["id"]): Member(name, int(entry["client"]), key_fingerprint(entry["key"]))
            for name, entry in entries.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FedveilError(
            f"{place}: the registered nodes cannot be read. Restart the server.", field="registry"
        ) from error


def key_fingerprint(line: str) -> str:
    """The fingerprint of a public key in OpenSSH's format, as `ssh-keygen -lf node.pub` prints it."""
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"
