"""The messages of the protocol as JSON, bytes in hexadecimal; readers check all types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from fedveil.secure_sum.identities import Terms
from fedveil.secure_sum.messages import Advertisement, Confirmation, SealedShares, Unmasking

MOST_NODES = 1000
"""The largest number of nodes in a round; readers refuse longer lists."""


def plain(value: Any) -> Any:
    """A message, or a part of one, as JSON values."""
    if isinstance(value, bytes):
        return value.hex()
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value


def read_terms(value: Any) -> Terms:
    """The terms; like all readers here, raises ValueError for anything else."""
    found = _object(value)
    return Terms(
        run=text(found.get("run")),
        round=number(found.get("round")),
        attempt=number(found.get("attempt")),
        nodes=tuple(names(found.get("nodes"))),
        threshold=number(found.get("threshold")),
        colluders=number(found.get("colluders")),
        length=number(found.get("length")),
        roster=octets(found.get("roster")),
    )


def read_advertisement(value: Any, node: str | None = None) -> Advertisement:
    """`node`: the authenticated sender; without it the message names its sender."""
    found = _object(value)
    own = text(found.get("node")) if node is None else node
    keys = (octets(found.get(key)) for key in ("mask_key", "share_key", "signature"))
    return Advertisement(own, *keys)


def read_shares(value: Any, sender: str | None = None) -> SealedShares:
    found = _object(value)
    own = text(found.get("sender")) if sender is None else sender
    return SealedShares(own, text(found.get("receiver")), octets(found.get("sealed")))


def read_confirmation(value: Any, node: str | None = None) -> Confirmation:
    found = _object(value)
    return Confirmation(text(found.get("node")) if node is None else node, octets(found.get("signature")))


def read_unmasking(value: Any, node: str) -> Unmasking:
    found = _object(value)
    seeds, mask_keys = (
        {text(name): octets(share) for name, share in _object(found.get(key)).items()}
        for key in ("seeds", "mask_keys")
    )
    return Unmasking(node, seeds, mask_keys)


def names(value: Any) -> list[str]:
    return [text(part) for part in listed(value)]


def listed(value: Any) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) > MOST_NODES:
        raise ValueError(f"not a list of at most {MOST_NODES} entries")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1000:
        raise ValueError("not a short text")
    return value


def number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("not a whole number from 0 on")
    return value


def octets(value: Any) -> bytes:
    return bytes.fromhex(text(value))


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or len(value) > MOST_NODES:
        raise ValueError("not an object")
    return value
