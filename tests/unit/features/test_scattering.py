"""Scattering against kymatio 0.3.0 and against convolutions written out."""

from __future__ import annotations

import importlib
import importlib.util

import numpy as np
import pytest
import scipy.special
import torch
from torch import Tensor

from fedveil.errors import InputError
from fedveil.features.blocks import in_blocks
from fedveil.features.scattering import Scattering, _filters, _morlet

# (height, width, depth, angles), five of kymatio 0.3.0's coefficients of `image` and the sum of all.
RECORDED = [
    ((28, 28, 2, 8), (0.831265, 0.040423, 0.004382, 0.000843, 0.000976), 72.86067),
    ((32, 32, 3, 4), (0.6316, 0.163808, 0.00057, 0.000829, 0.001259), 23.10179),
    ((28, 30, 1, 6), (0.735069, 0.068903, 0.070447, 0.024326, 0.020239), 197.11236),
]


def image(height: int, width: int) -> Tensor:
    r, c = torch.meshgrid(torch.arange(height).double(), torch.arange(width).double(), indexing="ij")
    return 0.5 + 0.5 * torch.sin(0.7 * r + 0.3 * c + 0.05 * r * c)


@pytest.mark.parametrize(("shape", "expected", "total"), RECORDED)
def test_coefficients_are_those_recorded_from_kymatio(
    shape: tuple[int, int, int, int], expected: tuple[float, ...], total: float
) -> None:
    scattered = Scattering(*shape)(image(*shape[:2])[None])[0]
    places = ((0, 0, 0), (1, 1, 2), (len(scattered) // 2, 2, 1), (-1, -1, -1), (-2, 0, -1))
    assert [float(scattered[place]) for place in places] == pytest.approx(expected, abs=5e-5)
    assert float(scattered.sum()) == pytest.approx(total, rel=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("kymatio") is None, reason="kymatio is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(28, 28, 2, 8), (32, 30, 3, 4)])
def test_coefficients_are_those_of_kymatio(
    shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scipy.special, "sph_harm", None, raising=False)  # removed from scipy; only 3D uses it
    height, width, depth, angles = shape
    x = torch.from_numpy(np.random.default_rng(0).random((3, height, width)))
    oracle = importlib.import_module("kymatio.numpy").Scattering2D(J=depth, shape=(height, width), L=angles)
    torch.testing.assert_close(
        Scattering(*shape)(x), torch.from_numpy(oracle(x.numpy())), atol=5e-5, rtol=1e-4
    )


def test_first_layer_is_a_convolution_with_morlet_wavelets() -> None:
    """One path of the first layer by a sum over all places of the padded image."""
    scattering, x, theta, j = Scattering(12, 12, 2, 4), image(12, 12), 3, 1
    padded = torch.nn.functional.pad(x[None], (4, 4, 4, 4), mode="reflect")[0]
    wave = _morlet((20, 20), 0.8 * 2**j, theta, j, 4)
    modulus = torch.stack(
        [
            torch.stack(
                [(padded * wave.flip(0, 1).roll((r + 1, c + 1), (0, 1))).sum().abs() for c in range(0, 20, 2)]
            )
            for r in range(0, 20, 2)
        ]
    )
    expected = _filters(scattering, torch.float64).average(modulus[None], 1)[0]
    torch.testing.assert_close(scattering(x[None])[0, 1 + j * 4 + theta], expected, atol=1e-10, rtol=1e-8)


def test_pooling_averages_the_maps() -> None:
    x = torch.stack([image(28, 28), image(28, 28).T])
    whole, pooled = Scattering(28, 28)(x), Scattering(28, 28, pooling=4)(x)
    assert pooled.shape == (2, 81, 4, 4)
    torch.testing.assert_close(pooled, torch.nn.functional.adaptive_avg_pool2d(whole, 4))


@pytest.mark.parametrize(("depth", "angles"), [(2, 8), (3, 5)])
def test_a_mirror_image_has_the_mirrored_paths(depth: int, angles: int) -> None:
    """Of an image that is dark at its border, sums over all places are those of the mirrored paths."""
    far = (torch.arange(96).double() - 47.5).square()
    x = (image(96, 96) * torch.exp(-(far[:, None] + far) / 300))[None]
    scattering = Scattering(96, 96, depth, angles)
    totals, mirrored = (scattering(part).mean((0, 2, 3)) for part in (x, x.flip(-1)))
    order = torch.tensor(scattering.mirrored())
    assert sorted(scattering.mirrored()) == list(range(scattering.paths))
    torch.testing.assert_close(mirrored, totals[order], atol=1e-6, rtol=0.01)
    assert not torch.allclose(mirrored, totals, atol=1e-6, rtol=0.05)


def test_a_batch_is_its_images_one_by_one() -> None:
    x = torch.rand(70, 16, 16, generator=torch.Generator().manual_seed(0))
    one_by_one = torch.cat([Scattering(16, 16)(row[None]) for row in x])
    torch.testing.assert_close(Scattering(16, 16)(x), one_by_one, atol=1e-6, rtol=1e-5)


def test_the_number_of_threads_is_left_as_it_was() -> None:
    before = torch.get_num_threads()
    in_blocks(Scattering(8, 8, 1), torch.zeros(2, 8, 8), 4)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((7, 28, 3), "depth"),
        ((28, 28, 0), "depth"),
        ((28, 28, 2, 0), "angles"),
        ((28, 28, 2, 8, 8), "pooling"),
    ],
)
def test_impossible_shapes_are_refused(arguments: tuple[int, ...], field: str) -> None:
    with pytest.raises(InputError) as refusal:
        Scattering(*arguments)
    assert refusal.value.field == field
