"""Checkpoints of a run: written atomically, and read only if their checksum matches."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedveil.atomic_files import write_atomically, writing
from fedveil.lazy_torch import safetensors_torch
from fedveil.messages import MessageError, Record
from fedveil.numerics import require_numerics
from fedveil.tree import State

_MAGIC = b"fedveil checkpoint 1\n"
_KEPT = 2  # if the newest is damaged, the one before it is used


@dataclass(frozen=True)
class Checkpoint:
    round: int
    server: Record
    states: Mapping[int, State]
    numerics: int


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    with writing(folder):
        folder.mkdir(exist_ok=True)
    server = checkpoint.server.to_bytes()
    clients = safetensors_torch.save(
        {
            f"{client}/{place:04d}/{name}": leaf.contiguous()
            for client, state in checkpoint.states.items()
            for place, (name, leaf) in enumerate(state.items())
        }
    )
    head = json.dumps({"round": checkpoint.round, "numerics": checkpoint.numerics}).encode()
    body = b"".join(struct.pack("<Q", len(part)) + part for part in (head, server, clients))
    data = _MAGIC + body + hashlib.sha256(body).digest()
    write_atomically(folder / f"round-{checkpoint.round:06d}.ckpt", data)
    for old in sorted(folder.glob("round-*.ckpt"))[:-_KEPT]:
        old.unlink()


def load_checkpoint(
    folder: Path, server_type: type[Record], numerics: int, *, most: int | None = None
) -> Checkpoint | None:
    """The newest intact checkpoint of round `most` or earlier, or None.

    Raises:
        InputError: It was written with other numerics than these.
    """
    for path in sorted(folder.glob("round-*.ckpt"), reverse=True):
        checkpoint = _read(path, server_type, numerics)
        if checkpoint is not None and (most is None or checkpoint.round <= most):
            return checkpoint
    return None


def _read(path: Path, server_type: type[Record], numerics: int) -> Checkpoint | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    body = data[len(_MAGIC) : -32]
    if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != data[-32:]:
        return None
    parts = []
    offset = 0
    while offset < len(body):
        (length,) = struct.unpack_from("<Q", body, offset)
        parts.append(body[offset + 8 : offset + 8 + length])
        offset += 8 + length
    head, server, clients = parts
    facts = json.loads(head)
    require_numerics(path, facts.get("numerics", 1), numerics)
    states: dict[int, State] = {}
    for name, leaf in sorted(safetensors_torch.load(clients).items()):
        client, _, key = name.split("/", maxsplit=2)
        states.setdefault(int(client), {})[key] = leaf
    try:
        return Checkpoint(facts["round"], server_type.from_bytes(server), states, numerics)
    except MessageError:
        return None
