"""Private statistics of a table: the scales of its bounded columns, released once, charged before they are computed.

They are kept in the run's folder, so a resumed run neither computes nor charges them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.atomic_files import write_atomically
from fedveil.data.dataset import Dataset
from fedveil.data.notes import check_statistics
from fedveil.data.schema import TableSchema
from fedveil.errors import InputError, ResultError, within
from fedveil.methods.method import AnyMethod
from fedveil.privacy.bounded_moments import BoundedMoments
from fedveil.privacy.releases import Plan, Release
from fedveil.session.options import PrivacySettings
from fedveil.session.privacy_guard import PrivacyGuard
from fedveil.session.results import ResultFolder
from fedveil.session.statement_file import STATISTICS
from fedveil.streams import ClientStreams, NoiseSource

if TYPE_CHECKING:
    from torch import Tensor


def statistics_release(options: Mapping[str, Any], dataset: str, engine: str) -> Release | None:
    """The release of `task.data_options` before the first round; None if its statistics are not private.

    Its epsilon depends only on the noise: the number of columns is in the sensitivity.
    """
    if options.get("statistics") != "private":
        return None
    if engine not in ("simulation", "ray") or dataset != "table":
        remedy = 'Use constants in the schema, or dataset = "table" and the simulator.'
        problem = f'is for dataset = "table" in the simulator, not for "{dataset}" with engine = "{engine}"'
        raise InputError("task.data_options.statistics", "private", problem, remedy)
    noise = options.get("statistics_noise")
    with within("task.data_options"):
        check_statistics("private", noise, "schema" in options)
    assert noise is not None
    return BoundedMoments(((-1.0, 1.0),), float(noise)).release()


def standardised(
    dataset: Dataset,
    parts: Sequence[Tensor],
    noise: float,
    folder: Path,
    guard_of: tuple[AnyMethod, Plan, PrivacySettings],
    seed: int,
    source: NoiseSource,
) -> Dataset:
    """The dataset scaled with the statistics in the run's folder, which are computed, charged and stored if missing.

    Args:
        dataset: A table with its original cells.
        parts: The training rows of each client.
        noise: Noise multiplier, in units of the sensitivity.
        folder: The run's folder.
        guard_of: The method, plan and settings of the run's ledger.
        seed: The run's seed.
        source: The source of noise.

    Guarantees:
        The release is charged before anything is computed; a resumed run reads the stored statistics
        (`tests/unit/experiment/test_statistics.py`).
    """
    from fedveil.data.table import rescaled  # slow to import

    assert dataset.cells is not None
    assert dataset.schema is not None
    columns = [k for k, column in enumerate(dataset.schema.columns) if column.bounds is not None]
    results, path = ResultFolder(folder), folder / STATISTICS
    method, plan, settings = guard_of
    ledger = settings.ledger or folder / "ledger.jsonl"
    if path.exists():
        if not results.finished:  # its statement is made from the ledger
            guard = PrivacyGuard(method, plan, settings, results.run(), ledger, noise=source)
            guard.require_charged(0)
        return rescaled(dataset, _read(dataset.schema, path))
    if results.finished:
        raise ResultError(
            f"{folder}: is finished, but {STATISTICS} is missing. Restore it from a copy.", field=STATISTICS
        )
    bounds = tuple(dataset.schema.columns[k].bounds or (0.0, 1.0) for k in columns)
    moments = BoundedMoments(bounds, noise, dataset.schema.missing in ("median", "category"))
    with results.held():
        guard = PrivacyGuard(method, plan, settings, results.begin(), ledger, noise=source)
        guard.charge_start()
        streams = ClientStreams(seed, 0, tuple(range(len(parts))), noise_source=source).noise("statistics")
        values = dataset.cells[0][:, columns]
        sums = [moments.noisy_sums(values[p], stream) for p, stream in zip(parts, streams, strict=True)]
        found = moments.moments(sums, sum(map(len, parts)))
        names = [dataset.schema.columns[k].name for k in columns]
        scales = {name: {"mean": mean, "std": std} for name, (mean, std) in zip(names, found, strict=True)}
        write_atomically(path, (json.dumps({"noise": noise, "columns": scales}, indent=2) + "\n").encode())
    return rescaled(dataset, _read(dataset.schema, path))


def _read(schema: TableSchema, path: Path) -> TableSchema:
    """The schema with the statistics in this file, whose means also replace missing numbers."""
    try:
        stored = json.loads(path.read_text())["columns"]
        scales = {name: (float(one["mean"]), float(one["std"])) for name, one in stored.items()}
        columns = tuple(
            column
            if column.bounds is None
            else replace(
                column,
                mean=scales[column.name][0],
                std=scales[column.name][1],
                fill=None if column.fill is None else scales[column.name][0],
            )
            for column in schema.columns
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultError(
            f"{path} is damaged: {error!r}. Restore it from a copy.", field=STATISTICS
        ) from error
    return replace(schema, columns=columns)
