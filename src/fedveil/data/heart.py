"""The UCI heart disease data of four hospitals, prepared and split as in FLamby (Fed-Heart-Disease).

Reference: du Terrail et al., FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare
Settings, NeurIPS 2022. The columns slope, ca and thal, which three hospitals hardly have, are left out, and so are
rows with a missing value: 740 patients remain. Chest pain and ECG are categories whose first one has no feature, which
gives 13 features. Each hospital keeps 66 % of its patients for training, stratified, by scikit-learn's split with
seed 43.

Deviations: numbers are standardised with public constants by default; `scaling = "centred"` also standardises
categories, as if all of a column were equally frequent; `scaling = "none"` gives FLamby's raw values.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow as pa

from fedveil.data.columns import complete_rows
from fedveil.data.dataset import Dataset
from fedveil.data.files import find_together, not_found, text_lines
from fedveil.data.notes import person_note, statistics_note
from fedveil.data.raw_table import RawTable, joined
from fedveil.data.schema import Column, TableSchema
from fedveil.data.table import table_examples
from fedveil.errors import DataError, InputError
from fedveil.lazy_torch import torch

Scaling = Literal["public", "centred", "none"]
HOSPITALS = {
    "cleveland": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    "hungarian": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    "switzerland": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    "va": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
}
_NAMES = (
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal",
    "disease",
)  # fmt: skip
_CATEGORIES = {"cp": ("1", "2", "3", "4"), "restecg": ("0", "1", "2")}
# Round numbers for adults with suspected heart disease, not computed from these patients.
_CENTRE = {
    "age": (55.0, 10.0),
    "trestbps": (130.0, 20.0),
    "chol": (220.0, 50.0),
    "thalach": (140.0, 25.0),
    "oldpeak": (1.0, 1.0),
}
_FEATURES = _NAMES[:10]
_TRAIN_FRACTION = 0.66
_SPLIT_SEED = 43


def load_heart_disease(
    *,
    data_dir: Path | None = None,
    scaling: Scaling = "public",
    limit: float | None = None,
    unit_norm: bool = False,
) -> Dataset:
    """740 patients of four hospitals, 13 features, disease or none; users are the hospitals.

    Args:
        scaling: "public": numbers standardised with fixed constants; "centred": categories and binary columns as well,
            as if equally frequent; "none": not scaled, as in FLamby.
        limit: The bound to which standardised numbers are clipped; None: not clipped.
        unit_norm: Scale the features of every patient to length 1.
    """
    if scaling not in get_args(Scaling):
        raise InputError(
            "scaling", scaling, "is not one of the choices", 'Use "public", "centred" or "none".'
        )
    files = [[f"heart-disease/processed.{name}.data"] for name in HOSPITALS]
    found = find_together(files, data_dir)
    if found is None:
        raise not_found(
            [names[0] for names in files],
            data_dir,
            what="heart-disease",
            how_to_get="Get the four processed files of the UCI heart disease data.",
        )
    tables = [
        complete_rows(_read(path, name), _FEATURES)
        for path, name in zip(found, HOSPITALS, strict=True)
        if path is not None
    ]
    schema = replace(_schema(scaling), limit=limit, unit_norm=unit_norm)
    splits = [_split(table) for table in tables]
    train, test = (
        joined(
            [table.take(split[k]) for table, split in zip(tables, splits, strict=True)], tables[0].path.parent
        )
        for k in (0, 1)
    )
    users: dict[str, int] = {}
    examples, test_examples = table_examples(schema, train, users), table_examples(schema, test, users)
    made = Dataset(
        "heart-disease",
        examples,
        test_examples,
        schema.classes,
        schema.mean,
        schema.std,
        f"{len(examples)} + {len(test_examples)} patients of four hospitals, FLamby's split",
        user_names=tuple(users),
        schema=schema,
    )
    return replace(made, notes=(statistics_note(True, "rows"), person_note(None, None)))


def _schema(scaling: Scaling) -> TableSchema:
    columns = []
    for name in _FEATURES:
        if name in _CATEGORIES:
            first, *others = _CATEGORIES[name]
            mean, std = _equal(1 + len(others)) if scaling == "centred" else (0.0, 1.0)
            columns.append(Column(name, tuple(others), mean, std, reference=first))
        else:
            unknown = _equal(2) if scaling == "centred" else (0.0, 1.0)
            mean, std = (0.0, 1.0) if scaling == "none" else _CENTRE.get(name, unknown)
            columns.append(Column(name, None, mean, std))
    return TableSchema("disease", ("no", "yes"), tuple(columns), "hospital")


def _equal(count: int) -> tuple[float, float]:
    """The mean and the standard deviation of an indicator of one of so many equally frequent categories."""
    return 1 / count, math.sqrt(count - 1) / count


def _read(path: Path, hospital: str) -> RawTable:
    lines = text_lines(path, sha256=HOSPITALS[hospital])
    rows = [line.split(",") for line in lines if line]
    if any(len(row) != len(_NAMES) for row in rows):
        raise DataError(
            f"{path}: a line has not {len(_NAMES)} cells. Get the file again.", field="rows", value=str(path)
        )
    columns = {name: [row[k] for row in rows] for k, name in enumerate(_NAMES)}
    for name in _CATEGORIES:  # one hospital writes 1.0 where the others write 1
        columns[name] = [cell.removesuffix(".0") for cell in columns[name]]
    columns["disease"] = ["no" if float(cell) == 0 else "yes" for cell in columns["disease"]]
    columns["hospital"] = [hospital] * len(rows)
    return RawTable(path, {name: pa.array(cells, pa.string()) for name, cells in columns.items()})


def _split(table: RawTable) -> tuple[torch.Tensor, torch.Tensor]:
    """FLamby's split of one hospital: stratified where each class has more than two patients."""
    from sklearn.model_selection import train_test_split  # slow to import

    sick = np.array([cell == "yes" for cell in table.texts("disease", "label")])
    counts = np.bincount(sick.astype(int), minlength=2)
    kept, held = train_test_split(
        np.arange(len(table)),
        test_size=1.0 - _TRAIN_FRACTION,
        train_size=_TRAIN_FRACTION,
        random_state=_SPLIT_SEED,
        shuffle=True,
        stratify=sick if counts.min() > 2 else None,
    )
    return torch.from_numpy(np.sort(kept)), torch.from_numpy(np.sort(held))
