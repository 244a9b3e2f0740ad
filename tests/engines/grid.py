"""A grid whose nodes are in this process: the client app's own handlers, every record encoded on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message.message import make_message
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

Fault = Callable[[Message, Callable[[], Message]], Message | None]
"""What a node does with a message instead of answering: another answer, or none (None)."""


class InMemoryNodes(Grid):
    """Node 1000 + p has the configuration `nodes[p]`; `faults` by node number replace their answers."""

    def __init__(
        self,
        client_app: ClientApp,
        nodes: Iterable[Mapping[str, Any]],
        run_config: Mapping[str, Any],
        faults: Mapping[int, Fault] | None = None,
    ) -> None:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # messages ask for it
        self._app = client_app
        self._contexts = {
            1000 + place: Context(1, 1000 + place, dict(node), RecordDict(), dict(run_config))
            for place, node in enumerate(nodes)
        }
        self.faults = dict(faults or {})
        self.sent: list[Message] = []
        self._waiting: dict[str, Message] = {}
        self.gone: set[int] = set()

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self._contexts if node not in self.gone]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            number = f"message-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            self._waiting[number] = message
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for number in list(message_ids):
            reply = self._reply(self._waiting[number]) if number in self._waiting else None
            if reply is not None:
                del self._waiting[number]
                reply.metadata.__dict__["_reply_to_message_id"] = number
                replies.append(reply)
        return list(reversed(replies))  # arrival order is nobody's promise

    def _reply(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        arrived = make_message(message.metadata, content=_over_the_wire(message.content))
        fault = self.faults.get(node)
        reply = (
            self._answer(node, arrived)
            if fault is None
            else fault(arrived, lambda: self._answer(node, arrived))
        )
        if reply is None:
            return None
        reply.metadata.__dict__["_src_node_id"] = node
        if reply.has_error():
            return reply
        return make_message(reply.metadata, content=_over_the_wire(reply.content))

    def _answer(self, node: int, message: Message) -> Message:
        if node in self.gone:
            return Message(Error(3, "Node Unavailable"), reply_to=message)
        return self._app(message, self._contexts[node])

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError


def _over_the_wire(content: RecordDict) -> RecordDict:
    return recorddict_from_proto(recorddict_to_proto(content))
