"""The sections of a configuration: keys, types and ranges."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from fedveil.engines.simulation import Execution
from fedveil.errors import LARGEST_SEED, InputError
from fedveil.experiment.aggregation import AggregationSection
from fedveil.losses import LossName
from fedveil.privacy.releases import MOST_CLIENTS, MOST_ROUNDS, Adversary, Sampler, Unit
from fedveil.session.options import StopMetric
from fedveil.streams import NoiseSource
from fedveil.validation import Section

_UNITS = {
    "": 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}

Metric = Literal["accuracy", "personal", "mcc", "perplexity"]


class PaperSection(Section):
    """Which published number this run re-makes."""

    source: str
    """The publication."""
    table: str = ""
    """Its table or figure."""
    row: str = ""
    """The row of the table."""
    expected: float | None = None
    """The published number."""
    attack: dict[str, float] = Field(default_factory=dict)
    """Published scores of attacks, by attack or score."""
    metric: Metric = "accuracy"
    """What the number measures; "personal" is the clients' own models' mean accuracy on the common test examples."""
    tolerance: float | None = None
    """How far a reproduction may be off."""
    scale: str = "full"
    """The scale: "full", or what was reduced."""


NO_DATASET = "none"


class TextSection(Section):
    """How texts become token ids; "auto" takes the model's own tokenizer, or hashes words where it has none."""

    vocabulary: Literal["auto", "hash", "bytes", "public", "tokenizer"] = "auto"
    """How words become ids: hashed, as bytes, by the words of a public text, or by the tokenizer of a folder; auto
    takes the model's own tokenizer, or hashes words where it has none."""
    size: Annotated[int, Field(ge=4)] = 8192
    """Ids of a hashed or public vocabulary."""
    path: str | None = None
    """The public text, or the folder of the tokenizer."""
    length: Annotated[int, Field(ge=1)] = 64
    """Tokens of a text; shorter ones are padded."""
    too_long: Literal["truncate", "refuse"] = "truncate"
    """What becomes of longer texts."""
    empty: Literal["refuse", "drop"] = "refuse"
    """What becomes of texts without a token."""
    pack: bool = True
    """Whether a text without labels is cut into pieces of full length."""


class TaskSection(Section):
    """What is learned: data, model and loss."""

    dataset: str = "digits"
    """Its name: see `fedveil list datasets`; none for a federation whose server holds no data."""
    model: str = "mlp-2"
    """Its name: see `fedveil list models`."""
    input_shape: list[Annotated[int, Field(ge=1)]] | None = None
    """The shape of an example, for a federation whose server holds no data."""
    classes: Annotated[int, Field(ge=1)] | None = None
    """The model's outputs: one for each class or interval, or one."""
    data_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the data set: see `fedveil list datasets NAME`."""
    model_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the model: see `fedveil list models NAME`."""
    features: str | None = None
    """A feature map that turns images into vectors without data: scattering or pretrained."""
    feature_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the feature map."""
    text: TextSection | None = None
    """How texts become token ids, for models of texts."""
    loss: LossName | None = None
    """By what numbers or survival times are learned; a federation's nodes are told it, where no table says it."""
    class_weights: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = None
    """A public weight of each class in the loss."""


class PartitionSection(Section):
    """Who holds which examples."""

    kind: Literal["iid", "dirichlet", "classes", "shards", "user"] = "iid"
    """Who holds which examples: at random, by Dirichlet proportions, by classes, by shards of sorted labels, or as
    the data's own users do."""
    clients: Annotated[int, Field(ge=1, le=MOST_CLIENTS)] | None = None
    """How many clients; 10 if not given, of kind = user as many as users."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Concentration of the Dirichlet proportions, 1 if not given; less is more unequal."""
    classes_per_client: Annotated[int, Field(ge=1)] | None = None
    """Classes that each client holds, of kind = classes."""
    shards_per_client: Annotated[int, Field(ge=1)] | None = None
    """Shards that each client holds, of kind = shards."""
    groups: list[list[int]] | None = None
    """The classes of each client, one list per client, of kind = classes."""
    min_size: Annotated[int, Field(ge=0)] | None = None
    """The fewest examples that a client may get, of kind = dirichlet."""
    allow_empty: bool = False
    """Whether clients may be left without an example."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each client's examples that is kept for its own test."""


class EarlyStoppingSection(Section):
    """When a run ends before its last round: the score on public examples has stopped getting better.

    The examples are a file (a table, or an .npz with x and y) or a data set by name; naming them declares them public.
    """

    public: str | None = None
    """Path of a public file: a table, or an .npz with x and y."""
    dataset: str | None = None
    """A public data set by name, in place of a file."""
    data_options: dict[str, Any] = Field(default_factory=dict)
    """Options of that data set."""
    metric: StopMetric = "loss"
    """The score that is watched."""
    patience: Annotated[int, Field(ge=1)] = 5
    """Evaluations without a better score before the run ends."""
    min_delta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """By how much a score must be better to count."""

    @model_validator(mode="after")
    def _one_source(self) -> EarlyStoppingSection:
        if (self.public is None) == (self.dataset is None):
            remedy = "Give the path of a public file, or dataset for one by name."
            raise InputError("run.early_stopping.public", self.public, "name one public set", remedy)
        if self.data_options and self.dataset is None:
            raise InputError(
                "run.early_stopping.data_options", self.data_options, "is for dataset", "Leave it out."
            )
        return self


class RunSection(Section):
    """How the rounds run: how many, with whom, and where."""

    rounds: Annotated[int, Field(ge=1, le=MOST_ROUNDS)] = 20
    """Rounds of training."""
    cohort: Annotated[int, Field(ge=1)] | None = None
    """Clients in a round, of sampler = poisson on average; all if not given."""
    sampler: Sampler = "fixed"
    """How a cohort is drawn: always of this size, each client by its own coin, or everybody."""
    noise: NoiseSource | None = None
    """Where privacy noise and cohorts come from: the seed, which repeats, or the system's entropy, the default for
    data of your own."""
    seeds: Annotated[list[Annotated[int, Field(ge=0, le=LARGEST_SEED)]], Field(min_length=1)] = Field(
        default_factory=lambda: [0]
    )
    """One run for each."""
    engine: Literal["simulation", "ray", "flower-simulation", "flower"] = "simulation"
    """Where the clients are: in this process, on a Ray cluster, on Flower's simulated nodes, or on the nodes of a
    federation."""
    address: str | None = None
    """The Ray cluster, of engine = ray."""
    device: str = "cpu"
    """cpu or cuda."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes; 0 for as many as pay."""
    execution: Execution = "auto"
    """Whether the clients of a cohort are computed as one batch or one by one."""
    max_memory: int | None = None
    """Memory for the clients of a chunk: bytes, or text such as "2GiB"."""
    evaluate_every: Annotated[int, Field(ge=1)] = 1
    """Rounds between two evaluations."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 10
    """Rounds between two checkpoints, from which an interrupted run resumes."""
    transcript: bool | list[Annotated[int, Field(ge=1)]] = False
    """Whether to record what was on the wire, for attacks; a list records these rounds only."""
    transcript_exchanges: Annotated[int, Field(ge=1)] | None = None
    """Of each recorded round, the first so many exchanges; all if not given."""
    min_clients: Annotated[int, Field(ge=0)] = 0
    """Answers that a round needs; with fewer it counts as answered by nobody."""
    deadline: Annotated[float, Field(gt=0)] | None = None
    """Seconds that an exchange with nodes may take."""
    max_message: int | None = None
    """The largest upload of a node: bytes, or text such as "64MiB"."""
    federation: str | None = None
    """The server's folder, of engine = flower."""
    early_stopping: EarlyStoppingSection | None = None
    """Ends the run when the score on public examples stops getting better."""

    @field_validator("max_memory", "max_message", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        """Bytes as a number, or as text with a unit: "2GiB"."""
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
            if match is None or match[2] not in _UNITS:
                raise ValueError('give bytes, or a number with a unit such as "2GiB"')
            value = int(float(match[1]) * _UNITS[match[2]])
        if isinstance(value, int) and value <= 0:
            raise ValueError("give a positive number of bytes")
        return value

    @property
    def cluster(self) -> str | None:
        """The Ray cluster to compute on, for `engine = "ray"`."""
        return (self.address or "auto") if self.engine == "ray" else None

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) != len(seeds):
            raise ValueError("name each seed once")
        return seeds


class PrivacySection(Section):
    """What privacy is asked for, and how it is counted."""

    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The delta of every epsilon."""
    budget: Annotated[float, Field(gt=0)] | None = None
    """Training stops before the round that would exceed this epsilon."""
    budget_adversary: Adversary = "observer"
    """Against whom the budget is kept."""
    budget_unit: Unit | None = None
    """Whose epsilon the budget limits: a record's or a whole client's; what the method protects if not given."""
    ledger: str | None = None
    """A file that several runs on the same data share, and with it their budget."""
    target_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The epsilon to reach: chooses `method.noise_multiplier`, whatever the file says of it."""
    target_adversary: Adversary = "server"
    """Against whom the target is meant."""
    target_unit: Unit | None = None
    """Whose epsilon the target is: a record's or a whole client's; what the method protects if not given."""


SECTIONS: dict[str, type[BaseModel]] = {
    "task": TaskSection,
    "task.text": TextSection,
    "partition": PartitionSection,
    "run": RunSection,
    "privacy": PrivacySection,
    "aggregation": AggregationSection,
    "paper": PaperSection,
}
"""The sections whose keys are the same for every method, by name."""
