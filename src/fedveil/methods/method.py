"""The contract of every method, and the registry of their names.

A method is a frozen, validated dataclass: its fields are its configuration. Both halves, client and server, are
pure functions of what they are given: state in, state out, randomness as an argument.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from fedveil.data.client_data import ClientData, Clients
from fedveil.data.dataset import Dataset
from fedveil.errors import InputError, require_free
from fedveil.lazy_torch import torch
from fedveil.messages import Message, Record
from fedveil.methods.disclosure import (
    Adaptation,
    BoundedUpload,
    Earlier,
    LocalSteps,
    TrainingStart,
    UploadReading,
    noise_against_server,
    read_fields,
)
from fedveil.methods.registry import LazyRegistry
from fedveil.numerics import NUMERICS
from fedveil.privacy.mechanisms import SumMechanism
from fedveil.privacy.private_sum import NoisySum
from fedveil.privacy.releases import ADVERSARIES, UNITS, Plan, Release, Unprotected
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Batch, Task
from fedveil.tree import Params, State

if TYPE_CHECKING:  # drawing is loaded when something is drawn
    from matplotlib.figure import Figure
    from torch import Tensor

S = TypeVar("S", bound=Record)
Down = TypeVar("Down", bound=Message)
Up = TypeVar("Up", bound=Message)


@dataclass(frozen=True)
class At:
    """The position in a run, which is public.

    Args:
        plan: The outline of the run.
        round: The round, from 1.
        exchange: The exchange within the round, from 0.
    """

    plan: Plan
    round: int
    exchange: int = 0


@dataclass(frozen=True)
class ClientSum(Generic[S, Down]):
    """A method whose server needs only the sum of its clients' vectors, for secure aggregation.

    Attributes:
        mechanism: What bounds each unit's part of the sum to an L2 norm, and the noise of the sum; `Unnoised` for none.
        contribution: What K clients contribute, `[K, ...]`, and what they remember. Whole clients are not clipped yet.
        update: The server after the noisy sum.
        what: The sum in the words of a `Release`.
        record_rate: Where the unit is a record: the contribution is the sum of a Poisson batch of this rate, each
            record's part clipped already. None: the unit is a client.
        reading: The model that was sent and the mean contribution `[1, ...]`, as attacks read them; by default the mean
            is a change of the model.
        shapes: Those of one client's contribution to a broadcast; by default those of the model in it.
    """

    mechanism: SumMechanism
    contribution: Callable[[Task, At, Down, ClientData, State, ClientStreams], tuple[Params, State]]
    update: Callable[[At, S, NoisySum], S]
    what: str = "the sum of the clients' updates"
    record_rate: float | None = None
    reading: Callable[[At, Params, Params], UploadReading] | None = None
    shapes: Callable[[Down], dict[str, torch.Size]] | None = None


@dataclass(frozen=True)
class Demand:
    """The resources that one exchange needs on a client's machine.

    Attributes:
        steps: Number of sequential gradients.
        examples: Number of examples that it makes or stores besides its own.
        indices: Number of example positions that it stores.
    """

    steps: int
    examples: int = 0
    indices: int = 0


class Method(ABC, Generic[S, Down, Up]):
    """A method of federated learning."""

    name: ClassVar[str]
    summary: ClassVar[str]
    server_type: ClassVar[type[Record]]
    down_type: ClassVar[type[Message]]
    up_type: ClassVar[type[Message]]
    numerics: ClassVar[int] = NUMERICS
    """By which arithmetic this version runs the method (see `fedveil.numerics`).

    A method whose own bits have changed says `NUMERICS + n`, with a comment on what the n-th change was: results of
    other methods stay valid, and a rise of `NUMERICS` moves every method to a number that it never had.
    """
    discloses_sum: ClassVar[bool] = False
    """Whether the server learns only the sum of the uploads; see `disclosed`."""

    def exchanges(self, plan: Plan) -> int:
        """The number of exchanges in a round."""
        return 1

    def check_clients(self, task: Task, clients: Clients) -> None:
        """Refuse data that this configuration cannot be used with, before a run starts.

        A node also calls it, before it charges anything, with artificial examples in place of its own, so that the
        outcome does not depend on its records.
        """
        return

    def demand(self, plan: Plan, records: int, classes: int) -> Demand:
        """The resources of one exchange of a client with so many records, which nodes compare with their policy.

        By default the steps of the local training. A method with loops of its own counts them.
        """
        local = self.local_training(At(plan, 1))
        if local is None:
            return Demand(1)
        steps = local.count(records)
        return Demand(steps, indices=0 if local.batch_size is None else steps * local.batch(records))

    def computes_together(self, task: Task) -> bool:
        """Whether the gradients of several clients are one computation even where convolutions go client by client."""
        return False

    @abstractmethod
    def init_server(self, params: Params, plan: Plan) -> S:
        """The server before the first round."""

    def init_client(self, task: Task, data: ClientData, rng: ClientStreams) -> State:
        """The clients' states before their first participation, `[K, ...]`; states never leave the clients."""
        return {}

    @abstractmethod
    def broadcast(self, at: At, server: S, clients: Sequence[int]) -> Down:
        """The message to the cohort: one row for all, or one row per client."""

    @abstractmethod
    def client_update(
        self, task: Task, at: At, down: Down, data: ClientData, state: State, rng: ClientStreams
    ) -> tuple[Up, State]:
        """The uploads and new states of K clients."""

    @abstractmethod
    def server_update(
        self, task: Task, at: At, server: S, clients: Sequence[int], up: Up | None, rng: ServerStreams
    ) -> S:
        """The server after the answers of `clients`; `up` is None if nobody answered."""

    def exact_sum(self, at: At, down: Down, up: Up) -> Message | None:
        """The uploads of K clients as one row that gives the same bits in the server's update.

        Engines on several machines send sums of chunks instead of every upload.

        Args:
            at: The exchange of both messages.
            down: What these clients were sent.
            up: Their answers.

        Returns:
            A message of one row, which `server_update` accepts beside other such rows; `clients` still names everybody.
            None (the default) where the server needs every upload, or a sum of sums would round differently.
        """
        return None

    @abstractmethod
    def model(self, server: S) -> Params:
        """The model for evaluation and release, without a client axis."""

    @abstractmethod
    def releases(self, plan: Plan) -> Sequence[Release]:
        """All releases of a run, protected or not."""

    def client_sum(self) -> ClientSum[S, Down] | None:
        """How the method runs under secure aggregation; None (the default): its server needs single uploads.

        Raises:
            InputError: Fields of this configuration rule it out.
        """
        return None

    def disclosed(self, up: Up) -> Up:
        """The part of the uploads `[K, ...]` that the server observes: by default all, else their sum as one row."""
        return up

    def single_uploads(self, up: Up, places: Sequence[int]) -> Up:
        """The part of single clients' uploads that the server observes: by default their rows."""
        return up.rows(places)

    def least_noise(self, plan: Plan, clients: Sequence[int], up: Up) -> tuple[Sequence[int], Up]:
        """The answers with the least unknown noise that the guarantee allows, for audits; by default unchanged.

        A sum that fewer clients answer, and of which colluders know their part, is one.
        """
        return clients, up

    def noise_found(self, plan: Plan, answered: int) -> str | None:
        """The actual noise of the sums, if at least `answered` clients answered in every completed round.

        None (the default) if it does not depend on that.
        """
        return None

    def personal_model(self, server: S, state: State) -> Params | None:
        """The personal models `[K, ...]` of K clients; None if all use the server's model.

        Computed by the clients from their states, so they are evaluated and never released.
        """
        return None

    def cohort_models(self, server: S) -> Params | None:
        """The models `[K, ...]` that the server holds for the last cohort; None if there are none.

        They are evaluated where clients have no model of their own (`personal_model`).
        """
        return None

    def with_model(self, server: S, params: Params) -> S:
        """The server with this model in place of its own, for wrappers that change the training."""
        if "params" not in {field.name for field in fields(server)}:
            raise InputError(
                "wrap", self.name, "its model cannot be replaced", "Use a wrapper that only reads it."
            )
        changed: dict[str, Any] = {"params": params}
        return replace(server, **changed)

    def paper_claim(self, plan: Plan) -> str | None:
        """The privacy that the paper claims for such a run, in the paper's terms; None if it claims none."""
        return None

    # Hooks for attacks, audits and reports. Defaults are for methods that send models, their changes or gradients under
    # the names `params`, `update` or `gradient`; other methods override them in their own file.

    def sent_model(self, down: Down) -> Params | None:
        """The models `[1 or K, ...]` in a broadcast, by default its `params`; None where it holds none."""
        params: Params | None = getattr(down, "params", None)
        return params

    def local_training(self, at: At) -> LocalSteps | None:
        """The local training between a broadcast and an upload; None (the default) if there is none.

        `LocalTraining` derives it from its fields. A method that clips its uploads states it here.
        """
        return None

    def round_training(self, at: At) -> LocalSteps | None:
        """The training on a client's own examples that a round of the whole method imitates, for shadow models.

        By default the local training. A method whose server steps along gradients says with which batches and
        step size.
        """
        return self.local_training(at)

    def shadow_training(self) -> LocalSteps:
        """The training of shadow models if `round_training` is None.

        By default 20 epochs with the fields `lr` and `batch_size`, or with default values if there are none.
        """
        return LocalSteps(float(getattr(self, "lr", 0.1)), int(getattr(self, "batch_size", 64) or 64), 20)

    def disclosed_sizes(self, up: Up) -> Tensor | None:
        """The numbers of examples `[K, ...]` disclosed by uploads, by default their `size`; None if not disclosed."""
        size = getattr(up, "size", None)
        return size if isinstance(size, torch.Tensor) else None

    def read_upload(self, at: At, down: Down, up: Up) -> UploadReading | None:
        """The uploads of K clients as models and gradients.

        Args:
            at: The exchange of both messages.
            down: What these clients were sent.
            up: Their answers.

        Returns:
            By default according to the field names of the upload (see `read_fields`); None if there is no model.
        """
        sent = self.sent_model(down)
        if sent is None:
            return None
        return read_fields(sent, up, self.local_training(at), self.round_training(at))

    def bounded_upload(self, at: At, down: Down, up: Up) -> BoundedUpload | None:
        """The values that K clients clipped and perturbed, so that a server can refuse uploads with too large a norm.

        Args:
            at: The exchange of both messages.
            down: What these clients were sent.
            up: Their answers.

        Returns:
            None (the default) if uploads are not bounded as a whole.
        """
        return None

    def adaptation(self, at: At, dimension: int, examples: int) -> Adaptation:
        """How an attacker who knows the configuration adapts to the protection of an upload.

        Args:
            at: The exchange that is attacked.
            dimension: The number of parameters.
            examples: How many examples are behind an upload.

        Returns:
            By default the Gaussian noise that `releases` declare against the server at client level, in units of
            the clip of the local training; none where it has no clip.
        """
        local = self.local_training(at)
        if local is None or local.clip is None:
            return Adaptation()
        return Adaptation.to_noise(local.clip * noise_against_server(self.releases(at.plan), at.round))

    def batches_behind(self, at: At, data: ClientData, rng: ClientStreams) -> Sequence[Batch]:
        """The batches of K clients' examples that their uploads of this exchange depend on; by default all examples."""
        return [data.everything()]

    def input_perturbation(self, state: State) -> Tensor | None:
        """The clients' perturbation of their last batch `[K, B, ...]`, from their states; None (the default): none.

        It must start again in every round, since only that round is replayed to compute it.
        """
        return None

    def training_start(self, at: At, down: Down, earlier: Earlier) -> TrainingStart:
        """The start of local training, as far as the server knows it.

        Args:
            at: The exchange that is attacked.
            down: What the attacked clients were sent.
            earlier: Reads what each of them was sent and answered before; called only by methods that need it.

        Returns:
            By default the broadcast models.
        """
        sent = self.sent_model(down)
        assert sent is not None, f"{self.name} sends no model to start from"
        return TrainingStart(sent)

    def noisy_gradients(
        self, task: Task, at: At, data: ClientData, rng: ClientStreams, accesses: int | None = None
    ) -> Tensor | None:
        """The protected gradients behind an upload that cannot be mapped to coordinates of an update, for audits.

        Args:
            task: The task of the audit.
            at: The exchange that is audited.
            data: The clients' examples.
            rng: The clients' streams.
            accesses: How many gradients to draw; by default as many as one upload is made from.

        Returns:
            `[accesses, K, d]`, pointing where they move the parameters; None (the default) where uploads themselves
            are audited.
        """
        return None

    def pictures(self, at: At, up: Up, dataset: Dataset) -> Mapping[str, Figure]:
        """Figures of the answers to this exchange for the report, by name; none by default.

        Names are paths in the run's folder without `.png`: `synthetic/...` or `figures/...`. Only messages may be
        drawn, so that figures show no more than the server observes.
        """
        return {}

    def unused_fields(self) -> Mapping[str, str]:
        """The fields without effect in this configuration of the method, with a remedy for each."""
        return {}

    def unused_for(self, rounds: int) -> Mapping[str, str]:
        """The fields without effect in a run of only so many rounds, with the reason for each."""
        return {}

    def defences(self) -> tuple[str, ...]:
        """The names of the defences around a method, outermost first."""
        return ()


AnyMethod = Method[Any, Any, Any]
METHODS: LazyRegistry[AnyMethod] = LazyRegistry()
C = TypeVar("C")


def register(
    name: str, summary: str, *, server: type[Record], down: type[Message], up: type[Message]
) -> Callable[[type[C]], type[C]]:
    """Register a method under its name, with the types of its state and messages.

    Args:
        name: The name in configurations and on the command line.
        summary: A description of one line.
        server: The type of the server's state.
        down: The type of broadcasts.
        up: The type of uploads.

    Returns:
        A decorator that returns the class unchanged.
    """

    def add(method: type[C]) -> type[C]:
        assert issubclass(method, Method)
        require_free("method", name, method, METHODS.other(name, method.__module__))
        if left_out := sorted(method.__abstractmethods__):
            raise InputError(
                "method", method.__name__, f"does not say {' and '.join(left_out)}", "A method defines each."
            )
        method.name, method.summary = name, summary
        method.server_type, method.down_type, method.up_type = server, down, up
        METHODS[name] = method
        return method

    return add


def current_numerics(name: str) -> int:
    """By which arithmetic this version runs the method of this name, wrapped or not."""
    kind = METHODS.get(name.partition("+")[0])
    return NUMERICS if kind is None else kind.numerics


def unprotected(what: str, reason: str) -> tuple[Release, ...]:
    """The releases of an unprotected method: no finite epsilon against any adversary, for any unit.

    Args:
        what: A description of the release.
        reason: The reason why it is not protected.

    Returns:
        One release for each unit, visible to every adversary.
    """
    return tuple(Release(what, unit, ADVERSARIES, Unprotected(reason)) for unit in UNITS)


def field_names(method: AnyMethod | type[AnyMethod]) -> list[str]:
    """The names of a method's fields, in order."""
    return [field.name for field in fields(cast(Any, method))]
