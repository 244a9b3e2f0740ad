"""Siamese augmentation: the same change on both sides, differentiable, its values public."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedveil.streams import named_stream
from fedveil.training.augmentation import CHANGES, Change, View, check_images, draw_view
from tests.refusals import refuses


def pictures(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", CHANGES)
def test_images_keep_their_shape_and_each_is_changed_alone(kind: Change) -> None:
    x = pictures()
    view = View(kind, 0.3, 0.8)
    changed = view(x)
    assert changed.shape == x.shape
    assert not torch.equal(changed, x)
    for i in range(len(x)):
        assert torch.allclose(changed[i : i + 1], view(x[i : i + 1]))


@pytest.mark.parametrize("kind", CHANGES)
def test_it_is_differentiable(kind: Change) -> None:
    view = View(kind, 0.3, 0.8)
    assert torch.autograd.gradcheck(view, (pictures(1)[:, :, :4, :4].requires_grad_(),))


def test_the_change_depends_on_the_stream_alone() -> None:
    views = [draw_view(CHANGES, named_stream(0, "augmentation")) for _ in range(2)]
    assert views[0] == views[1]
    stream = named_stream(0, "augmentation")
    kinds = {draw_view(CHANGES, stream).kind for _ in range(200)}
    assert kinds == set(CHANGES)


def test_without_changes_nothing_is_drawn_and_nothing_changes() -> None:
    stream, other = named_stream(0, "a"), named_stream(0, "a")
    x = pictures()
    assert draw_view((), stream)(x) is x
    assert stream.random() == other.random()


def test_a_flip_is_a_mirror_and_a_crop_shifts() -> None:
    x = pictures()
    assert torch.equal(View("flip", 0.1)(x), x.flip(3))
    assert torch.equal(View("flip", 0.9)(x), x)
    shifted = View("crop", 1.0, 0.5)(x)
    assert torch.equal(shifted[:, :, :-1], x[:, :, 1:])
    assert torch.equal(View("cutout", 0.0, 0.0)(x)[:, :, :4, :4], torch.zeros(3, 3, 4, 4).double())


def test_what_is_not_an_image_is_refused() -> None:
    with refuses("method.augment"):
        check_images(("flip",), (6,))
    check_images((), (6,))
    check_images(("flip",), (1, 8, 8))
