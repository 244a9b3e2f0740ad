"""Post-processing of the released model, usable with any method: `[[wrap]]` in a configuration.

A rule gets the model of a method after each round and returns the model to release in its place, and optionally one to
continue training from. It gets no other input, so it is post-processing: the releases, and with them every epsilon, are
those of the inner method.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from fedveil.data.client_data import ClientData, Clients
from fedveil.data.dataset import Dataset
from fedveil.errors import require_free
from fedveil.messages import Message, Record
from fedveil.methods.disclosure import (
    Adaptation,
    BoundedUpload,
    Earlier,
    LocalSteps,
    TrainingStart,
    UploadReading,
)
from fedveil.methods.method import AnyMethod, At, Demand, Method, S
from fedveil.methods.registry import LazyRegistry
from fedveil.privacy.releases import Plan, Release
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Batch, Task
from fedveil.tree import Params, State

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

Memory = dict[str, "Tensor"]


@dataclass(frozen=True)
class Step:
    """The result of a rule: its memory, the released model, and the model to continue from (None: unchanged)."""

    memory: Memory
    released: Params
    resume: Params | None = None


class Wrapper(ABC):
    """A `[[wrap]]` section: a frozen, validated dataclass whose fields are its configuration."""

    name: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def around(self, method: AnyMethod) -> AnyMethod:
        """The wrapped method; refuses a method that it does not apply to."""


class Rule(Wrapper):
    """One kind of post-processing."""

    def around(self, method: AnyMethod) -> AnyMethod:
        return WrappedMethod(method, self)

    @abstractmethod
    def start(self, params: Params) -> Memory:
        """The memory before the first round, from the public initial model."""

    @abstractmethod
    def step(self, round: int, memory: Memory, before: Params, after: Params) -> Step:
        """One round: `before` is the last released model (at first the public one), `after` the method's new one."""


@dataclass(frozen=True)
class Wrapped(Record):
    """The inner method's server as flat tensors and their head, the rule's memory and the released model."""

    inner: dict[str, Tensor]
    inner_head: str
    memory: Memory
    params: Params


@dataclass(frozen=True)
class Around(Method[S, Message, Message]):
    """A method around another; by default everything is delegated to the inner method."""

    inner: AnyMethod

    def named(
        self, name: str, summary: str, server_type: type[Record], up_type: type[Message] | None = None
    ) -> None:
        """Set name, summary and types from the inner method and the wrapper."""
        own: dict[str, Any] = {
            "name": f"{self.inner.name}+{name}",
            "summary": f"{self.inner.summary}; {summary}",
            "server_type": server_type,
            "down_type": self.inner.down_type,
            "up_type": up_type or self.inner.up_type,
            "discloses_sum": self.inner.discloses_sum,
        }
        for field, value in own.items():
            object.__setattr__(self, field, value)

    @property
    def numerics(self) -> int:  # type: ignore[override]
        return self.inner.numerics

    def exchanges(self, plan: Plan) -> int:
        return self.inner.exchanges(plan)

    def check_clients(self, task: Task, clients: Clients) -> None:
        self.inner.check_clients(task, clients)

    def demand(self, plan: Plan, records: int, classes: int) -> Demand:
        return self.inner.demand(plan, records, classes)

    def computes_together(self, task: Task) -> bool:
        return self.inner.computes_together(task)

    def init_client(self, task: Task, data: ClientData, rng: ClientStreams) -> State:
        return self.inner.init_client(task, data, rng)

    def init_server(self, params: Params, plan: Plan) -> S:
        return cast(S, self.inner.init_server(params, plan))

    def broadcast(self, at: At, server: S, clients: Sequence[int]) -> Message:
        return cast(Message, self.inner.broadcast(at, server, clients))

    def client_update(
        self, task: Task, at: At, down: Message, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Message, State]:
        return self.inner.client_update(task, at, down, data, state, rng)

    def server_update(
        self,
        task: Task,
        at: At,
        server: S,
        clients: Sequence[int],
        up: Message | None,
        rng: ServerStreams,
    ) -> S:
        return cast(S, self.inner.server_update(task, at, server, clients, up, rng))

    def model(self, server: S) -> Params:
        return self.inner.model(server)

    def with_model(self, server: S, params: Params) -> S:
        return cast(S, self.inner.with_model(server, params))

    def personal_model(self, server: S, state: State) -> Params | None:
        return self.inner.personal_model(server, state)

    def cohort_models(self, server: S) -> Params | None:
        return self.inner.cohort_models(server)

    def paper_claim(self, plan: Plan) -> str | None:
        return self.inner.paper_claim(plan)

    def disclosed(self, up: Message) -> Message:
        return cast(Message, self.inner.disclosed(up))

    def single_uploads(self, up: Message, places: Sequence[int]) -> Message:
        return cast(Message, self.inner.single_uploads(up, places))

    def least_noise(self, plan: Plan, clients: Sequence[int], up: Message) -> tuple[Sequence[int], Message]:
        return self.inner.least_noise(plan, clients, up)

    def noise_found(self, plan: Plan, answered: int) -> str | None:
        return self.inner.noise_found(plan, answered)

    def sent_model(self, down: Message) -> Params | None:
        return self.inner.sent_model(down)

    def local_training(self, at: At) -> LocalSteps | None:
        return self.inner.local_training(at)

    def round_training(self, at: At) -> LocalSteps | None:
        return self.inner.round_training(at)

    def shadow_training(self) -> LocalSteps:
        return self.inner.shadow_training()

    def disclosed_sizes(self, up: Message) -> Tensor | None:
        return self.inner.disclosed_sizes(up)

    def read_upload(self, at: At, down: Message, up: Message) -> UploadReading | None:
        return self.inner.read_upload(at, down, up)

    def bounded_upload(self, at: At, down: Message, up: Message) -> BoundedUpload | None:
        return self.inner.bounded_upload(at, down, up)

    def adaptation(self, at: At, dimension: int, examples: int) -> Adaptation:
        return self.inner.adaptation(at, dimension, examples)

    def batches_behind(self, at: At, data: ClientData, rng: ClientStreams) -> Sequence[Batch]:
        return self.inner.batches_behind(at, data, rng)

    def input_perturbation(self, state: State) -> Tensor | None:
        return self.inner.input_perturbation(state)

    def training_start(self, at: At, down: Message, earlier: Earlier) -> TrainingStart:
        return self.inner.training_start(at, down, earlier)

    def noisy_gradients(
        self, task: Task, at: At, data: ClientData, rng: ClientStreams, accesses: int | None = None
    ) -> Tensor | None:
        return self.inner.noisy_gradients(task, at, data, rng, accesses)

    def pictures(self, at: At, up: Message, dataset: Dataset) -> Mapping[str, Figure]:
        return self.inner.pictures(at, up, dataset)

    def defences(self) -> tuple[str, ...]:
        return self.inner.defences()

    def unused_fields(self) -> Mapping[str, str]:
        return self.inner.unused_fields()

    def unused_for(self, rounds: int) -> Mapping[str, str]:
        return self.inner.unused_for(rounds)


@dataclass(frozen=True)
class WrappedMethod(Around[Wrapped]):
    """A method whose released model is post-processed by a rule. Everything else is delegated.

    Args:
        inner: The method.
        rule: The post-processing.
    """

    rule: Rule

    def __post_init__(self) -> None:
        self.named(self.rule.name, self.rule.summary, Wrapped)

    def init_server(self, params: Params, plan: Plan) -> Wrapped:
        return self._wrap(self.inner.init_server(params, plan), self.rule.start(params), params)

    def broadcast(self, at: At, server: Wrapped, clients: Sequence[int]) -> Message:
        return cast(Message, self.inner.broadcast(at, self._unwrap(server), clients))

    def server_update(
        self,
        task: Task,
        at: At,
        server: Wrapped,
        clients: Sequence[int],
        up: Message | None,
        rng: ServerStreams,
    ) -> Wrapped:
        inner = self.inner.server_update(task, at, self._unwrap(server), clients, up, rng)
        if at.exchange + 1 < self.inner.exchanges(at.plan):
            return self._wrap(inner, server.memory, server.params)
        done = self.rule.step(at.round, server.memory, server.params, self.inner.model(inner))
        if done.resume is not None:
            inner = self.inner.with_model(inner, done.resume)
        return self._wrap(inner, done.memory, done.released)

    def model(self, server: Wrapped) -> Params:
        return server.params

    def with_model(self, server: Wrapped, params: Params) -> Wrapped:
        inner = self.inner.with_model(self._unwrap(server), params)
        return self._wrap(inner, server.memory, params)

    def personal_model(self, server: Wrapped, state: State) -> Params | None:
        """The clients' own models around the released one."""
        inner = self._unwrap(server)
        if self.inner.personal_model(inner, state) is None:
            return None
        return self.inner.personal_model(self.inner.with_model(inner, server.params), state)

    def cohort_models(self, server: Wrapped) -> Params | None:
        """None: the rule changes the server's model, not the models that it holds for single clients."""
        return None

    def releases(self, plan: Plan) -> Sequence[Release]:
        return self.inner.releases(plan)

    def _wrap(self, inner: Record, memory: Memory, params: Params) -> Wrapped:
        return Wrapped(inner.tensors(), json.dumps(inner.head()), memory, params)

    def _unwrap(self, server: Wrapped) -> Any:
        return self.inner.server_type.assemble(json.loads(server.inner_head), server.inner)


WRAPPERS: LazyRegistry[Wrapper] = LazyRegistry()
C = TypeVar("C")


def wrapper(name: str, summary: str) -> Callable[[type[C]], type[C]]:
    """Register a wrapper under its name."""

    def add(kind: type[C]) -> type[C]:
        assert issubclass(kind, Wrapper)
        require_free("wrapper", name, kind, WRAPPERS.other(name, kind.__module__))
        kind.name, kind.summary = name, summary
        WRAPPERS[name] = kind
        return kind

    return add


def wrapper_fields(wrapper: Wrapper | type[Wrapper]) -> list[str]:
    """The names of a wrapper's configuration, in their order."""
    return [field.name for field in dataclasses.fields(cast(Any, wrapper))]
