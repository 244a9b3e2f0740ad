"""The public examples of early stopping: loaded, and refused if they share records with the run's own data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedveil.data.dataset import Dataset, Examples
from fedveil.data.files import given_file
from fedveil.data.own import examples_from_arrays, read_npz
from fedveil.data.raw_table import read_table
from fedveil.data.schema import TableSchema
from fedveil.data.shared_records import PRIVATE_STOP, REMOVE, shared_records
from fedveil.data.table import table_examples
from fedveil.errors import InputError
from fedveil.experiment.config import Config
from fedveil.experiment.prepare import load_examples

_FIELD = "run.early_stopping.public"


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
        shared = shared_records(found.x, private.train.x, private.test.x)
    if shared is not None:
        raise InputError(
            _FIELD if section.dataset is None else "run.early_stopping.dataset",
            named or section.dataset,
            f"{shared}: {PRIVATE_STOP}",
            REMOVE,
        )
