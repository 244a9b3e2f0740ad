"""The contract of every method, and the registry of their names.

A method is a frozen, validated dataclass: its fields are its configuration. Both halves, client and server, are
pure functions of what they are given: state in, state out, randomness as an argument.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, TypeVar, cast

from fedveil.data.client_data import ClientData, Clients
from fedveil.errors import InputError, require_free
from fedveil.messages import Message, Record
from fedveil.privacy.releases import ADVERSARIES, UNITS, Plan, Release, Unprotected
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.tree import Params, State

S = TypeVar("S", bound=Record)
Down = TypeVar("Down", bound=Message)
Up = TypeVar("Up", bound=Message)


@dataclass(frozen=True)
class At:
    """Where a run is: exchange 0.. of round 1..rounds of the plan. Public: everybody knows it."""

    plan: Plan
    round: int
    exchange: int = 0


class Method(ABC, Generic[S, Down, Up]):
    """One way to learn from clients without collecting their data."""

    name: ClassVar[str]
    summary: ClassVar[str]
    server_type: ClassVar[type[Record]]
    down_type: ClassVar[type[Message]]
    up_type: ClassVar[type[Message]]

    def exchanges(self, plan: Plan) -> int:
        """How often server and cohort talk in one round."""
        return 1

    def check_clients(self, task: Task, clients: Clients) -> None:
        """Refuse data that this configuration does not fit, before a simulated run starts; a node checks its own."""
        return

    @abstractmethod
    def init_server(self, params: Params, plan: Plan) -> S:
        """The server before the first round."""

    def init_client(self, task: Task, data: ClientData, rng: ClientStreams) -> State:
        """What a client remembers before it first takes part, `[K, ...]`; it never leaves the client."""
        return {}

    @abstractmethod
    def broadcast(self, at: At, server: S, clients: Sequence[int]) -> Down:
        """What the cohort is sent: one row for all, or one row per client."""

    @abstractmethod
    def client_update(
        self, task: Task, at: At, down: Down, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Up, State]:
        """What K clients answer, and what they remember."""

    @abstractmethod
    def server_update(
        self, task: Task, at: At, server: S, clients: Sequence[int], up: Up | None, rng: ServerStreams
    ) -> S:
        """The server after the answers of `clients`; `up` is None when nobody took part."""

    @abstractmethod
    def model(self, server: S) -> Params:
        """The model that is evaluated and returned, without a client axis."""

    @abstractmethod
    def releases(self, plan: Plan) -> Sequence[Release]:
        """Every disclosure of a run, priced or infinite."""

    def personal_model(self, server: S, state: State) -> Params | None:
        """The models `[K, ...]` that K clients use for themselves; None where all use the server's.

        Computed by the clients from what they remember, so it is evaluated and never released.
        """
        return None

    def with_model(self, server: S, params: Params) -> S:
        """The server with this model in place of its own, for wrappers that steer the training."""
        if "params" not in {field.name for field in fields(server)}:
            raise InputError(
                "wrap", self.name, "its model cannot be replaced", "Use a wrapper that only reads it."
            )
        changed: dict[str, Any] = {"params": params}
        return replace(server, **changed)

    def paper_claim(self, plan: Plan) -> str | None:
        """The privacy its paper states for such a run, in the paper's terms; None where it states none."""
        return None


AnyMethod = Method[Any, Any, Any]
METHODS: dict[str, type[AnyMethod]] = {}
C = TypeVar("C")


def register(
    name: str, summary: str, *, server: type[Record], down: type[Message], up: type[Message]
) -> Callable[[type[C]], type[C]]:
    """Make a method known under its name, with the types of what it keeps and sends."""

    def add(method: type[C]) -> type[C]:
        assert issubclass(method, Method)
        require_free("method", name, method, METHODS.get(name))
        if left_out := sorted(method.__abstractmethods__):
            raise InputError(
                "method", method.__name__, f"does not say {' and '.join(left_out)}", "A method defines each."
            )
        method.name, method.summary = name, summary
        method.server_type, method.down_type, method.up_type = server, down, up
        METHODS[name] = method
        return method

    return add


def unprotected(what: str, reason: str) -> tuple[Release, ...]:
    """The releases of a method that hides nothing: no epsilon against anybody, for no unit."""
    return tuple(Release(what, unit, ADVERSARIES, Unprotected(reason)) for unit in UNITS)


def field_names(method: AnyMethod | type[AnyMethod]) -> list[str]:
    """The names of a method's configuration, in their order."""
    return [field.name for field in fields(cast(Any, method))]
