"""What a run is told through Flower's run configuration: the whole experiment as one text."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.data.files import given_file
from fedveil.data.persons import check_persons
from fedveil.data.schema import TableSchema, read_schema
from fedveil.data.vocabulary import Vocabulary
from fedveil.errors import LARGEST_SEED, InputError, whole_number
from fedveil.experiment.config import Config, make_config
from fedveil.experiment.prepare import result_folder, vocabulary_of
from fedveil.models.registry import model_entry
from fedveil.plugins import load_plugins
from fedveil.streams import NoiseSource

PROBLEM = ".flower-problem"  # in a run's folder: why its last attempt failed
RUN = ".flower-run"  # in a run's folder: Flower's number of its last attempt
LOG = "federation.log"  # in a run's folder: which nodes came, failed and were refused
_KEYS = ("config", "seed", "experiment", "results", "data", "noise")


@dataclass(frozen=True)
class RunSettings:
    """An experiment's seed. Where results and data are is the server's business; a deployed node ignores both."""

    config: Config
    seed: int
    experiment: str
    results: Path
    data: Path | None = None
    noise: NoiseSource | None = None
    """Where the noise of the server and of simulated clients comes from, if a test says so; nodes never ask."""

    @property
    def folder(self) -> Path:
        return result_folder(self.config, self.seed, self.experiment, self.results)

    def to_run_config(self) -> dict[str, str | int]:
        """As flat keys with values of TOML, which is all that Flower hands on."""
        values: tuple[str | int, ...] = (
            self.config.to_toml(),
            self.seed,
            self.experiment,
            str(self.results),
            "" if self.data is None else str(self.data),
            self.noise or "",
        )
        return {f"fedveil-{key}": value for key, value in zip(_KEYS, values, strict=True)}

    @classmethod
    def from_run_config(cls, values: Mapping[str, Any]) -> RunSettings:
        load_plugins(
            ()
        )  # a process that Flower starts knows what its own machine's user named, and nothing else
        try:
            text, seed, experiment, results, data, noise = (values[f"fedveil-{key}"] for key in _KEYS)
            config = parse_config(str(text))
            whole_number("seed", seed, 0, LARGEST_SEED)
        except (KeyError, ValueError, RecursionError) as error:
            raise InputError(
                "run configuration", sorted(values), "is not one of fedveil", "Submit the run with fedveil."
            ) from error
        return cls(
            config,
            int(seed),
            str(experiment),
            Path(str(results)),
            Path(str(data)) if data else None,
            "seeded" if noise == "seeded" else "entropy" if noise == "entropy" else None,
        )


def vocabulary_on_nodes(config: Config) -> Vocabulary | None:
    """What deployed nodes read their texts with; None for a model of images and tables.

    A node opens no file that the server names, so it has only vocabularies and models that need none.
    """
    entry = model_entry(config.task.model)
    if entry.reads == "texts without labels":
        raise InputError(
            "task.model",
            config.task.model,
            "is a language model, and nodes hold texts with labels",
            'Use engine = "flower-simulation", or another model.',
        )
    for option in entry.options:
        if option == "path" or (option.endswith("_path") and option in config.task.model_options):
            raise InputError(
                "task.model",
                config.task.model,
                f"reads files ({option}), and nodes open none that a server names",
                'Use engine = "flower-simulation", or another model.',
            )
    text = config.task.text
    if entry.reads == "texts" and text is not None and text.vocabulary in ("public", "tokenizer"):
        raise InputError(
            "task.text.vocabulary",
            text.vocabulary,
            "reads a file, and nodes open none that a server names",
            'Use "hash" or "bytes".',
        )
    if entry.reads == "texts" and text is not None and text.too_long == "refuse":
        raise InputError(
            "task.text.too_long",
            text.too_long,
            "a node that refuses tells the server how long its texts are",
            'Use "truncate".',
        )
    return vocabulary_of(config)


def agreed_schema(config: Config, data_dir: Path | None) -> TableSchema | None:
    """The schema that the nodes agreed on, where `task.data_options` names its file."""
    path = config.task.data_options.get("schema")
    return None if path is None else read_schema(given_file("task.data_options.schema", path, data_dir))


def persons_of(config: Config) -> tuple[str | None, int | None]:
    """The column of people and how many rows of each a node may train on, as the run declares them."""
    person, rows = (config.task.data_options.get(key) for key in ("person", "rows_per_person"))
    return person, check_persons(person, rows)


@functools.lru_cache(maxsize=4)
def parse_config(text: str) -> Config:
    return make_config(tomllib.loads(text))
