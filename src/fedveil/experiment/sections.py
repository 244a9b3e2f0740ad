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
from fedveil.session.options import EarlyStopping, StopMetric
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
    """The published value that this run reproduces."""

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
    """The metric of the value; "personal" is the mean accuracy of personal models on the common test examples."""
    tolerance: float | None = None
    """The tolerance of a reproduction."""
    scale: str = "full"
    """The scale: "full", or what was reduced."""


NO_DATASET = "none"


class TextSection(Section):
    """How texts are converted to token ids."""

    vocabulary: Literal["auto", "hash", "bytes", "public", "tokenizer"] = "auto"
    """How words are converted to ids: hashed, as bytes, by the words of a public text, or by the tokenizer of a
    folder; auto uses the model's own tokenizer, or hashes words if it has none."""
    size: Annotated[int, Field(ge=4)] = 8192
    """Number of ids of a hashed or public vocabulary."""
    path: str | None = None
    """The public text, or the folder of the tokenizer."""
    length: Annotated[int, Field(ge=1)] = 64
    """Number of tokens of a text; shorter ones are padded."""
    too_long: Literal["truncate", "refuse"] = "truncate"
    """How longer texts are treated."""
    empty: Literal["refuse", "drop"] = "refuse"
    """How texts without a token are treated."""
    pack: bool = True
    """Whether a text without labels is cut into pieces of full length."""


class TaskSection(Section):
    """The learning task: data, model and loss."""

    dataset: str = "digits"
    """Name of the data set: see `fedveil list datasets`; none for a federation whose server holds no data."""
    model: str = "mlp-2"
    """Name of the model: see `fedveil list models`."""
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
    """How texts are converted to token ids, for models of texts."""
    loss: LossName | None = None
    """The loss for numbers or survival times; by default that of the table's target."""
    class_weights: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = None
    """A public weight of each class in the loss."""


class PartitionSection(Section):
    """The partition of the examples among clients."""

    kind: Literal["iid", "dirichlet", "classes", "shards", "user"] = "iid"
    """How examples are split among clients: at random, by Dirichlet proportions, by classes, by shards of sorted
    labels, or by the users in the data."""
    clients: Annotated[int, Field(ge=1, le=MOST_CLIENTS)] | None = None
    """Number of clients; default 10, for kind = user the number of users."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Concentration of the Dirichlet proportions, default 1; smaller is more unequal."""
    classes_per_client: Annotated[int, Field(ge=1)] | None = None
    """Number of classes of each client, for kind = classes."""
    shards_per_client: Annotated[int, Field(ge=1)] | None = None
    """Number of shards of each client, for kind = shards."""
    groups: list[list[int]] | None = None
    """The classes of each client, one list per client, for kind = classes."""
    min_size: Annotated[int, Field(ge=0)] | None = None
    """The smallest number of examples of a client, for kind = dirichlet."""
    allow_empty: bool = False
    """Whether clients without examples are allowed."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each client's examples that is held out for its own test."""


class EarlyStoppingSection(Section):
    """The rule that ends a run when the score on public examples no longer improves.

    The examples are a file (a table, or an .npz with x and y) or a data set by name; giving them declares them public.
    """

    public: str | None = None
    """Path of a public file: a table, or an .npz with x and y."""
    dataset: str | None = None
    """Name of a public data set, in place of a file."""
    data_options: dict[str, Any] = Field(default_factory=dict)
    """Options of that data set."""
    metric: StopMetric = "loss"
    """The score that must improve."""
    patience: Annotated[int, Field(ge=1)] = 5
    """Number of evaluations without improvement after which the run ends."""
    min_delta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """The smallest improvement that counts."""

    @model_validator(mode="after")
    def _one_source(self) -> EarlyStoppingSection:
        if (self.public is None) == (self.dataset is None):
            remedy = "Give either the path of a public file, or dataset."
            raise InputError("run.early_stopping.public", self.public, "needs exactly one public set", remedy)
        if self.data_options and self.dataset is None:
            raise InputError(
                "run.early_stopping.data_options",
                self.data_options,
                "applies to dataset only",
                "Leave it out.",
            )
        return self


class RunSection(Section):
    """How rounds are run: number, cohorts and engine."""

    rounds: Annotated[int, Field(ge=1, le=MOST_ROUNDS)] = 20
    """Rounds of training."""
    cohort: Annotated[int, Field(ge=1)] | None = None
    """Number of clients in a round, for sampler = poisson its expectation; default: all."""
    sampler: Sampler = "fixed"
    """How a cohort is drawn: with a fixed size, each client independently, or all clients."""
    noise: NoiseSource | None = None
    """The source of privacy noise and cohorts: the seed, which is reproducible, or the system's entropy, the default
    for the user's own data."""
    seeds: Annotated[list[Annotated[int, Field(ge=0, le=LARGEST_SEED)]], Field(min_length=1)] = Field(
        default_factory=lambda: [0]
    )
    """The seeds; one run for each."""
    engine: Literal["simulation", "ray", "flower-simulation", "flower"] = "simulation"
    """Where clients are computed: in this process, on a Ray cluster, on Flower's simulated nodes, or on the nodes of a
    federation."""
    address: str | None = None
    """Address of the Ray cluster, for engine = ray."""
    device: str = "cpu"
    """The device: cpu or cuda."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Number of processes; 0 chooses automatically."""
    execution: Execution = "auto"
    """Whether the clients of a cohort are computed as one batch or one by one."""
    max_memory: int | None = None
    """Memory limit for clients computed together: bytes, or text such as "2GiB"."""
    evaluate_every: Annotated[int, Field(ge=1)] = 1
    """Rounds between two evaluations."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 10
    """Rounds between two checkpoints, from which an interrupted run resumes."""
    transcript: bool | list[Annotated[int, Field(ge=1)]] = False
    """Whether to record the messages, for attacks; a list records these rounds only."""
    transcript_exchanges: Annotated[int, Field(ge=1)] | None = None
    """Record only the first so many exchanges of a round; default: all."""
    min_clients: Annotated[int, Field(ge=0)] = 0
    """The smallest number of answers of a round; with fewer it counts as answered by nobody."""
    deadline: Annotated[float, Field(gt=0)] | None = None
    """Deadline of an exchange with nodes, in seconds."""
    max_message: int | None = None
    """Largest upload of a node: bytes, or text such as "64MiB"."""
    federation: str | None = None
    """The server's folder, for engine = flower."""
    early_stopping: EarlyStoppingSection | None = None
    """Ends the run when the score on public examples no longer improves."""

    @field_validator("max_memory", "max_message", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        """Bytes as a number, or as text with a unit: "2GiB"."""
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
            if match is None or match[2] not in _UNITS:
                raise ValueError('give a number of bytes, or text such as "2GiB"')
            value = int(float(match[1]) * _UNITS[match[2]])
        if isinstance(value, int) and value <= 0:
            raise ValueError("give a positive number of bytes")
        return value

    @property
    def cluster(self) -> str | None:
        """The Ray cluster to compute on, for `engine = "ray"`."""
        return (self.address or "auto") if self.engine == "ray" else None

    @property
    def stopping(self) -> EarlyStopping | None:
        """The rule of early stopping."""
        section = self.early_stopping
        return None if section is None else EarlyStopping(section.metric, section.patience, section.min_delta)

    @property
    def ends(self) -> int:
        """The number of rounds after which a run may end."""
        return 1 if self.stopping is None else self.stopping.ends(self.rounds)

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) != len(seeds):
            raise ValueError("give each seed once")
        return seeds


class PrivacySection(Section):
    """The requested privacy and its accounting."""

    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The delta of every epsilon."""
    budget: Annotated[float, Field(gt=0)] | None = None
    """Training stops before the round that would exceed this epsilon."""
    budget_adversary: Adversary = "observer"
    """The adversary of the budget."""
    budget_unit: Unit | None = None
    """The unit of the budget: a record or a whole client; default: the unit that the method protects."""
    ledger: str | None = None
    """A ledger file that several runs on the same data share, and with it their budget."""
    target_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The epsilon to reach; determines `method.noise_multiplier`, overriding the file."""
    target_adversary: Adversary = "server"
    """The adversary of the target."""
    target_unit: Unit | None = None
    """The unit of the target: a record or a whole client; default: the unit that the method protects."""


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
