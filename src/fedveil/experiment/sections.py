"""The sections of a configuration: keys, types and ranges."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fedveil.engines.simulation import Execution
from fedveil.errors import LARGEST_SEED, InputError
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
    table: str = ""
    row: str = ""
    expected: float | None = None
    attack: dict[str, float] = Field(default_factory=dict)
    metric: Metric = "accuracy"
    """"personal" is the clients' own models' mean accuracy on the common test examples."""
    tolerance: float | None = None
    scale: str = "full"


NO_DATASET = "none"


class TextSection(Section):
    """How texts become token ids; "auto" takes the model's own tokenizer, or hashes words where it has none."""

    vocabulary: Literal["auto", "hash", "bytes", "public", "tokenizer"] = "auto"
    size: Annotated[int, Field(ge=4)] = 8192
    path: str | None = None
    length: Annotated[int, Field(ge=1)] = 64
    too_long: Literal["truncate", "refuse"] = "truncate"
    empty: Literal["refuse", "drop"] = "refuse"
    pack: bool = True


class TaskSection(Section):
    dataset: str = "digits"
    model: str = "mlp-2"
    input_shape: list[Annotated[int, Field(ge=1)]] | None = None
    classes: Annotated[int, Field(ge=1)] | None = None
    """The model's outputs: one for each class or interval, or one."""
    data_options: dict[str, Any] = Field(default_factory=dict)
    model_options: dict[str, Any] = Field(default_factory=dict)
    features: str | None = None
    feature_options: dict[str, Any] = Field(default_factory=dict)
    text: TextSection | None = None
    loss: LossName | None = None
    """By what numbers or survival times are learned; a federation's nodes are told it, where no table says it."""
    class_weights: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = None


class PartitionSection(Section):
    kind: Literal["iid", "dirichlet", "classes", "shards", "user"] = "iid"
    clients: Annotated[int, Field(ge=1, le=MOST_CLIENTS)] | None = None
    alpha: Annotated[float, Field(gt=0)] | None = None
    classes_per_client: Annotated[int, Field(ge=1)] | None = None
    shards_per_client: Annotated[int, Field(ge=1)] | None = None
    groups: list[list[int]] | None = None
    min_size: Annotated[int, Field(ge=0)] | None = None
    allow_empty: bool = False
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class EarlyStoppingSection(Section):
    """When a run ends before its last round: the score on public examples has stopped getting better.

    The examples are a file (a table, or an .npz with x and y) or a data set by name; naming them declares them public.
    """

    public: str | None = None
    dataset: str | None = None
    data_options: dict[str, Any] = Field(default_factory=dict)
    metric: StopMetric = "loss"
    patience: Annotated[int, Field(ge=1)] = 5
    min_delta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

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
    rounds: Annotated[int, Field(ge=1, le=MOST_ROUNDS)] = 20
    cohort: Annotated[int, Field(ge=1)] | None = None
    sampler: Sampler = "fixed"
    noise: NoiseSource | None = None
    seeds: Annotated[list[Annotated[int, Field(ge=0, le=LARGEST_SEED)]], Field(min_length=1)] = Field(
        default_factory=lambda: [0]
    )
    engine: Literal["simulation", "ray", "flower-simulation", "flower"] = "simulation"
    address: str | None = None
    device: str = "cpu"
    workers: Annotated[int, Field(ge=0)] = 0
    execution: Execution = "auto"
    max_memory: int | None = None
    evaluate_every: Annotated[int, Field(ge=1)] = 1
    checkpoint_every: Annotated[int, Field(ge=1)] = 10
    transcript: bool | list[Annotated[int, Field(ge=1)]] = False
    transcript_exchanges: Annotated[int, Field(ge=1)] | None = None
    min_clients: Annotated[int, Field(ge=0)] = 0
    deadline: Annotated[float, Field(gt=0)] | None = None
    max_message: int | None = None
    federation: str | None = None
    early_stopping: EarlyStoppingSection | None = None

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
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    budget: Annotated[float, Field(gt=0)] | None = None
    budget_adversary: Adversary = "observer"
    budget_unit: Unit | None = None
    ledger: str | None = None
    target_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    target_adversary: Adversary = "server"
    target_unit: Unit | None = None
