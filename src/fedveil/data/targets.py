"""Labels of regression and survival tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedveil.data.raw_table import RawTable, numbers, require_present
from fedveil.data.schema import Decimal, TableSchema
from fedveil.errors import DataError
from fedveil.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def target_numbers(label: str, table: RawTable, decimal: Decimal) -> npt.NDArray[np.float64]:
    """The numbers of the label column; refuses missing cells and cells that are not numbers."""
    table.column(label, "label")
    require_present(table, [label], "Fill them in or drop these rows.")
    return numbers(table, label, decimal)


def survival_labels(schema: TableSchema, table: RawTable) -> Tensor:
    """Labels of a hazard model if the schema has intervals, else of Cox's loss."""
    assert schema.event is not None
    times = target_numbers(schema.label, table, schema.decimal)
    if (wrong := np.flatnonzero(times < 0)).size:
        raise DataError(
            f"{table.path}: {table.place(int(wrong[0]))}, column {schema.label!r} is a negative time "
            f"({wrong.size} rows). Fix or drop these rows.",
            field=schema.label,
            value=int(wrong[0]),
        )
    events = target_numbers(schema.event, table, schema.decimal)
    if (wrong := np.flatnonzero((events != 0) & (events != 1))).size:
        raise DataError(
            f"{table.path}: {table.place(int(wrong[0]))}, column {schema.event!r} is neither 1 (event) nor 0 "
            f"(censored) ({wrong.size} rows). Fix them.",
            field=schema.event,
            value=int(wrong[0]),
        )
    if not schema.intervals:
        signed = np.where(events == 1, 1.0, -1.0) * np.maximum(times, 1e-6)
        return torch.from_numpy(signed.astype(np.float32))
    index = np.searchsorted(np.array(schema.intervals), times, side="left")
    seen = (events == 1) & (index < len(schema.intervals))  # beyond the last interval nothing is observed
    return torch.from_numpy((2 * index + seen).astype(np.int64))
