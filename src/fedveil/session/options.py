"""The options of a run: typed, frozen and validated here, once."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from fedveil.data.client_data import Array, Clients
from fedveil.data.dataset import Examples
from fedveil.engines.simulation import Execution
from fedveil.errors import LARGEST_SEED, InputError, install, known_name, whole_number
from fedveil.privacy.releases import Adversary, Unit
from fedveil.streams import NoiseSource


@dataclass(frozen=True)
class PrivacySettings:
    """The settings of `[privacy]`, and facts about the data for the privacy statement.

    Attributes:
        delta: The delta of every stated guarantee.
        budget: The run stops before the round that would exceed this epsilon; None: no budget.
        budget_adversary: The adversary of the budget.
        budget_unit: The unit of the budget; None: the unit that the method protects.
        ledger: A ledger shared by several runs; None: the run has its own.
        notes: Notes on data preparation that affect privacy.
        rows_per_person: The largest number of records of one person, where the data identifies persons.
        ends: The number of rounds after which the run may end, which share delta; set by the rule of early stopping.

    Guarantees:
        A run stops before the round that would exceed its budget
        (`test_the_budget_stops_before_the_round_that_would_exceed_it`), also where runs share a ledger
        (`test_runs_that_share_a_ledger_share_the_budget`).
    """

    delta: float = 1e-5
    budget: float | None = None
    budget_adversary: Adversary = "observer"
    budget_unit: Unit | None = None
    ledger: Path | None = None
    notes: tuple[str, ...] = ()
    rows_per_person: int | None = None
    ends: int = 1

    @property
    def share(self) -> float:
        """The delta at which epsilon is computed."""
        return self.delta / self.ends


StopMetric = Literal["loss", "accuracy", "rmse", "r2", "concordance", "perplexity"]
_LESS_IS_BETTER = ("loss", "rmse", "perplexity")


@dataclass(frozen=True)
class EarlyStopping:
    """Stop before a round if the score on public examples has not improved for `patience` rounds.

    Attributes:
        metric: The score; for classifiers "accuracy" or "loss".
        patience: The number of rounds without improvement after which the run ends.
        min_delta: The smallest improvement that counts.
    """

    metric: StopMetric = "loss"
    patience: int = 5
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        known_name("run.early_stopping.metric", "metric", self.metric, get_args(StopMetric))
        whole_number("run.early_stopping.patience", self.patience, 1)

    @property
    def key(self) -> str:
        """Its name among a round's metrics."""
        return f"public_{self.metric}"

    def ends(self, rounds: int) -> int:
        """The number of rounds after which a run of so many planned ones may end."""
        return max(1, rounds - self.patience)

    def reason(self, scores: Sequence[float]) -> str | None:
        """The reason to stop after these scores, one for each round; None to continue."""
        if len(scores) <= self.patience:
            return None
        sign = -1.0 if self.metric in _LESS_IS_BETTER else 1.0
        before, last = scores[: -self.patience], scores[-self.patience :]
        best = max(sign * score for score in before)
        if any(sign * score > best + self.min_delta for score in last):
            return None
        return f"{self.metric} on the public examples did not improve for {self.patience} rounds"


@dataclass(frozen=True)
class RunOptions:
    """How a run is executed and recorded, for every engine.

    Attributes:
        results: The run's folder. An interrupted run resumes there (if seeded, to the same result), a finished one is
            loaded, and the folder of another run is refused. None: nothing is written.
        config: The text stored there as `config.toml`.
        facts: Entries added to the run's summary.
        transcript: Whether to record the messages of every round, or the list of rounds to record.
        transcript_exchanges: Record only the first so many exchanges of a round.
        min_clients: An exchange that fewer clients answered counts as answered by nobody.
        noise_source: "seeded": privacy noise and cohorts come from the seed, so whoever knows it can remove the noise.
            "entropy": both, and the Poisson batches of records, come from the operating system; a repeated round draws
            fresh noise, so it is charged again.
        deployed: Whether the clients are nodes with their own policies, which may refuse to answer.
        early_stopping: The rule by which scores on `AvailableData.public` end a run; None: none.

    Raises:
        InputError: A value is out of range; its `field` is the key in a configuration, such as `run.seed`.
    """

    seed: int = 0
    results: Path | None = None
    config: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    privacy: PrivacySettings = PrivacySettings()
    evaluate_every: int = 1
    checkpoint_every: int = 10
    transcript: bool | Sequence[int] = False
    transcript_exchanges: int | None = None
    min_clients: int = 0
    noise_source: NoiseSource = "seeded"
    deployed: bool = False
    early_stopping: EarlyStopping | None = None

    def __post_init__(self) -> None:
        _whole(self, "seed", 0, LARGEST_SEED)
        _whole(self, "evaluate_every", 1)
        _whole(self, "checkpoint_every", 1)
        _whole(self, "min_clients", 0)
        if self.transcript_exchanges is not None:
            _whole(self, "transcript_exchanges", 1)
        known_name("run.noise", "source of noise", self.noise_source, get_args(NoiseSource))
        if isinstance(self.transcript, bool):
            return
        if not isinstance(self.transcript, Sequence):
            raise InputError(
                "run.transcript",
                self.transcript,
                "is not a list of rounds",
                "Use True or a list like [1, 5].",
            )
        rounds = tuple(whole_number("run.transcript", number, 1) for number in self.transcript)
        object.__setattr__(self, "transcript", rounds)

    @property
    def replay_safe(self) -> bool:
        """Whether a repeated round draws the same noise, so that it is the same release."""
        return self.noise_source == "seeded"


@dataclass(frozen=True)
class SimulationOptions:
    """How the simulator distributes clients over this machine or a cluster; the result does not depend on it.

    Attributes:
        workers: Number of processes; 0 chooses automatically.
        max_memory: Memory limit for clients computed together, in bytes.
        cluster: The address of a Ray cluster, "auto" for the one that runs on this machine, "local" to start one here.
            None: processes of this machine.

    Raises:
        InputError: A value is out of range; its `field` is the key in a configuration.
    """

    execution: Execution = "auto"
    workers: int = 0
    max_memory: int | None = None
    cluster: str | None = None

    def __post_init__(self) -> None:
        known_name("run.execution", "execution", self.execution, get_args(Execution))
        _whole(self, "workers", 0)
        if self.max_memory is not None:
            _whole(self, "max_memory", 1)
        if self.cluster is not None and importlib.util.find_spec("ray") is None:
            raise InputError("run.engine", "ray", "ray is not installed", install("flower"))


@dataclass(frozen=True)
class AvailableData:
    """The data that the process running the session can read: all of it in a simulation, at most a test set on the
    server of a federation.

    Attributes:
        test: The test examples of the shared model.
        classes: Number of classes, for scores by class.
        clients: The clients' training data. A results folder of other data is refused.
        local_test: Held-out examples of the clients.
        score_clients: Whether the final model is scored on each client's own examples: `local_test`, or else `clients`.
        names: Names of the clients, if they have any.
        public: Public examples, for early stopping.
    """

    test: Examples | tuple[Array, Array] | None = None
    classes: int | None = None
    clients: Clients | None = None
    local_test: Clients | None = None
    score_clients: bool = True
    names: Sequence[str] | None = None
    public: Examples | tuple[Array, Array] | None = None

    @property
    def scored_on(self) -> Clients | None:
        """The clients' own examples on which the final model is scored."""
        return (self.local_test or self.clients) if self.score_clients else None


def _whole(options: object, name: str, least: int, most: int | None = None) -> None:
    """Check an integer field, and convert NumPy integers, which JSON does not support."""
    object.__setattr__(options, name, whole_number(f"run.{name}", getattr(options, name), least, most))
