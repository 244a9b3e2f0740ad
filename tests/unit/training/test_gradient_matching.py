"""Eq. 16-17 of FedLAP-DP against a loop over rows, and at the edges where a cosine has no value."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.task import Task
from fedveil.training.gradient_matching import Distance, matching_gradient, matching_loss
from fedveil.tree import Params, expand, rows, with_axis
from tests.refusals import refuses

SHAPES = {"conv": (4, 3, 2, 2), "bias": (4,), "fc": (5, 6)}


def gradients(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in SHAPES.items()
    }


def cosine(a: list[float], b: list[float]) -> float:
    dot = sum(p * q for p, q in zip(a, b, strict=True))
    return dot / math.sqrt(sum(p * p for p in a)) / math.sqrt(sum(q * q for q in b))


def by_hand(real: Params, synthetic: Params, weight: float, mean: bool, vectors: bool) -> float:
    total = 0.0
    for name, g in real.items():
        s = synthetic[name]
        if g.dim() > 1:
            rows = [1 - cosine(a.flatten().tolist(), b.flatten().tolist()) for a, b in zip(g, s, strict=True)]
        else:
            rows = [1 - cosine(g.tolist(), s.tolist())] if vectors else []
        total += sum(rows) / (len(rows) if mean and rows else 1)
        total += weight * float((g - s).square().sum())
    return total


@pytest.mark.parametrize("weight", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("vectors", [False, True])
def test_equals_the_equation_row_by_row(weight: float, mean: bool, vectors: bool) -> None:
    real, synthetic = gradients(0), gradients(1)
    ours = matching_loss(
        real, synthetic, squared_weight=weight, reduce="mean" if mean else "sum", include_vectors=vectors
    )
    assert float(ours) == pytest.approx(by_hand(real, synthetic, weight, mean, vectors), rel=1e-12)


def test_zero_for_equal_gradients_and_two_per_row_for_opposite_ones() -> None:
    real = gradients(0)
    assert float(matching_loss(real, real)) == pytest.approx(0.0, abs=1e-12)
    opposite = {name: -3 * leaf for name, leaf in real.items()}
    assert float(matching_loss(real, opposite, squared_weight=0)) == pytest.approx(2.0 * (4 + 5))


def test_cosine_does_not_see_the_length_of_a_row() -> None:
    real, synthetic = gradients(0), gradients(1)
    longer = {name: leaf * 7.5 for name, leaf in synthetic.items()}
    a = matching_loss(real, synthetic, squared_weight=0)
    b = matching_loss(real, longer, squared_weight=0)
    assert float(a) == pytest.approx(float(b), rel=1e-12)


@pytest.mark.parametrize("side", ["real", "synthetic", "both"])
def test_zero_rows_give_no_nan_in_value_or_gradient(side: str) -> None:
    real, synthetic = gradients(0), gradients(1)
    for name in SHAPES:
        if side in ("real", "both"):
            real[name][1] = 0
        if side in ("synthetic", "both"):
            synthetic[name][1] = 0
    leaves = {name: leaf.requires_grad_() for name, leaf in synthetic.items()}
    value = matching_loss(real, leaves, include_vectors=True)
    found = torch.autograd.grad(value, list(leaves.values()))
    assert math.isfinite(float(value.detach()))
    assert all(torch.isfinite(leaf).all() for leaf in found)
    cosine_only = matching_loss(real, leaves, squared_weight=0)
    (slope,) = torch.autograd.grad(cosine_only, leaves["conv"])
    assert torch.count_nonzero(slope[1]) == 0
    assert torch.count_nonzero(slope[0]) > 0
    alone = matching_loss({"w": torch.zeros(2, 3)}, {"w": torch.zeros(2, 3)}, squared_weight=0)
    assert float(alone) == 2.0  # no direction: cosine 0


@pytest.mark.parametrize("unit", [1e-30, 1e-42, 1e25])
def test_tiny_and_huge_float32_gradients_keep_their_direction(unit: float) -> None:
    base = {name: leaf.float() for name, leaf in gradients(0).items()}
    other = {name: leaf.float() for name, leaf in gradients(1).items()}
    wanted = float(matching_loss(base, other, squared_weight=0))
    small = {name: leaf * unit for name, leaf in other.items()}
    turned = {name: leaf * unit for name, leaf in base.items()}
    tolerance = 1e-2 if unit < 1e-38 else 1e-4
    assert float(matching_loss(turned, small, squared_weight=0)) == pytest.approx(wanted, rel=tolerance)


def test_gradient_with_respect_to_the_synthetic_gradients() -> None:
    real = gradients(0)
    names = list(SHAPES)

    def loss(*leaves: Tensor) -> Tensor:
        return matching_loss(real, dict(zip(names, leaves, strict=True)), include_vectors=True)

    leaves = [gradients(1)[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(loss, leaves)
    assert torch.autograd.gradgradcheck(loss, leaves)


def test_images_learn_to_imitate_the_real_gradient() -> None:
    """On a linear model, with as many synthetic as real examples, the gradients come to agree."""
    generator = torch.Generator().manual_seed(4)
    model = nn.Linear(6, 3).double()
    params = {
        "weight": torch.randn(3, 6, dtype=torch.float64, generator=generator) * 0.3,
        "bias": torch.zeros(3, dtype=torch.float64),
    }
    y = torch.arange(9) % 3
    x = torch.randn(9, 6, dtype=torch.float64, generator=generator)
    images = torch.randn(9, 6, dtype=torch.float64, generator=generator).requires_grad_()

    def gradient(inputs: Tensor, create_graph: bool) -> Params:
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
        value = nn.functional.cross_entropy(functional_call(model, leaves, (inputs,)), y)
        found = torch.autograd.grad(value, list(leaves.values()), create_graph=create_graph)
        return dict(zip(leaves, found, strict=True))

    real = gradient(x, False)
    for _ in range(300):
        value = matching_loss(real, gradient(images, True))
        (slope,) = torch.autograd.grad(value, images)
        images = (images - 0.5 * slope).detach().requires_grad_()
    found = gradient(images, False)
    assert cosine(found["weight"].flatten().tolist(), real["weight"].flatten().tolist()) > 0.95


def test_the_real_gradient_is_a_constant() -> None:
    real = {name: leaf.requires_grad_() for name, leaf in gradients(0).items()}
    assert not matching_loss(real, gradients(1)).requires_grad


@pytest.mark.parametrize(
    "real, synthetic, options, field",
    [
        ({}, {}, {}, "synthetic"),
        ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}, {}, "synthetic"),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(3)}, {}, "a"),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2)}, {"squared_weight": -1.0}, "squared_weight"),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2)}, {"reduce": "max"}, "reduce"),
    ],
)
def test_refused(real: Params, synthetic: Params, options: dict[str, object], field: str) -> None:
    with refuses(field):
        matching_loss(real, synthetic, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [False, True])
def test_clients_that_share_their_model_are_matched_one_by_one(bias: bool) -> None:
    def build() -> nn.Module:
        layers = [nn.Linear(6, 5, bias=bias), nn.ReLU(), nn.Linear(5, 3, bias=bias)]
        return nn.Sequential(nn.Flatten(), *layers).double()

    task = Task(build)
    generator = torch.Generator().manual_seed(0)
    shared = expand(with_axis(task.init(0)), 3)  # one model seen three times, not three copies
    assert next(iter(shared.values())).stride(0) == 0
    x = torch.randn(3, 8, 6, dtype=torch.float64, generator=generator)
    y = torch.arange(8).remainder(3).expand(3, 8)
    weights = torch.full((3, 8), 1 / 8, dtype=torch.float64)
    real = {
        name: torch.randn(leaf.shape, dtype=torch.float64, generator=generator)
        for name, leaf in shared.items()
    }
    found = matching_gradient(task, shared, real, x, y, weights, Distance())
    for k in range(3):
        own = slice(k, k + 1)
        one, target = rows(shared, [k]), rows(real, [k])
        alone = matching_gradient(task, one, target, x[own], y[own], weights[own], Distance())
        torch.testing.assert_close(found[k : k + 1], alone, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("vectors", [False, True])
def test_the_closed_gradient_is_that_of_the_equation(reduce: Literal["sum", "mean"], vectors: bool) -> None:
    real, synthetic = gradients(0), gradients(1)
    real["fc"][1], synthetic["conv"][2] = 0.0, 0.0  # rows without a direction
    leaves = {name: leaf.requires_grad_() for name, leaf in synthetic.items()}
    loss = matching_loss(real, leaves, squared_weight=0.3, reduce=reduce, include_vectors=vectors)
    expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    distance = Distance(0.3, reduce, vectors)
    found = distance.gradient(with_axis(real), with_axis({n: s.detach() for n, s in synthetic.items()}))
    for name, leaf in with_axis(expected).items():
        torch.testing.assert_close(found[name], leaf, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("unit", [1e-30, 1e-20, 1e25])
def test_the_closed_gradient_keeps_the_direction_of_tiny_and_huge_rows(unit: float) -> None:
    real, synthetic = gradients(0), gradients(1)
    exact = Distance(0.0).gradient(with_axis(real), with_axis(synthetic))
    small = {name: with_axis({name: (unit * leaf).float()})[name] for name, leaf in synthetic.items()}
    found = Distance(0.0).gradient(with_axis({n: g.float() for n, g in real.items()}), small)
    for name, leaf in exact.items():
        torch.testing.assert_close(unit * found[name].double(), leaf, rtol=1e-4, atol=1e-5)
