"""What a report knows of a run: checked values, each absent where the run's folder does not have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil.numerics import NUMERICS
from fedveil.report.attack_files import Attack, Picture
from fedveil.report.files import number


@dataclass(frozen=True)
class Proof:
    """The guarantee for one unit against one adversary; epsilon None: nothing is proven, for `reason`."""

    unit: str
    adversary: str
    epsilon: float | None
    delta: float | None
    adjacency: str
    sampler: str
    theorem: str
    reason: str
    units: int = 1
    """The number of participating units."""


@dataclass(frozen=True)
class Person:
    """The guarantee for a person with the largest allowed number of rows."""

    adversary: str
    epsilon: float
    delta: float


@dataclass(frozen=True)
class Point:
    """A recorded round; bytes are the total traffic in both directions up to and including it."""

    round: int
    accuracy: float | None
    loss: float | None
    epsilon: float | None
    bytes: float
    r2: float | None = None
    concordance: float | None = None
    perplexity: float | None = None
    invited: int | None = None
    answered: int | None = None


@dataclass(frozen=True)
class Majority:
    """The accuracy of the most frequent class on the test set, and the number of labels."""

    rate: float
    labels: int


@dataclass(frozen=True)
class Paper:
    """The published value that a run reproduces."""

    source: str
    where: str
    expected: float | None
    metric: str
    tolerance: float | None
    scale: str

    @property
    def published(self) -> str | None:
        """The number as tables show it: a per cent where it is an accuracy, else beside what it measures."""
        if self.expected is None:
            return None
        if self.metric not in ("accuracy", "personal"):
            return f"{self.expected:g} ({self.metric})"
        return f"{self.expected if self.expected > 1 else 100 * self.expected:.2f} %"


@dataclass(frozen=True)
class Run:
    """One run, as far as it can be read from its folder."""

    name: str
    finished: bool
    experiment: str = ""
    method: str = "unknown method"
    seed: int | None = None
    dataset: str = ""
    data: str = ""
    model: str = ""
    accuracy: float | None = None
    loss: float | None = None
    r2: float | None = None
    concordance: float | None = None
    mcc: float | None = None
    perplexity: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Scores with intervals on the test set, by name."""
    client_metrics: Mapping[str, Any] = field(default_factory=dict)
    """The same on each client's held-out examples, by the client's name."""
    prepared: tuple[str, ...] = ()
    """Notes on data preparation that affect privacy."""
    persons: tuple[Person, ...] = ()
    deployed: bool = False
    """Whether the data is that of the nodes; the data set named is then what the server tests on."""
    personal: float | None = None
    rounds: int = 0
    planned: int | None = None
    seconds: float | None = None
    bytes_up: float | None = None
    bytes_down: float | None = None
    stopped: str = ""
    claim: str | float = "none"
    proven: tuple[Proof, ...] = ()
    audits: tuple[Mapping[str, Any], ...] = ()
    words: str = ""
    removable: bool = False
    """Whether whoever knows the seed can remove the privacy noise."""
    noise: str = ""
    classes: tuple[str, ...] = ()
    per_class: tuple[float | None, ...] = ()
    per_client: tuple[float | None, ...] = ()
    per_client_on: str = ""
    partition: tuple[tuple[int, ...], ...] = ()
    plan: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    numerics: int | None = NUMERICS  # None where nothing tells
    parameters: int | None = None
    majority: Majority | None = None
    clients: tuple[str, ...] = ()
    """Names of the clients, where the data has any."""
    statement: Mapping[str, Any] = field(default_factory=dict)
    """The content of statement.json."""
    paper: Paper | None = None
    history: tuple[Point, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    config_text: str = ""
    attacks: tuple[Attack, ...] = ()
    synthetic: tuple[Picture, ...] = ()
    figures: tuple[Picture, ...] = ()
    problems: tuple[str, ...] = ()
    """Damaged or missing parts, file by file."""
    notes: tuple[str, ...] = ()
    folder: Path | None = None

    @property
    def budget(self) -> float | None:
        section = self.config.get("privacy")
        return number(section.get("budget")) if isinstance(section, Mapping) else None
