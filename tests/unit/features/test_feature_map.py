"""What a feature map may look at, what it remembers on disk, and how a task uses it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from fedveil.errors import InputError
from fedveil.experiment.config import Config, make_config
from fedveil.experiment.prepare import load_examples, model_shape, prepare
from fedveil.features import feature_map, normalise
from fedveil.features.blocks import in_blocks
from fedveil.features.feature_map import ScatteringFeatures, make_features
from fedveil.features.normalise import Maps
from fedveil.features.scattering import Scattering
from fedveil.features.synthetic_images import SyntheticImages, draw

SMALL = {"features": "scattering", "feature_options": {"depth": 1, "angles": 4}, "model": "logistic"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, and few synthetic images."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(normalise, "COUNT", 64)
    normalise.constants.cache_clear()
    return tmp_path / "fedveil" / "features"


def images(count: int = 6) -> torch.Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def config(**task: Any) -> Config:
    return make_config({"task": {**SMALL, **task}, "partition": {"clients": 3}, "run": {"rounds": 1}})


def test_a_records_features_do_not_depend_on_other_records(tmp_path: Path) -> None:
    made = ScatteringFeatures(depth=1, angles=4)
    whole = made.features(images(), tmp_path / "a")
    changed = images()
    changed[1:] = 0.25
    assert torch.equal(made.features(changed, tmp_path / "b")[0], whole[0])


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 28, 28), {}),
        ((3, 32, 32), {"pooling": 4}),
        ((3, 32, 32), {"pooling": 4, "square_root": True}),
        ((3, 32, 32), {"pooling": 4, "square_root": True, "mirror": True, "synthetic": "scenes"}),
        ((1, 28, 28), {"pooling": 4, "synthetic": "glyphs", "centring": "place"}),
        ((1, 9, 11), {"depth": 1}),
    ],
)
def test_a_removed_record_changes_no_bit_of_the_others_features(
    shape: tuple[int, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    """Neighbouring data sets differ by one record: every other record moves on by one place."""
    made = ScatteringFeatures(**options)
    records = torch.rand(41, *shape, generator=torch.Generator().manual_seed(0))
    whole = made.features(records, tmp_path / "a")
    for gone in (0, 17, 40):
        kept = [k for k in range(41) if k != gone]
        assert torch.equal(made.features(records[kept], tmp_path / "b"), whole[kept])
    assert torch.equal(made.features(records[5:6], tmp_path / "b")[0], whole[5])


def test_blocks_whose_places_do_notcompute_alike_are_not_used() -> None:
    def by_place(block: torch.Tensor) -> torch.Tensor:
        return block + torch.arange(len(block))[:, None]

    records = torch.rand(7, 3)
    assert torch.equal(in_blocks(by_place, records, 4), records)


def test_progress_is_logged_only_where_features_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fedveil")
    monkeypatch.setattr(feature_map, "LOG_SECONDS", math.inf)
    ScatteringFeatures(depth=1).features(images(), tmp_path)
    assert caplog.messages == []
    monkeypatch.setattr(feature_map, "LOG_SECONDS", 0.0)
    ScatteringFeatures(depth=1).features(images(), tmp_path / "again")
    assert caplog.messages[-1].startswith(f"features: {len(images())} of {len(images())} images")


def test_features_have_unit_norm(tmp_path: Path) -> None:
    norms = ScatteringFeatures(depth=1).features(images(), tmp_path).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(6), atol=1e-3, rtol=0)


def test_constants_are_drawn_without_data() -> None:
    first = normalise.constants(Maps(Scattering(8, 8, 1, 4)), 1, "strokes", 0.5)
    normalise.constants.cache_clear()
    torch.manual_seed(99)
    again = normalise.constants(Maps(Scattering(8, 8, 1, 4)), 1, "strokes", 0.5)
    assert torch.equal(first.mean, again.mean)
    torch.testing.assert_close(first.matrix, again.matrix)


def test_full_whitening_decorrelates_synthetic_channels() -> None:
    maps = Maps(Scattering(8, 8, 1, 4))
    whiten = normalise.constants(maps, 1, "leaves", 1.0)
    values = whiten.matrix @ (maps(draw("leaves", normalise.COUNT, 1, 8, 8)).flatten(2) - whiten.mean)
    values = values.transpose(0, 1).flatten(1)
    torch.testing.assert_close(values @ values.T / values.shape[1], torch.eye(5), atol=0.02, rtol=0)


def test_square_roots_are_taken_before_the_constants() -> None:
    scattering = Scattering(8, 8, 1, 4)
    plain, rooted = Maps(scattering), Maps(scattering, square_root=True)
    torch.testing.assert_close(rooted(images()).square(), plain(images()).clamp(min=0))
    drawn = rooted(draw("leaves", normalise.COUNT, 1, 8, 8))
    found = normalise.constants(rooted, 1, "leaves", 0.5)
    torch.testing.assert_close(found.mean[:, 0], drawn.transpose(0, 1).flatten(1).mean(1))


def test_the_mean_of_every_place_is_that_of_the_synthetic_images() -> None:
    maps = Maps(Scattering(8, 8, 1, 4))
    found = normalise.constants(maps, 1, "scenes", 0.5, "place")
    drawn = maps(draw("scenes", normalise.COUNT, 1, 8, 8)).flatten(2)
    torch.testing.assert_close(found.mean, drawn.mean(0))


@pytest.mark.parametrize("pooling", [4, 3])  # an even and an odd number of columns
def test_a_mirror_image_has_nearly_the_same_features(pooling: int, tmp_path: Path) -> None:
    """Maps begin at the left border, so those of a mirror image lie up to one in 2^J pixels beside the mirrored."""
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    waves = [0.5 + 0.5 * torch.sin(a * x + b * y + 0.02 * a * x * y) for a, b in ((0.5, 0.2), (0.3, -0.4))]
    records = torch.stack(waves)[:, None]

    def apart(made: ScatteringFeatures) -> float:
        there, back = (made.features(part, tmp_path) for part in (records, records.flip(-1)))
        assert (
            there.shape[1:]
            == made.shape((1, 32, 32))
            == (49 * pooling * ((pooling + 1) // 2 if made.mirror else pooling),)
        )
        return float((there - back).norm())

    assert apart(ScatteringFeatures(angles=6, pooling=pooling, mirror=True)) < 0.5 * apart(
        ScatteringFeatures(angles=6, pooling=pooling)
    )


def test_halved_maps_keep_the_length_of_symmetric_ones() -> None:
    """Of a row of columns that is its own mirror image, whatever their number."""
    for width in (12, 16):
        scattering = Scattering(16, width, 1, 4)
        maps = torch.rand(2, scattering.paths, *scattering.map_shape)
        symmetric = (maps + maps[:, scattering.mirrored()].flip(-1)) / 2
        halved = Maps(scattering, mirror=True)._halved(symmetric)
        torch.testing.assert_close(halved.flatten(1).norm(dim=1), symmetric.flatten(1).norm(dim=1))


@pytest.mark.parametrize("kind", get_args(SyntheticImages))
def test_synthetic_images_are_pictures(kind: SyntheticImages) -> None:
    drawn = draw(kind, 20, 3, 12, 10)
    assert drawn.shape == (20, 3, 12, 10)
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) <= 1
    assert float(drawn.flatten(1).std(1).min()) > 0.01  # none is blank
    assert torch.equal(drawn, draw(kind, 20, 3, 12, 10))


def test_features_come_from_the_cache_bit_by_bit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ScatteringFeatures(depth=1, angles=4)
    computed = made.features(images(), cache)
    (file,) = cache.iterdir()
    monkeypatch.setattr(ScatteringFeatures, "compute", lambda *_: pytest.fail("computed again"))
    assert torch.equal(made.features(images(), cache), computed)
    monkeypatch.undo()
    file.write_bytes(b"damaged")
    torch.testing.assert_close(made.features(images(), cache), computed)
    made.features(images() * 0.5, cache)
    ScatteringFeatures(depth=1, angles=2).features(images(), cache)
    assert len(list(cache.iterdir())) == 3  # other images, other options


def test_the_cache_is_closed_to_others_and_nothing_of_others_is_read(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features disclose records, and are trained on: who could write one could let it mix all of them."""
    made = ScatteringFeatures(depth=1, angles=2)
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    computed = made.features(images(), cache)
    assert cache.stat().st_mode & 0o777 == 0o700
    (file,) = cache.iterdir()
    planted = np.load(file) * 0
    np.save(file, planted)
    assert torch.equal(made.features(images(), cache), torch.from_numpy(planted).float()), (
        "its owner's is read"
    )
    nobody = 65534
    real = os.fstat
    monkeypatch.setattr("os.fstat", lambda fd: os.stat_result((*real(fd)[:4], nobody, *real(fd)[5:])))
    assert torch.equal(made.features(images(), cache), computed), "another's file is not"
    monkeypatch.undo()
    monkeypatch.setattr("os.getuid", lambda: nobody)
    assert torch.equal(made.features(images(), cache), computed), "nor anything in another's folder"


def test_features_do_not_depend_on_a_writable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert ScatteringFeatures(depth=1).features(images(), tmp_path / "file" / "below").shape[0] == 6


def test_a_task_learns_from_features(cache: Path) -> None:
    prepared = prepare(config(), 0)
    assert prepared.dataset.input_shape == model_shape(config(), (1, 8, 8)) == (5 * 4 * 4,)
    assert prepared.dataset.example_shape == (1, 8, 8)
    assert prepared.task.linear is not None
    assert load_examples(config(), None) is prepared.dataset  # seeds share one copy
    assert any(cache.iterdir())


def test_the_normalisation_of_a_data_set_leaves_its_features_as_they_are() -> None:
    plain, unit = (
        load_examples(config(data_options={"normalise": how}), None) for how in ("dataset", "unit")
    )
    torch.testing.assert_close(plain.train.x, unit.train.x, atol=2e-3, rtol=1e-2)


def test_features_leave_the_hash_of_other_configurations_alone() -> None:
    assert "features" not in Config().identity()
    assert config().identity() != config(features=None, feature_options={}).identity()


@pytest.mark.parametrize(
    ("task", "field"),
    [
        ({"features": "wavelet"}, "task.features"),
        ({"feature_options": {"depht": 2}}, "task.feature_options.depht"),
        ({"feature_options": {"depth": 0}}, "task.feature_options.depth"),
        ({"feature_options": {"centring": "pixel"}}, "task.feature_options.centring"),
        ({"feature_options": {"synthetic": "faces"}}, "task.feature_options.synthetic"),
        ({"feature_options": {"mirror": "left"}}, "task.feature_options.mirror"),
        ({"features": None}, "task.feature_options"),
    ],
)
def test_unknown_features_and_options_are_refused(task: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as refusal:
        config(**task)
    assert refusal.value.field == field


def test_images_too_small_for_the_depth_are_refused() -> None:
    with pytest.raises(InputError) as refusal:
        prepare(config(feature_options={"depth": 4}), 0)
    assert refusal.value.field == "task.feature_options.depth"


def test_tables_and_texts_have_no_scattering(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("x,y\n" + "1,no\n2,yes\n" * 8)
    films = tmp_path / "films.tsv"
    films.write_text("a good film\t1\na bad film\t0\n" * 5)
    for task in (
        {"dataset": "table", "data_options": {"path": str(table), "label": "y"}},
        {"dataset": "labelled-text", "model": "lstm", "data_options": {"path": str(films)}},
    ):
        with pytest.raises(InputError) as refusal:
            load_examples(config(**task), None)
        assert refusal.value.field == "task.features"


def test_no_features_without_a_name() -> None:
    assert make_features(None, {}) is None
