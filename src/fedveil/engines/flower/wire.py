"""Messages between server and nodes: fedveil's own encoding in Flower's records, validated on receipt.

A hello requests a node's introduction. An order is one client's row of a broadcast with everything that the client's
half needs; a reply is the client's upload, or the reason of a refusal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedveil.errors import FedveilError, InputError
from fedveil.messages import Message, MessageError
from fedveil.methods.method import AnyMethod, At
from fedveil.privacy.releases import Plan
from fedveil.task import Task

HELLO = "query.hello"
EXCHANGE = "train.exchange"
LEG = "train.leg"
VERSION = metadata.version("fedveil")
LARGEST_MESSAGE = 1 << 30
LARGEST_HEAD = 1 << 20
LARGEST_NUMBER = (1 << 63) - 1
_HEAD, _BODY, _ENCODING = "fedveil", "message", "fedveil"

Reason = Literal[
    "version",
    "model",
    "configuration",
    "policy",
    "size",
    "message",
    "plan",
    "protocol",
    "unavailable",
    "error",
]
REASONS: Mapping[Reason, str] = {
    "version": "the server runs another version of fedveil",
    "model": "the server's model or method is another",
    "configuration": "the configuration does not fit this node",
    "policy": "its policy does not allow this",
    "size": "this is larger than the node allows",
    "message": "the message cannot be used",
    "plan": "the plan does not fit this node",
    "protocol": "the server broke the protocol of secure sums, or the node was restarted in it",
    "unavailable": "the node is not ready",
    "error": "the computation failed",
}
"""The texts of refusals that a server gets, fixed so that they disclose no data, limits or spent budget."""
Version = tuple[int, int]
"""The version of a client's state: the round and exchange after which it was stored."""


class RefusalError(FedveilError):
    """A refused message or answer, with the reason.

    A node sends only `reason` and `field` of its refusal; `text` stays in its log. `field` is a key of the server's
    configuration, so it does not depend on the node's data.
    """

    def __init__(self, reason: Reason, text: str, field: str = "") -> None:
        super().__init__(text)
        self.reason: Reason = reason
        self.field = field


def fingerprint(task: Task, method: AnyMethod) -> str:
    """A hash of the model (names, shapes, types, structure) and the method, equal on all that agree on both."""
    leaves = [(n, list(p.shape), str(p.dtype)) for n, p in task.module.named_parameters()]
    text = json.dumps([leaves, repr(task.module), repr(method)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Introduction:
    """A node's introduction: name, client number, number of examples, and for secure sums its protocol and the digest
    of its roster (empty if it has none)."""

    name: str
    client: int
    size: int
    version: str
    fingerprint: str
    protocol: str = ""
    roster: str = ""


@dataclass(frozen=True)
class Order:
    """The server's request to one client."""

    run: str
    client: int
    at: At
    version: str
    fingerprint: str
    state: Version | None
    """The exchange of the client's last used upload, whose state it continues from (None: its first state)."""
    needed: tuple[Version, ...]
    """Older states that are needed if the server resumes from a checkpoint."""
    down: bytes


@dataclass(frozen=True)
class Reply:
    """One client's answer."""

    client: int
    round: int
    exchange: int
    version: str
    fingerprint: str
    remembers: bool
    """Whether the client keeps a state of this exchange."""
    up: bytes


def hello() -> RecordDict:
    return _pack({"kind": "hello", "version": VERSION})


def read_hello(content: RecordDict) -> None:
    """Refuse a hello of another version before the rest of it is read, since its format may differ."""
    head, _ = _unpack(content, "hello", 0)
    theirs = head.get("version")
    if theirs != VERSION:
        raise RefusalError("version", f"the server's fedveil is {theirs!r:.40}, this node's {VERSION!r}")


def introduce(who: Introduction) -> RecordDict:
    return _pack({"kind": "introduction", **asdict(who)})


def refuse(refusal: RefusalError, node: str) -> RecordDict:
    """A refusal as a reply: a fixed reason, and the field of the server's configuration that it is about.

    **Guarantees** It does not depend on the node's data
    (`tests/engines/test_refusals.py::test_a_refusal_carries_its_reason_and_nothing_of_the_node`).
    """
    return _pack({"kind": "refusal", "reason": refusal.reason, "field": refusal.field[:100], "node": node})


def _refusal(head: Mapping[str, Any]) -> RefusalError:
    """A node's refusal, with the texts of this installation."""
    reason: Reason = next((known for known in REASONS if known == head.get("reason")), "error")
    field = _one_line(str(head.get("field") or ""))[:100]
    text = f"node {_one_line(str(head.get('node')))[:64]} refused: {REASONS[reason]}"
    return RefusalError(reason, f"{text} ({field})" if field else text, field)


def pack_order(order: Order) -> RecordDict:
    return _pack({"kind": "order", **_head_of(order)}, order.down)


def _head_of(order: Order) -> dict[str, Any]:
    return {
        "run": order.run,
        "client": order.client,
        "plan": asdict(order.at.plan),
        "at": [order.at.round, order.at.exchange],
        "version": order.version,
        "fingerprint": order.fingerprint,
        "state": order.state,
        "needed": order.needed,
    }


def pack_reply(reply: Reply) -> RecordDict:
    head = asdict(reply)
    return _pack({"kind": "reply", **{k: v for k, v in head.items() if k != "up"}}, reply.up)


def read_introduction(content: RecordDict) -> Introduction:
    head, _ = _unpack(content, "introduction", 0)
    try:
        who = Introduction(
            str(head["name"])[:64],
            _whole(head["client"]),
            _whole(head["size"]),
            str(head["version"]),
            str(head["fingerprint"]),
            str(head.get("protocol", ""))[:64],
            str(head.get("roster", ""))[:64],
        )
    except (KeyError, TypeError) as error:
        raise RefusalError("message", "its introduction is damaged") from error
    if who.client < 0 or who.size < 0:
        raise RefusalError("message", f"it says that it is client {who.client} with {who.size} examples")
    return who


def read_order(content: RecordDict, limit: int = LARGEST_MESSAGE) -> Order:
    return _order(*_unpack(content, "order", limit))


def _order(head: Mapping[str, Any], body: bytes) -> Order:
    try:
        numbers = {key: _whole(value) for key, value in head["plan"].items() if key != "sampler"}
        plan = Plan(sampler=head["plan"]["sampler"], **numbers)
        round_, exchange = (_whole(part) for part in head["at"])
        order = Order(
            str(head["run"]),
            _whole(head["client"]),
            At(plan, round_, exchange),
            str(head["version"]),
            str(head["fingerprint"]),
            None if head["state"] is None else _version(head["state"]),
            tuple(_version(item) for item in head["needed"]),
            body,
        )
    except (KeyError, TypeError, ValueError, AttributeError, InputError) as error:
        raise RefusalError("message", f"the order is damaged: {type(error).__name__}") from error
    if not (1 <= round_ <= plan.rounds and exchange >= 0 and 0 <= order.client < plan.clients):
        raise RefusalError("plan", f"round {round_}, client {order.client} are not in the plan")
    return order


def read_reply(content: RecordDict, limit: int = LARGEST_MESSAGE) -> Reply:
    head, body = _unpack(content, "reply", limit)
    try:
        return Reply(
            _whole(head["client"]),
            _whole(head["round"]),
            _whole(head["exchange"]),
            str(head["version"]),
            str(head["fingerprint"]),
            bool(head["remembers"]),
            body,
        )
    except (KeyError, TypeError) as error:
        raise RefusalError("message", "its reply is damaged") from error


@dataclass(frozen=True)
class Leg:
    """One leg of a secure sum, as request or answer: `content` as in `secure_sum.encoding`.

    The request of the leg in which nodes train contains an order; its answer has the masked upload as `body`.
    """

    name: str
    key: tuple[str, int, int]
    """Run, round and attempt."""
    content: Any
    version: str = VERSION
    order: Order | None = None
    body: bytes | None = None
    remembers: bool = False


def pack_leg(leg: Leg) -> RecordDict:
    head = {
        "kind": "leg",
        "leg": leg.name,
        "key": leg.key,
        "content": leg.content,
        "version": leg.version,
        "order": None if leg.order is None else _head_of(leg.order),
        "remembers": leg.remembers,
    }
    return _pack(head, leg.body if leg.order is None else leg.order.down)


def read_leg(content: RecordDict, limit: int = LARGEST_MESSAGE) -> Leg:
    head, body = _unpack(content, "leg", limit)
    try:
        run, round_, attempt = head["key"]
        order = None if head["order"] is None else _order(head["order"], body)
        return Leg(
            str(head["leg"]),
            (str(run), _whole(round_), _whole(attempt)),
            head["content"],
            str(head["version"]),
            order,
            body,
            bool(head["remembers"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RefusalError("message", "a leg of a secure sum is damaged") from error


def size_of(content: RecordDict) -> int:
    """The size of a message in bytes, without Flower's own overhead."""
    head = len(str(content.config_records[_HEAD]["head"])) if _HEAD in content.config_records else 0
    arrays = content.array_records.get(_BODY)
    return head + (0 if arrays is None else sum(len(array.data) for array in arrays.values()))


def require_same(theirs: tuple[str, str], ours: tuple[str, str], whose: str) -> None:
    """Refuse another version of fedveil, model or method; both sides check."""
    if theirs[0] != ours[0]:
        raise RefusalError("version", f"{whose} fedveil is {theirs[0]!r:.40}, ours {ours[0]!r}")
    if theirs[1] != ours[1]:
        raise RefusalError(
            "model", f"{whose} model or method is another: {theirs[1]!r:.40}, ours {ours[1]!r}"
        )


def read_upload(method: AnyMethod, data: bytes) -> Message:
    """Decode the upload of one client: refuses other types, several rows and numbers that are not finite."""
    try:
        up = method.up_type.from_bytes(data)
    except MessageError as error:
        raise RefusalError("message", str(error)) from error
    for name, leaf in up.tensors().items():
        if leaf.dim() < 1 or leaf.shape[0] != 1:
            raise RefusalError("message", f"{name!r} has shape {list(leaf.shape)}, not one row")
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise RefusalError("message", f"{name!r} is not finite")
    return up


def _one_line(text: str) -> str:
    """Text for the log without control characters, so that a node cannot inject log lines."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _version(value: Any) -> Version:
    round_, exchange = value
    return _whole(round_), _whole(exchange)


def _whole(value: Any) -> int:
    """The number; refuses anything but integers, such as infinity."""
    if type(value) is not int or not -LARGEST_NUMBER <= value <= LARGEST_NUMBER:
        raise TypeError("not a whole number")
    return value


def _pack(head: Mapping[str, Any], body: bytes | None = None) -> RecordDict:
    content = RecordDict({_HEAD: ConfigRecord({"head": json.dumps(head)})})
    if body is not None:
        array = Array(dtype="uint8", shape=(len(body),), stype=_ENCODING, data=body)
        content[_BODY] = ArrayRecord({_BODY: array})
    return content


def _unpack(content: RecordDict, kind: str, limit: int) -> tuple[dict[str, Any], bytes]:
    try:
        words = str(content.config_records[_HEAD]["head"])
        if len(words) > LARGEST_HEAD:
            raise RefusalError(
                "size", f"a head of {len(words)} characters, more than the {LARGEST_HEAD} allowed"
            )
        head = json.loads(words)
        said = head["kind"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise RefusalError("message", "this is not a message of fedveil") from error
    if said == "refusal":
        raise _refusal(head)
    if said != kind:
        raise RefusalError("message", f"expected {kind}, got {str(said)[:40]!r}")
    if _BODY not in content.array_records:
        return head, b""
    array = content.array_records[_BODY].get(_BODY)
    if array is None or array.stype != _ENCODING:
        raise RefusalError("message", "its encoding is not fedveil's")
    if len(array.data) > limit:
        raise RefusalError("size", f"{len(array.data)} bytes, more than the {limit} allowed")
    return head, bytes(array.data)
