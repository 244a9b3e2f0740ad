"""Scores of images against other implementations, and honest absence of LPIPS."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.refusals import refuses
from torch import Tensor

from fedveil.errors import DataError
from fedveil.evaluation import image_quality
from fedveil.evaluation.image_quality import (
    Brightness,
    class_divergence,
    compare_images,
    lpips,
    lpips_weights,
    match_images,
    mse,
    psnr,
    read_arrays,
    ssim,
)
from fedveil.models.registry import make_model
from fedveil.task import Task

needs_weights = pytest.mark.skipif(lpips_weights() is None, reason="the VGG16 weights are not installed")


def pair(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand(3, *shape, generator=generator)
    return a, (a + 0.2 * torch.randn(3, *shape, generator=generator)).clamp(0, 1)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 11, 13)])
def test_ssim_equals_two_other_implementations(shape: tuple[int, ...]) -> None:
    structural = pytest.importorskip("skimage.metrics").structural_similarity
    other = pytest.importorskip("torchmetrics.functional.image").structural_similarity_index_measure
    a, b = (x.double() for x in pair(shape))
    found = ssim(a, b)
    for one, two, value in zip(a, b, found.tolist(), strict=True):
        _, full = structural(
            one.numpy(),
            two.numpy(),
            channel_axis=0,
            data_range=1.0,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            full=True,
        )
        inner = full[:, 5:-5, 5:-5].mean()
        assert value == pytest.approx(float(inner), abs=1e-9)
    if min(shape[1:]) > 11:
        _, full = other(a, b, data_range=1.0, reduction="none", return_full_image=True)
        torch.testing.assert_close(found, full[..., 5:-5, 5:-5].flatten(1).mean(1), rtol=0, atol=1e-9)


def test_mse_and_psnr_by_hand() -> None:
    a, b = torch.zeros(1, 1, 2, 2), torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]])
    assert mse(a, b).tolist() == [0.25]
    assert psnr(a, b).tolist() == pytest.approx([10 * np.log10(4)])
    assert psnr(a, a).tolist() == [float("inf")]


def test_equal_images_are_perfect_and_small_ones_work() -> None:
    a, _ = pair((1, 8, 8))
    assert ssim(a, a).tolist() == pytest.approx([1.0] * 3)
    score = compare_images(a, a, Brightness((0.0,), (1.0,)))
    assert score.psnr == [200.0] * 3
    assert score.lpips is None
    assert "unavailable" in score.lpips_note


def test_psnr_is_of_brightness_and_mse_of_normalised_pixels() -> None:
    a, b = pair((1, 12, 12))
    normalised = compare_images((a - 0.3) / 0.5, (b - 0.3) / 0.5, Brightness((0.3,), (0.5,)))
    plain = compare_images(a, b, Brightness((0.0,), (1.0,)))
    assert normalised.psnr == pytest.approx(plain.psnr, rel=1e-5)
    assert normalised.mse == pytest.approx([4 * value for value in plain.mse], rel=1e-5)


def test_matching_undoes_a_permutation() -> None:
    truth = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    found = truth[order] + 0.01
    assert torch.equal(found[match_images(found, truth)], truth + 0.01)


def test_images_that_are_not_numbers_are_matched_last() -> None:
    truth = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    found = torch.stack([torch.full_like(truth[0], torch.nan), truth[0], truth[1]])
    assert match_images(found, truth).tolist() == [1, 2, 0]


def test_divergence_is_zero_for_equal_images_and_positive_else() -> None:
    task = Task(lambda: make_model("logistic", (1, 4, 4), 3))
    a, b = pair((1, 4, 4))
    params = task.init(0)
    assert class_divergence(task, params, a, a).abs().max() < 1e-12
    assert bool((class_divergence(task, params, a, b) > 0).all())


def test_different_shapes_are_refused() -> None:
    with refuses("images"):
        mse(torch.zeros(1, 2), torch.zeros(1, 3))


def test_lpips_without_weights_is_reported_as_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_quality, "lpips_weights", lambda: None)
    value, note = lpips(*pair((1, 28, 28)))
    assert value is None
    assert "perceptual" in note


@needs_weights
def test_lpips_of_real_weights() -> None:
    a, b = pair((1, 28, 28))
    near = (a + 0.02 * torch.randn(a.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    far, note = lpips(a, b)
    close, _ = lpips(a, near)
    same, _ = lpips(a, a)
    assert far is not None
    assert close is not None
    assert same is not None
    assert "VGG16" in note
    assert same.abs().max() < 1e-9
    assert bool((close < far).all())
    assert bool((far < 1.5).all())


def test_weights_are_read_without_running_code() -> None:
    with refuses("weights", DataError, value="pathlib.PosixPath"):
        read_arrays(pickle.dumps(Path("x")))
    with refuses("weights", DataError):
        read_arrays(b"nonsense")
    array = np.arange(3.0)
    assert read_arrays(pickle.dumps({"a": array}, protocol=4))["a"].tolist() == [0.0, 1.0, 2.0]
