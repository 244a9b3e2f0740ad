"""The closed second derivative of convolution blocks against autograd's, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.models.convnet import convnet
from fedveil.models.registry import make_model
from fedveil.task import Task
from fedveil.training import gradient_matching
from fedveil.training.conv_blocks import BlockNetwork
from fedveil.training.gradient_matching import Distance, matching_gradient, matching_loss, weighted_gradient
from fedveil.training.winograd import Winograd
from fedveil.tree import Params, with_axis

TOLERANCE = 1e-9


def network(
    channels: int = 3,
    size: tuple[int, int] = (8, 12),
    widths: tuple[int, ...] = (4, 8),
    groups: int | None = None,
    *,
    bias: bool = True,
    affine: bool = True,
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [
            nn.Conv2d(channels, width, 3, padding=1, bias=bias),
            nn.GroupNorm(groups or width, width, affine=affine),
            nn.ReLU(),
            nn.AvgPool2d(2),
        ]
        channels = width
    features = channels * (size[0] >> len(widths)) * (size[1] >> len(widths))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 4, bias=bias))


class Problem:
    """One client's images, whose class 3 is absent, and a model that has left its start."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...], count: int = 5) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, dtype=torch.float64, generator=generator)

        self.model = model.double()
        self.w = {name: p.detach() + 0.1 * random(*p.shape) for name, p in self.model.named_parameters()}
        self.real = {name: random(*p.shape) for name, p in self.w.items()}
        self.x = random(1, count, *shape)
        self.y = torch.arange(count).remainder(3)[None]
        self.weights = torch.rand(1, count, dtype=torch.float64, generator=generator)
        self.weights[0, 1] = 0  # padding

    def expected(self, distance: Distance) -> tuple[Params, Tensor]:
        """The gradient, and that of its distance with respect to the images, by double backward."""
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in self.w.items()}
        images = self.x[0].clone().requires_grad_()
        scores = functional_call(self.model, leaves, (images,))
        losses = nn.functional.cross_entropy(scores, self.y[0], reduction="none")
        found = torch.autograd.grad(
            (losses * self.weights[0]).sum(), list(leaves.values()), create_graph=True
        )
        synthetic = dict(zip(leaves, found, strict=True))
        loss = matching_loss(
            self.real,
            synthetic,
            squared_weight=distance.squared_weight,
            reduce=distance.reduce,
            include_vectors=distance.include_vectors,
        )
        return synthetic, torch.autograd.grad(loss, images)[0]

    def check(self, distance: Distance | None = None) -> None:
        distance = distance or Distance()
        gradient, of_images = self.expected(distance)
        task, w, real = Task(lambda: copy.deepcopy(self.model)), with_axis(self.w), with_axis(self.real)
        found = weighted_gradient(task, w, self.x, self.y, self.weights)
        for name, leaf in gradient.items():
            assert found[name].dtype == leaf.dtype
            torch.testing.assert_close(found[name][0], leaf.detach(), rtol=TOLERANCE, atol=TOLERANCE)
        images = matching_gradient(task, w, real, self.x, self.y, self.weights, distance)
        largest = float(of_images.abs().max())
        torch.testing.assert_close(images[0], of_images, rtol=0, atol=TOLERANCE * largest)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("groups", [None, 1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_equals_double_backward(channels: int, groups: int | None, bias: bool, affine: bool) -> None:
    model = network(channels, groups=groups, bias=bias, affine=affine)
    assert BlockNetwork.recognise(model) is not None
    Problem(model, (channels, 8, 12)).check()


@pytest.mark.parametrize("distance", [Distance(0.0), Distance(0.3, "mean"), Distance(0.1, "sum", True)])
def test_every_distance_is_matched(distance: Distance) -> None:
    Problem(network(groups=2), (3, 8, 12)).check(distance)


@pytest.mark.parametrize("size", [(8, 8), (16, 24), (32, 32)])
def test_the_networks_of_the_paper_are_recognised(size: tuple[int, int]) -> None:
    model = convnet((1, *size), 4, width=6)
    assert BlockNetwork.recognise(model) is not None
    Problem(model, (1, *size)).check()


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (lambda: convnet((1, 20, 20), 4, width=6), (1, 20, 20)),  # the second pooling leaves out a row
        (lambda: make_model("lenet-5", (1, 28, 28), 4), (1, 28, 28)),
        (lambda: make_model("mlp-2", (1, 6, 6), 4), (1, 6, 6)),
    ],
    ids=["odd side", "lenet", "mlp"],
)
def test_other_networks_go_the_general_way(model: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    Problem(model().eval(), shape).check()


@pytest.mark.parametrize("kept", [True, False])
def test_the_gradient_does_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    monkeypatch.setattr(gradient_matching, "_BLOCK_PIECE_BYTES", 2 * 4 * 8 * 12 * 8)  # two images
    monkeypatch.setattr(gradient_matching, "_KEPT_BYTES", 2**20 if kept else 0)
    Problem(network(), (3, 8, 12)).check()


def test_a_norm_without_effect_gives_finite_numbers() -> None:
    """A weight of zero has no inverse; the channel still has gradients."""
    problem = Problem(network(groups=2), (3, 8, 12))
    for name in ("1.weight", "5.weight"):
        problem.w[name][:2] = 0
    problem.check()


def test_flat_images_give_finite_numbers() -> None:
    problem = Problem(network(), (3, 8, 12))
    problem.x = torch.full_like(problem.x, 0.3)
    problem.check()


def test_a_shift_of_what_is_centred_next_has_no_gradient() -> None:
    problem = Problem(network(), (3, 8, 12))
    task = Task(lambda: copy.deepcopy(problem.model))
    found = weighted_gradient(task, with_axis(problem.w), problem.x, problem.y, problem.weights)
    assert torch.count_nonzero(found["0.bias"]) == torch.count_nonzero(found["4.bias"]) == 0


def changed(place: int, layer: nn.Module) -> nn.Sequential:
    model = network()
    model[place] = layer
    return model


def tied() -> nn.Sequential:
    model = network(widths=(4, 4, 4))
    model[8].weight = model[4].weight
    return model


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return 2 * x


@pytest.mark.parametrize(
    "model",
    [
        changed(0, nn.Conv2d(3, 4, 5, padding=2)),
        changed(0, nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")),
        changed(4, nn.Conv2d(4, 8, 3, padding=1, groups=2)),
        changed(4, nn.Conv2d(4, 8, 3, padding=2, dilation=2)),
        changed(1, nn.Identity()),
        changed(2, nn.Tanh()),
        changed(3, nn.MaxPool2d(2)),
        changed(3, nn.AvgPool2d(2, divisor_override=3)),
        changed(3, nn.AvgPool2d(3, stride=2, padding=1)),
        changed(8, nn.Flatten(2)),
        Doubled(*network()),
        network()[:8],
        tied(),
        nn.Linear(3, 2),
    ],
)
def test_what_only_resembles_them_is_not_recognised(model: nn.Module) -> None:
    assert BlockNetwork.recognise(model) is None


@pytest.mark.parametrize("size", [(2, 2), (4, 4), (6, 8), (8, 12)])
def test_products_of_tiles_are_a_convolution_and_its_gradients(size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    height, width = size
    h = torch.randn(3, height * width, 2, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(5, 2, 3, 3, dtype=torch.float64, generator=generator).requires_grad_()
    images = h.transpose(1, 2).unflatten(2, size)
    wanted = nn.functional.avg_pool2d(nn.functional.conv2d(images, weight, padding=1), 2)
    pull = torch.randn(3, height * width // 4, 5, dtype=torch.float64, generator=generator)
    of_h, of_weight = torch.autograd.grad((wanted.flatten(2).transpose(1, 2) * pull).sum(), [h, weight])

    tiles = Winograd(height, width, pull)
    inputs, kernel = tiles.of_inputs(h.detach()), tiles.of_weights(weight.detach())
    found = tiles.to_pixels(tiles.to_outputs(torch.bmm(inputs, kernel)).mean(0))
    torch.testing.assert_close(found, wanted.detach().flatten(2).transpose(1, 2))
    everywhere = (tiles.of_pixels(pull) / 4).expand(4, -1, -1, -1, -1).contiguous()
    products = tiles.of_outputs(everywhere)
    torch.testing.assert_close(tiles.to_weights(torch.bmm(inputs.transpose(1, 2), products)), of_weight)
    torch.testing.assert_close(tiles.to_inputs(torch.bmm(products, kernel.transpose(1, 2))), of_h)
