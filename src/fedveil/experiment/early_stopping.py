"""The public examples of early stopping: loaded, and refused if they share records with the run's own data.

Records of few categories coincide by chance. By Good and Turing, a new record from the population of n records equals
one of them with a probability of about 1 - n_1 / n, where n_1 of them occur once (Good: The Population Frequencies of
Species and the Estimation of Population Parameters. Biometrika 1953). Two standard deviations are added, from the
numbers n_2 and n_3 of records that occur two and three times. A public set with more coincidences than such records
would have in all but one of `_RARE` cases is refused, and so is a copy of all training or test records. Where no record
of the data occurs twice, one shared record is too many.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedveil.data.dataset import Dataset, Examples
from fedveil.data.files import given_file
from fedveil.data.own import examples_from_arrays, read_npz
from fedveil.data.raw_table import read_table
from fedveil.data.schema import TableSchema
from fedveil.data.table import table_examples
from fedveil.errors import InputError
from fedveil.experiment.config import Config
from fedveil.experiment.prepare import load_examples

_FIELD = "run.early_stopping.public"
_RARE = 1000


def public_examples(
    config: Config, schema: TableSchema | None, private: Dataset | None, data_dir: Path | None
) -> Examples | None:
    """The examples named by `[run.early_stopping]`, as model inputs; None if the run has no such section.

    Args:
        config: The run's configuration.
        schema: The schema of the run's table, with which the public table is read.
        private: The clients' training data, if this process has it.
        data_dir: The folder of data sets.

    Raises:
        InputError: The examples are the clients' own, so that private records would decide when training stops.
    """
    section = config.run.early_stopping
    if section is None:
        return None
    if section.dataset is not None:
        options = {"dataset": section.dataset, "data_options": section.data_options}
        found = load_examples(
            config.model_copy(update={"task": config.task.model_copy(update=options)}), data_dir
        ).train
    else:
        found = _file(given_file(_FIELD, section.public, data_dir), config, schema)
    _require_public(config, found, private, data_dir)
    return found


def _file(path: Path, config: Config, schema: TableSchema | None) -> Examples:
    if path.suffix.lower() == ".npz":
        if config.task.features is not None:
            remedy = "Give a data set with run.early_stopping.dataset."
            raise InputError(_FIELD, str(path), "arrays have no features of images", remedy)
        return examples_from_arrays(*read_npz(path), field=str(path))
    if schema is None:
        raise InputError(
            _FIELD, str(path), "cannot be read without the schema of a table", "Use an .npz file."
        )
    return table_examples(replace(schema, user=None, person=None), read_table(path))


def _require_public(config: Config, found: Examples, private: Dataset | None, data_dir: Path | None) -> None:
    section = config.run.early_stopping
    assert section is not None
    named = section.public if section.dataset is None else section.data_options.get("path")
    own = [config.task.data_options.get(key) for key in ("path", "test_path")]
    places = [given_file(_FIELD, p, data_dir).resolve() for p in (named, *own) if p and Path(p).is_file()]
    same = named is not None and len(places) > len(set(places))
    same_set = (section.dataset, section.data_options) == (config.task.dataset, config.task.data_options)
    shared = "these are the clients' own records" if same or same_set else None
    if shared is None and private is not None:
        shared = shared_records(found, private)
    if shared is not None:
        raise InputError(
            _FIELD if section.dataset is None else "run.early_stopping.dataset",
            named or section.dataset,
            f"{shared}: the time of stopping would disclose information about them that no epsilon covers",
            "Remove these records from the public set or from the clients' data, or leave early stopping out.",
        )


def shared_records(found: Examples, private: Dataset) -> str | None:
    """How many of these examples are among the training or test examples, by their inputs; None if few enough."""
    if found.x.shape[1:] != private.train.x.shape[1:]:
        return None
    public, train, test = (Counter(_records(some)) for some in (found, private.train, private.test))
    own = train + test
    shared = sum(count for record, count in public.items() if record in own)
    if public in (train, test):
        return f"all {shared} records are the run's own"
    by_chance = _chance(Counter(own.values()), own.total())
    from scipy.special import bdtrc  # loaded when needed

    if not shared or bdtrc(shared - 1, public.total(), by_chance) >= 1 / _RARE:
        return None
    expected = f"{by_chance * public.total():.0f}"
    return f"{shared} of {public.total()} records are also the run's own, where about {expected} would be by chance"


def _chance(occurring: Mapping[int, int], total: int) -> float:
    """An upper estimate of the probability that a new record is among `total`, of which so many occur k times."""
    repeated, spread = total - occurring[1], math.sqrt(4 * occurring[2] + 9 * occurring[3])
    return min(1.0, (repeated + 2 * spread) / max(1, total))


def _records(examples: Examples) -> list[bytes]:
    return [hashlib.blake2b((row + 0).tobytes(), digest_size=16).digest() for row in examples.x.cpu().numpy()]
