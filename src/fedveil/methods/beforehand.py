"""A method on data that something was released of before the first round, such as the scales of a table's columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from fedveil.data.client_data import ClientData
from fedveil.errors import InputError
from fedveil.messages import Message, Record
from fedveil.methods.method import AnyMethod, At
from fedveil.methods.wrappers.wrapper import Around
from fedveil.privacy.releases import Plan, PostProcessing, Release, Unprotected
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.tree import Params, State


@dataclass(frozen=True)
class ReleasedBefore(Around[Record]):
    """The method as it is, whose guarantee also covers what was released before the first round."""

    release: Release

    def __post_init__(self) -> None:
        self.named("statistics", "the scales of columns are released before", self.inner.server_type)

    def releases(self, plan: Plan) -> Sequence[Release]:
        own = tuple(self.inner.releases(plan))
        private = [r for r in own if not isinstance(r.protection, Unprotected | PostProcessing)]
        if any(r.unit != self.release.unit for r in private) or not private:
            raise InputError(
                "task.data_options.statistics",
                "private",
                f"protects a {self.release.unit}, which {self.inner.name} as it is configured does not",
                f"Use a method that protects a {self.release.unit}, or constants in the schema.",
            )
        return (*own, self.release)

    def init_server(self, params: Params, plan: Plan) -> Record:
        return cast(Record, self.inner.init_server(params, plan))

    def broadcast(self, at: At, server: Record, clients: Sequence[int]) -> Message:
        return cast(Message, self.inner.broadcast(at, server, clients))

    def client_update(
        self, task: Task, at: At, down: Message, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Message, State]:
        return self.inner.client_update(task, at, down, data, state, rng)

    def server_update(
        self,
        task: Task,
        at: At,
        server: Record,
        clients: Sequence[int],
        up: Message | None,
        rng: ServerStreams,
    ) -> Record:
        return cast(Record, self.inner.server_update(task, at, server, clients, up, rng))

    def model(self, server: Record) -> Params:
        return self.inner.model(server)

    def with_model(self, server: Record, params: Params) -> Record:
        return cast(Record, self.inner.with_model(server, params))

    def personal_model(self, server: Record, state: State) -> Params | None:
        return self.inner.personal_model(server, state)


def released_before(method: AnyMethod, release: Release | None) -> AnyMethod:
    """The method on data of which this was released before; as it is where there is none."""
    return method if release is None else ReleasedBefore(method, release)
