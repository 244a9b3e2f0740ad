"""The settings of a run in Flower's run configuration: the whole experiment as one text."""

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

PROBLEM = ".flower-problem"  # in a run's folder: the error of its last attempt
RUN = ".flower-run"  # in a run's folder: Flower's number of its last attempt
LOG = "federation.log"  # in a run's folder: nodes that joined, dropped out and were refused
_KEYS = ("config", "seed", "experiment", "results", "data", "noise")


@dataclass(frozen=True)
class RunSettings:
    """One seed of an experiment. The paths of results and data are the server's; a deployed node ignores both."""

    config: Config
    seed: int
    experiment: str
    results: Path
    data: Path | None = None
    noise: NoiseSource | None = None
    """The source of noise of the server and of simulated clients, set in tests; deployed nodes ignore it."""

    @property
    def folder(self) -> Path:
        return result_folder(self.config, self.seed, self.experiment, self.results)

    def to_run_config(self) -> dict[str, str | int]:
        """The settings as flat keys with TOML values, the format that Flower supports."""
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
        # Plugins are named by the machine's own user in the environment, never by the settings.
        load_plugins(())
        try:
            text, seed, experiment, results, data, noise = (values[f"fedveil-{key}"] for key in _KEYS)
            config = parse_config(str(text))
            whole_number("seed", seed, 0, LARGEST_SEED)
        except (KeyError, ValueError, RecursionError) as error:
            raise InputError(
                "run configuration", sorted(values), "is not fedveil's", "Submit the run with fedveil."
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
    """The vocabulary of deployed nodes; None for models of images and tables.

    A node opens no file named by the server, so only vocabularies and models without files are supported.
    """
    entry = model_entry(config.task.model)
    if entry.reads == "texts without labels":
        raise InputError(
            "task.model",
            config.task.model,
            "is a language model, but nodes have texts with labels",
            'Use engine = "flower-simulation", or another model.',
        )
    for option in entry.options:
        if option == "path" or (option.endswith("_path") and option in config.task.model_options):
            raise InputError(
                "task.model",
                config.task.model,
                f"reads files ({option}), and nodes open no file named by a server",
                'Use engine = "flower-simulation", or another model.',
            )
    text = config.task.text
    if entry.reads == "texts" and text is not None and text.vocabulary in ("public", "tokenizer"):
        raise InputError(
            "task.text.vocabulary",
            text.vocabulary,
            "reads a file, and nodes open no file named by a server",
            'Use "hash" or "bytes".',
        )
    if entry.reads == "texts" and text is not None and text.too_long == "refuse":
        raise InputError(
            "task.text.too_long",
            text.too_long,
            "a node's refusal would disclose the length of its texts",
            'Use "truncate".',
        )
    return vocabulary_of(config)


def agreed_schema(config: Config, data_dir: Path | None) -> TableSchema | None:
    """The schema that the nodes agreed on, if `task.data_options` names its file."""
    path = config.task.data_options.get("schema")
    return None if path is None else read_schema(given_file("task.data_options.schema", path, data_dir))


def persons_of(config: Config) -> tuple[str | None, int | None]:
    """The person column and the largest number of rows per person, as declared by the run."""
    person, rows = (config.task.data_options.get(key) for key in ("person", "rows_per_person"))
    return person, check_persons(person, rows)


@functools.lru_cache(maxsize=4)
def parse_config(text: str) -> Config:
    return make_config(tomllib.loads(text))
