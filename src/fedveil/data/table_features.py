"""Conversion of table cells to model features, as a torch module so that it can be exported with the model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedveil.data.schema import Column, TableSchema

_INDICATOR = -2.0


class TableFeatures(nn.Module):
    """Cells `[n, columns]` as features `[n, features]` in float32.

    A cell of a numeric column is its number, of a categorical column the index of its category; NaN if missing.
    """

    def __init__(self, schema: TableSchema) -> None:
        super().__init__()
        rows = [
            (place, column.mean, column.std, category, math.nan if column.fill is None else column.fill)
            for place, column in enumerate(schema.columns)
            for category in _features(column)
        ]
        source, mean, std, category, fill = zip(*rows, strict=True)
        self.register_buffer("source", torch.tensor(source))
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float64))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float64))
        self.register_buffer("category", torch.tensor(category, dtype=torch.float64))
        self.register_buffer("fill", torch.tensor(fill, dtype=torch.float64))
        self.limit = schema.limit
        self.unit_norm = schema.unit_norm

    source: Tensor
    mean: Tensor
    std: Tensor
    category: Tensor
    fill: Tensor

    def forward(self, cells: Tensor) -> Tensor:
        values = cells.to(torch.float64).index_select(1, self.source)
        missing = torch.isnan(values)
        values = torch.where(missing, self.fill, values)
        scaled = (values - self.mean) / self.std
        if self.limit is not None:
            scaled = scaled.clamp(-self.limit, self.limit)
        same = ((values == self.category).to(torch.float64) - self.mean) / self.std
        features = torch.where(torch.isnan(self.category), scaled, same)
        features = torch.where(self.category == _INDICATOR, missing.to(torch.float64), features)
        if self.unit_norm:
            features = features / features.norm(dim=1, keepdim=True).clamp(min=1e-12)
        return features.to(torch.float32)


def _features(column: Column) -> list[float]:
    """The category of each feature of a column; NaN for its number."""
    if column.categories is not None:
        return [float(index) for index in range(len(column.categories))]
    return [math.nan, _INDICATOR] if column.indicator else [math.nan]
