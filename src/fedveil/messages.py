"""What travels between server and clients: frozen dataclasses of tensors that know their size on the wire.

Every tensor of a message has a leading axis: K rows, one per client, or a single row that all clients share.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import safetensors.torch
import torch
from torch import Tensor

from fedveil.errors import FedveilError

_SCALARS = (bool, int, float, str, type(None))


class MessageError(FedveilError):
    """Bytes that are not the message they claim to be."""


@dataclass(frozen=True)
class Message:
    """Base of all messages. Fields are tensors, dictionaries of tensors, or plain scalars that all rows share."""

    def tensors(self) -> dict[str, Tensor]:
        """All tensors under flat names, `field` or `field/key`."""
        out: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                out[field.name] = value
            elif isinstance(value, dict):
                out.update({f"{field.name}/{key}": leaf for key, leaf in value.items()})
        return out

    def scalars(self) -> dict[str, Any]:
        return {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), _SCALARS)}

    @property
    def count(self) -> int:
        """The number of rows: the clients of the message, or 1 where all share it."""
        return max((leaf.shape[0] for leaf in self.tensors().values()), default=1)

    def _map(self, change: Any) -> Self:
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                values[field.name] = change(field.name, value)
            elif isinstance(value, dict):
                values[field.name] = {
                    key: change(f"{field.name}/{key}", leaf) for key, leaf in value.items()
                }
        return dataclasses.replace(self, **values)

    def rows(self, index: Sequence[int]) -> Self:
        """The rows of these clients; a shared row stays as it is."""
        picked = torch.as_tensor(list(index), dtype=torch.long)
        k = self.count
        return self._map(
            lambda _, leaf: leaf if leaf.shape[0] == 1 and k > 1 or k == 1 else leaf.index_select(0, picked)
        )

    def to(self, device: torch.device | str) -> Self:
        return self._map(lambda _, leaf: leaf.to(device))

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """One message of all rows, in the order of the parts; scalars are the first part's."""
        if len(parts) == 1:
            return parts[0]
        flat = [part.tensors() for part in parts]
        return parts[0]._map(lambda name, _: torch.cat([tensors[name] for tensors in flat]))

    def row_bytes(self) -> int:
        """What one client sends or receives of this message, in bytes of payload."""
        return sum(leaf[0].numel() * leaf.element_size() for leaf in self.tensors().values())

    def to_bytes(self) -> bytes:
        """A self-contained encoding without pickle: JSON header, then safetensors."""
        head = json.dumps({"kind": type(self).__name__, "scalars": self.scalars()}).encode()
        body = safetensors.torch.save({k: v.contiguous() for k, v in self.tensors().items()})
        return struct.pack("<I", len(head)) + head + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The message of `to_bytes`; anything else is refused with `MessageError`."""
        try:
            (length,) = struct.unpack_from("<I", data)
            head = json.loads(data[4 : 4 + length])
            flat = safetensors.torch.load(data[4 + length :])
            if head["kind"] != cls.__name__:
                raise MessageError(f"expected a {cls.__name__} message, got {head['kind']!r}")
            values: dict[str, Any] = dict(head["scalars"])
        except MessageError:
            raise
        except Exception as error:
            raise MessageError(f"not a {cls.__name__} message: {error}") from error
        for name, leaf in flat.items():
            field, _, key = name.partition("/")
            if key:
                values.setdefault(field, {})[key] = leaf
            else:
                values[field] = leaf
        for field in fields(cls):  # a dictionary without entries leaves no tensor behind
            if field.name not in values and "dict" in str(field.type) or str(field.type) == "Params":
                values.setdefault(field.name, {})
        try:
            return cls(**values)
        except TypeError as error:
            raise MessageError(f"not a {cls.__name__} message: {error}") from error
