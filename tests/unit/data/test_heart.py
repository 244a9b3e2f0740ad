from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedveil.data.dataset import Dataset
from fedveil.data.files import find
from fedveil.data.heart import HOSPITALS
from fedveil.data.registry import load_dataset
from fedveil.data.schema import schema_from_json
from fedveil.errors import DataError, InputError
from fedveil.experiment.config import make_config
from fedveil.experiment.prepare import client_names, prepare
from tests.refusals import refuses

needs_data = pytest.mark.skipif(
    any(find([f"heart-disease/processed.{name}.data"]) is None for name in HOSPITALS),
    reason="the UCI heart disease files are not in FEDVEIL_DATA",
)
# The README of FLamby's data set.
TRAIN = {"cleveland": 199, "hungarian": 172, "switzerland": 30, "va": 85}
TEST = {"cleveland": 104, "hungarian": 89, "switzerland": 16, "va": 45}


@needs_data
def test_hospitals_have_as_many_patients_as_in_flamby() -> None:
    dataset = load_dataset("heart-disease")
    assert isinstance(dataset, Dataset)
    assert dataset.input_shape == (13,)
    for examples, expected in ((dataset.train, TRAIN), (dataset.test, TEST)):
        assert examples.users is not None
        found = dict(zip(dataset.user_names, examples.users.bincount().tolist(), strict=True))
        assert found == expected
        assert set(examples.y.tolist()) == {0, 1}


@needs_data
@pytest.mark.parametrize("scaling", ["public", "centred"])
def test_without_scaling_values_are_those_of_the_files(scaling: str) -> None:
    raw, scaled = (load_dataset("heart-disease", scaling=kind) for kind in ("none", scaling))
    assert isinstance(raw, Dataset)
    assert isinstance(scaled, Dataset)
    assert 28 <= float(raw.train.x[:, 0].min()) < float(raw.train.x[:, 0].max()) <= 77
    back = scaled.train.x.double() * torch.tensor(scaled.std) + torch.tensor(scaled.mean)
    assert torch.allclose(back, raw.train.x.double(), atol=1e-4)
    assert set(raw.train.x[:, 2:5].sum(1).tolist()) == {0.0, 1.0}  # chest pain, the first kind has no feature


@needs_data
def test_centred_categories_are_scaled_as_if_equally_frequent() -> None:
    found = load_dataset("heart-disease", scaling="centred")
    assert isinstance(found, Dataset)
    assert found.schema is not None
    assert found.train.x[:, 1].unique().tolist() == [-1.0, 1.0]  # sex
    mean, std = 1 / 4, 3**0.5 / 4  # one of four kinds of chest pain
    expected = [(value - mean) / std for value in (0, 1)]
    assert found.train.x[:, 2].unique().tolist() == pytest.approx(expected)
    again = schema_from_json(found.schema.to_json(), Path("schema.toml"))
    assert again.columns == found.schema.columns


@needs_data
def test_each_hospital_is_a_client_by_its_name() -> None:
    config = make_config(
        {"task": {"dataset": "heart-disease", "model": "logistic"}, "partition": {"kind": "user"}}
    )
    prepared = prepare(config, 0)
    assert client_names(config, prepared.dataset) == list(HOSPITALS)
    assert list(prepared.clients.sizes) == list(TRAIN.values())


@needs_data
def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        load_dataset("heart-disease", scaling="best")
    assert caught.value.field == "scaling"


def test_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with refuses("missing", DataError, value="heart-disease"):
        load_dataset("heart-disease")
