from __future__ import annotations

import numpy as np
import pytest
import torch

from fedveil.data.dataset import (
    Dataset,
    Examples,
    Normalise,
    TextDataset,
    TextExamples,
    images_from_bytes,
    stratified_split,
)
from fedveil.errors import DataError
from tests.refusals import refuses


def make(x: list[float], y: list[int]) -> Examples:
    return Examples(torch.tensor(x)[:, None], torch.tensor(y))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused_with_the_example(wrong: float) -> None:
    with refuses("x", DataError, value=2):
        make([0.0, 1.0, wrong, 2.0], [0, 1, 0, 1])


@pytest.mark.parametrize(
    "x, y",
    [
        (torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 1), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(2, 1), torch.tensor([0, -1])),
    ],
)
def test_wrong_types_counts_and_negative_labels_are_refused(x: torch.Tensor, y: torch.Tensor) -> None:
    with pytest.raises(DataError):
        Examples(x, y)


def test_a_label_beyond_the_classes_is_refused() -> None:
    with refuses("y", DataError, value=2):
        Dataset("d", make([0.0], [0]), make([0.0], [2]), ("a", "b"), (0.0,), (1.0,))


def test_a_dataset_has_a_shape_and_can_be_limited() -> None:
    train = Examples(torch.zeros(5, 3, 4, 4), torch.arange(5), torch.arange(5))
    dataset = Dataset("d", train, train, tuple("abcde"), (0.0,) * 3, (1.0,) * 3)
    assert dataset.input_shape == (3, 4, 4)
    assert dataset.num_classes == 5
    limited = dataset.limited(2, None)
    assert (len(limited.train), len(limited.test)) == (2, 5)
    assert limited.train.users is not None
    assert limited.train.users.tolist() == [0, 1]
    assert limited.train.x.untyped_storage().nbytes() == 2 * 48 * 4  # the rest is freed


def test_texts_and_labels_must_be_as_many() -> None:
    with refuses("labels", DataError):
        TextExamples(("a", "b"), torch.tensor([1]))
    with refuses("train", DataError):
        TextDataset("t", TextExamples(()), TextExamples(()), ())


@pytest.mark.parametrize("normalise", ["dataset", "unit", "none"])
def test_std_and_mean_convert_back_to_brightness_for_every_normalisation(normalise: Normalise) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 3, 5, 5), dtype=np.uint8)
    x, mean, std = images_from_bytes(pixels, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7), normalise=normalise)
    back = x.double() * torch.tensor(std).double().view(3, 1, 1) + torch.tensor(mean).double().view(3, 1, 1)
    assert torch.allclose(back, torch.from_numpy(pixels / 255.0), atol=1e-6)


def test_normalisations_have_their_documented_statistics() -> None:
    pixels = np.array([0, 51, 255], np.uint8).reshape(3, 1, 1, 1)
    values = {
        name: images_from_bytes(pixels, (0.2,), (0.4,), normalise=name)[0].flatten().tolist()
        for name in ("dataset", "unit", "none")
    }
    assert values["dataset"] == pytest.approx([-0.5, 0.0, 2.0], abs=1e-6)
    assert values["unit"] == pytest.approx([0.0, 0.2, 1.0])
    assert values["none"] == pytest.approx([0.0, 51.0, 255.0])


def test_padding_is_black_and_centred() -> None:
    pixels = np.full((2, 1, 28, 28), 255, np.uint8)
    x, _, _ = images_from_bytes(pixels, (0.1307,), (0.3081,), pad_to=32)
    assert x.shape == (2, 1, 32, 32)
    black, white = -0.1307 / 0.3081, (1 - 0.1307) / 0.3081
    inner = x[:, :, 2:30, 2:30]
    assert torch.allclose(inner, torch.full_like(inner, white))
    border = x.clone()
    border[:, :, 2:30, 2:30] = black
    assert torch.allclose(border, torch.full_like(border, black))


@pytest.mark.parametrize("pad_to", [0, -3, 27, "32", True, 30.5])
def test_padding_that_cannot_be_is_refused(pad_to: int) -> None:
    with refuses("pad_to"):
        images_from_bytes(np.zeros((1, 1, 28, 28), np.uint8), (0.0,), (1.0,), pad_to=pad_to)


def test_a_split_is_stratified_seeded_and_uses_everything_once() -> None:
    y = np.repeat([0, 1, 2], [100, 50, 10])
    train, test = stratified_split(y, 0.2, 0, "t")
    assert np.bincount(y[test.numpy()]).tolist() == [20, 10, 2]
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(160))
    assert not bool((train.diff() > 0).all())  # shuffled
    again, _ = stratified_split(y, 0.2, 0, "t")
    other, _ = stratified_split(y, 0.2, 1, "t")
    assert torch.equal(train, again)
    assert not torch.equal(train, other)


@pytest.mark.parametrize("fraction", [1.0, -0.1, float("nan"), "0.2", True])
def test_a_fraction_that_cannot_be_is_refused(fraction: float) -> None:
    with refuses("test_fraction"):
        stratified_split(np.zeros(4), fraction, 0, "t")
