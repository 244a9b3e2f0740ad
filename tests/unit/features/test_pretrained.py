"""An encoder that the user has as a feature map: read from this machine, one image at a time, and said to be public."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil.errors import InputError
from fedveil.experiment.config import Config, make_config
from fedveil.experiment.prepare import facts_of, prepare, privacy_settings
from fedveil.features.feature_map import PretrainedFeatures
from fedveil.session.privacy_guard import privacy_statement

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return vit(tmp_path / "vit")


def vit(path: Path, channels: int = 3, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    small: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(
        **small, intermediate_size=16, image_size=16, patch_size=8, num_channels=channels
    )
    transformers.ViTModel(config).save_pretrained(path, safe_serialization=True)
    return path


def config(folder: Path) -> Config:
    task = {"features": "pretrained", "feature_options": {"path": str(folder)}, "model": "logistic"}
    return make_config({"task": task, "partition": {"clients": 3}, "run": {"rounds": 1}})


def test_images_become_vectors_of_unit_norm_each_on_its_own(folder: Path, tmp_path: Path) -> None:
    made = PretrainedFeatures(path=str(folder))
    records = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    whole = made.features(records, tmp_path / "a")
    assert whole.shape == (20, *made.shape((1, 8, 8))) == (20, 8)
    torch.testing.assert_close(whole.norm(dim=1), torch.ones(20), atol=1e-3, rtol=0)
    assert torch.equal(made.features(records[1:], tmp_path / "b"), whole[1:])


def test_another_encoder_under_the_same_path_has_other_features(folder: Path, tmp_path: Path) -> None:
    made, records = PretrainedFeatures(path=str(folder)), torch.rand(2, 3, 16, 16)
    first = made.features(records, tmp_path / "cache")
    vit(folder, seed=1)
    assert not torch.equal(made.features(records, tmp_path / "cache"), first)


def test_results_state_that_the_encoder_is_pretrained(folder: Path) -> None:
    prepared = prepare(config(folder), 0)
    assert prepared.dataset.input_shape == (8,)
    assert "public" in facts_of(config(folder), "e", prepared)["features"]["note"]


def test_the_privacy_statement_names_the_pretrained_encoder(folder: Path) -> None:
    prepared = prepare(config(folder), 0)
    notes = privacy_settings(config(folder), prepared.dataset).notes
    statement = replace(privacy_statement(prepared.method, prepared.plan, 1e-5), notes=notes)
    assert prepared.dataset.features is not None
    assert str(prepared.dataset.features.note) in statement.in_words()


def test_what_is_no_encoder_of_these_images_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        prepare(config(tmp_path / "nothing"), 0)
    assert refusal.value.field == "task.feature_options.path"
    with pytest.raises(InputError) as refusal:
        PretrainedFeatures(path=str(folder)).shape((2, 8, 8))
    assert refusal.value.field == "task.feature_options.path"
    with pytest.raises(InputError) as refusal:
        PretrainedFeatures(path=str(folder)).shape((64,))
    assert refusal.value.field == "task.features"
