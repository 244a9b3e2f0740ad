"""Messages between server and clients, and server states: frozen dataclasses of tensors.

Records encode themselves without pickle. A message is a record whose tensors have a leading axis: K rows, one
per client, or a single row that all clients share.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self, Union, get_args, get_origin, get_type_hints

from fedveil.errors import FedveilError
from fedveil.lazy_torch import safetensors_torch, torch

if TYPE_CHECKING:
    from torch import Tensor

_SCALARS = (bool, int, float, str, type(None))


class MessageError(FedveilError):
    """Bytes that do not decode to the expected message."""


@dataclass(frozen=True)
class Record:
    """Fields are tensors, dictionaries of tensors, or plain scalars."""

    def tensors(self) -> dict[str, Tensor]:
        """All tensors under flat names, `field` or `field/key`."""
        out: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                out[field.name] = value
            elif isinstance(value, dict):
                out.update({f"{field.name}/{key}": leaf for key, leaf in value.items()})
        return out

    def scalars(self) -> dict[str, Any]:
        return {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), _SCALARS)}

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Self:
        """The same record with `change(flat name, tensor)` in place of every tensor."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                values[field.name] = change(field.name, value)
            elif isinstance(value, dict):
                values[field.name] = {key: change(f"{field.name}/{key}", leaf) for key, leaf in value.items()}
        return dataclasses.replace(self, **values)

    def head(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON."""
        empty = [f.name for f in fields(self) if isinstance(v := getattr(self, f.name), dict) and not v]
        # Noise is drawn leaf by leaf, so the order of leaves is part of the record.
        order = list(self.tensors())
        return {"kind": type(self).__name__, "scalars": self.scalars(), "empty": empty, "order": order}

    @classmethod
    def assemble(cls, head: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        """The record of this `head()` and these `tensors()`; anything else is refused with `MessageError`."""
        try:
            kind = str(head["kind"])
            values: dict[str, Any] = {str(name): value for name, value in dict(head["scalars"]).items()}
            if not all(isinstance(value, _SCALARS) for value in values.values()):
                raise ValueError("not a scalar")
            values |= {str(name): {} for name in head["empty"]}
            tensors = {str(name): tensors[name] for name in head["order"]}
        except (KeyError, TypeError, ValueError) as error:
            raise MessageError(f"not a {cls.__name__}: its header is damaged", field="header") from error
        if kind != cls.__name__:
            raise MessageError(f"expected a {cls.__name__}, got a {kind[:80]!r}", field="kind", value=kind)
        for name, leaf in tensors.items():
            field, slash, key = name.partition("/")
            if not slash:
                values[field] = leaf
            elif isinstance(values.setdefault(field, {}), dict):
                values[field][key] = leaf
        expected = {field.name for field in fields(cls)}
        if set(values) != expected:
            raise MessageError(
                f"a {cls.__name__} has the fields {sorted(expected)}; this one has {sorted(values)}",
                field="fields",
                value=sorted(values),
            )
        # Strict types: a float in an integer field would be read differently by different readers.
        for name, allowed in _kinds(cls).items():
            value = values[name]
            if type(value) not in allowed and not (
                torch.Tensor in allowed and isinstance(value, torch.Tensor)
            ):
                raise MessageError(
                    f"{name!r} of a {cls.__name__} is not of type {allowed[0].__name__}",
                    field=name,
                    value=value,
                )
        return cls(**values)

    def to_bytes(self) -> bytes:
        """A self-contained encoding: length, JSON header, safetensors."""
        text = json.dumps(self.head()).encode()
        body = safetensors_torch.save(_apart(self.tensors()))
        return struct.pack("<I", len(text)) + text + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The record of `to_bytes`; anything else is refused with `MessageError`."""
        try:
            (length,) = struct.unpack_from("<I", data)
            head = json.loads(data[4 : 4 + length])
            tensors = safetensors_torch.load(data[4 + length :])
        except Exception as error:  # untrusted bytes may raise anything
            raise MessageError(
                f"not a {cls.__name__}: {type(error).__name__}: {error}", field="encoding"
            ) from error
        return cls.assemble(head, tensors)


@dataclass(frozen=True)
class Message(Record):
    """A record that is sent. All clients' rows of one exchange have the same shapes."""

    @property
    def count(self) -> int:
        """The number of rows: the clients of the message, or 1 where all share it."""
        return max((leaf.shape[0] for leaf in self.tensors().values()), default=1)

    def rows(self, index: Sequence[int]) -> Self:
        """The rows of these clients; a shared row stays as it is."""
        picked = torch.as_tensor(list(index), dtype=torch.long)
        return self.map(
            lambda _, leaf: leaf if leaf.shape[0] == 1 else leaf.index_select(0, picked.to(leaf.device))
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """One message of all rows, in the order of the parts; scalars are the first part's."""
        if len(parts) == 1:
            return parts[0]
        flat = [part.tensors() for part in parts]
        return parts[0].map(lambda name, _: torch.cat([tensors[name] for tensors in flat]))

    def row_bytes(self) -> int:
        """The payload of one client's row, in bytes."""
        return sum(leaf[:1].numel() * leaf.element_size() for leaf in self.tensors().values())


_KINDS: dict[type[Record], dict[str, tuple[type, ...]]] = {}


def _kinds(record: type[Record]) -> dict[str, tuple[type, ...]]:
    """The types that each field may have; a field of any other annotation is left out."""
    if record not in _KINDS:
        _KINDS[record] = _read_kinds(record)
    return _KINDS[record]


def _read_kinds(record: type[Record]) -> dict[str, tuple[type, ...]]:
    found = {}
    exact = (*_SCALARS, torch.Tensor, dict)
    try:
        # `Tensor` may be imported for type checkers only in the record's module.
        hints = get_type_hints(record, localns={"Tensor": torch.Tensor})
    except NameError:  # a name imported for type checkers only
        return {}
    for field in fields(record):
        hint = hints[field.name]
        union = get_origin(hint) in (Union, types.UnionType)
        kinds = [get_origin(kind) or kind for kind in (get_args(hint) if union else (hint,))]
        if all(kind in exact for kind in kinds):
            found[field.name] = (*kinds, *((int,) if float in kinds else ()))
    return found


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share no memory, which safetensors requires."""
    out: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, leaf in tensors.items():
        leaf = leaf.detach().contiguous()
        place = leaf.untyped_storage().data_ptr()
        out[name] = leaf.clone() if place in seen else leaf
        seen.add(place)
    return out
