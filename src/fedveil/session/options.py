"""The options of a run: typed, frozen and checked here, so that nobody further on checks them again."""

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
    """What `[privacy]` says, and what the statement says about the data.

    Attributes:
        delta: Of every guarantee that is stated.
        budget: The run stops before the round that would exceed this epsilon; None: no budget.
        budget_adversary: Against whom the budget holds.
        budget_unit: For whom it holds; None: the unit that the method protects.
        ledger: A ledger that several runs share; None: one of the run's own.
        notes: How the data was prepared, as far as that matters to privacy.
        rows_per_person: How many records of one person there are at most, where the data names people.

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


StopMetric = Literal["loss", "accuracy", "rmse", "r2", "concordance", "perplexity"]
_LESS_IS_BETTER = ("loss", "rmse", "perplexity")


@dataclass(frozen=True)
class EarlyStopping:
    """Stop before a round if the score on public examples was not better in `patience` rounds than before them.

    Attributes:
        metric: Which score; of models of classes "accuracy" or "loss".
        patience: So many rounds without a better score end the run.
        min_delta: A score is better if it is by more than this.
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

    def reason(self, scores: Sequence[float]) -> str | None:
        """Why a run with these scores, one for each round, ends; None if it does not."""
        if len(scores) <= self.patience:
            return None
        sign = -1.0 if self.metric in _LESS_IS_BETTER else 1.0
        before, last = scores[: -self.patience], scores[-self.patience :]
        best = max(sign * score for score in before)
        if any(sign * score > best + self.min_delta for score in last):
            return None
        return f"{self.metric} on the public examples was not better in {self.patience} rounds"


@dataclass(frozen=True)
class RunOptions:
    """How a run is carried out and recorded, whatever its engine.

    Attributes:
        results: The run's folder. An interrupted run resumes there (if seeded, to the same result), a finished one is
            read back, and a folder that holds another run is refused. None: nothing is written.
        config: The text kept there as `config.toml`.
        facts: Added to the run's summary.
        transcript: Whether to record the messages of every round, or of which rounds.
        transcript_exchanges: Record only the first so many exchanges of a round.
        min_clients: An exchange that fewer clients answered counts as answered by nobody.
        noise_source: "seeded": privacy noise and cohorts come from the seed, so whoever knows it can remove the noise.
            "entropy": both, and the Poisson batches of records, come from the operating system; a repeated round draws
            fresh noise, so it is charged again.
        deployed: Whether the clients are nodes that decide for themselves if they answer.
        early_stopping: When a run ends early by its scores on `AvailableData.public`; None: never.

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
            raise InputError("run.transcript", self.transcript, "is no list of rounds", "Use True or [1, 5].")
        rounds = tuple(whole_number("run.transcript", number, 1) for number in self.transcript)
        object.__setattr__(self, "transcript", rounds)

    @property
    def replay_safe(self) -> bool:
        """Whether a repeated round draws the same noise, so that it discloses nothing new."""
        return self.noise_source == "seeded"


@dataclass(frozen=True)
class SimulationOptions:
    """How the simulator spreads clients over this machine, or over a cluster; none of it changes the result.

    Attributes:
        workers: Processes; 0 chooses a sensible number.
        max_memory: Bytes that the clients computed together may take.
        cluster: The address of a Ray cluster to compute on, "auto" for the one that runs on this machine, "local" to
            start one here. None: this machine's own processes.

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
        test: What the shared model is scored on during the run.
        classes: How many classes scores by class are for.
        clients: The clients' training data. A results folder begun on other data is refused.
        local_test: Held-out examples of the clients.
        score_clients: Whether the final model is scored on each client's own examples: `local_test`, or else `clients`.
        names: What the clients are called, where they have names.
        public: Examples that are nobody's secret, for early stopping.
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
        """The clients' own examples that the final model is scored on."""
        return (self.local_test or self.clients) if self.score_clients else None


def _whole(options: object, name: str, least: int, most: int | None = None) -> None:
    """Check a field, and make Python's own integer of NumPy's, which JSON does not know."""
    object.__setattr__(options, name, whole_number(f"run.{name}", getattr(options, name), least, most))
