"""Every model by name: sizes, shapes, layouts, weights from a seed, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.refusals import refuses
from torch import nn

from fedveil.models.registry import list_models, make_model


def count(model: nn.Module) -> int:
    return sum(leaf.numel() for leaf in model.parameters())


@pytest.mark.parametrize(
    "name, shape, classes, options, expected",
    [
        ("mlp-2", (1, 28, 28), 47, {}, 784 * 64 + 64 * 47),
        ("mlp-2", (20,), 3, {"hidden": 5, "bias": True}, 20 * 5 + 5 + 5 * 3 + 3),
        ("logistic", (1, 8, 8), 10, {}, 64 * 10 + 10),
        (
            "lenet-5",
            (3, 32, 32),
            10,
            {},
            (75 * 32 + 32) + (800 * 64 + 64) + (1600 * 512 + 512) + (512 * 512 + 512) + (512 * 10 + 10),
        ),
        ("lenet-zhu", (1, 28, 28), 10, {}, (25 * 12 + 12) + 2 * (300 * 12 + 12) + (588 * 10 + 10)),
        ("lenet-zhu", (3, 32, 32), 10, {}, (75 * 12 + 12) + 2 * (300 * 12 + 12) + (768 * 10 + 10)),
        ("convnet", (3, 32, 32), 10, {}, 320_010),
        ("convnet", (1, 32, 32), 10, {}, 317_706),
    ],
)
def test_parameter_counts(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, Any], expected: int
) -> None:
    assert count(make_model(name, shape, classes, **options)) == expected


def test_convnet_64_reaches_the_classifier_with_36_widths() -> None:
    model = make_model("convnet-64", (3, 32, 32), 10)
    assert isinstance(model, nn.Sequential)
    output = model[-1]
    assert isinstance(output, nn.Linear)
    assert output.in_features == 36 * 64
    assert [leaf.shape[0] for leaf in model.parameters() if leaf.dim() == 4] == [64, 128, 128, *[256] * 5]
    kinds = {type(layer) for layer in model}
    assert nn.BatchNorm2d not in kinds
    assert nn.Tanh in kinds


@pytest.mark.parametrize("name", [entry.name for entry in list_models() if entry.reads == "numbers"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_every_model_maps_a_batch_to_scores_and_every_parameter_gets_a_gradient(
    name: str, shape: tuple[int, ...]
) -> None:
    model = make_model(name, shape, 7)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    scores = model.eval()(x)
    assert scores.shape == (2, 7)
    scores.square().sum().backward()
    for parameter, leaf in model.named_parameters():
        assert leaf.grad is not None, parameter
        assert torch.isfinite(leaf.grad).all(), parameter


@pytest.mark.parametrize("name", ["mlp-2", "logistic", "lenet-5", "lenet-zhu", "convnet"])
def test_eight_by_eight_digits_work(name: str) -> None:
    assert make_model(name, (1, 8, 8), 10).eval()(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_lenet_pads_only_small_images() -> None:
    def padding(model: nn.Module) -> object:
        return next(layer.padding for layer in model.modules() if isinstance(layer, nn.Conv2d))

    assert padding(make_model("lenet-5", (1, 28, 28), 10)) == (0, 0)
    assert padding(make_model("lenet-5", (1, 16, 16), 10)) == (0, 0)
    assert padding(make_model("lenet-5", (1, 15, 15), 10)) == (2, 2)


def test_lenet_relu_after_the_pool_equals_relu_before_it() -> None:
    model = make_model("lenet-5", (3, 32, 32), 10).double()
    assert isinstance(model, nn.Sequential)
    layers = dict(model.named_children())
    order = ["conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "flatten"]
    order += ["fc1", "relu3", "fc2", "relu4", "fc3"]
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    plain = x
    for name in order:
        plain = layers[name](plain)
    torch.testing.assert_close(model(x), plain, rtol=1e-13, atol=1e-13)


def test_lenet_without_activations_between_convolutions() -> None:
    model = make_model("lenet-5", (3, 32, 32), 10, conv_relu=False)
    assert [type(layer) for layer in model.children()].count(nn.ReLU) == 2


def test_linear_models_are_plain_sequentials_of_known_layers() -> None:
    for name in ("mlp-2", "logistic"):
        model = make_model(name, (1, 4, 4), 3)
        assert type(model) is nn.Sequential
        assert {type(layer) for layer in model} <= {nn.Flatten, nn.Linear, nn.Dropout, nn.ReLU}


def test_lenet_zhu_draws_from_half_to_half() -> None:
    model = make_model("lenet-zhu", (1, 28, 28), 10)
    values = torch.cat([leaf.detach().flatten() for leaf in model.parameters()])
    assert values.abs().max() <= 0.5
    assert abs(float(values.std()) - 1 / 12**0.5) < 0.01
    assert all(float(leaf.detach().abs().max()) > 0.25 for leaf in model.parameters())


def test_layouts() -> None:
    wanted = {"lenet-5": True, "convnet": False, "mlp-2": False}
    for name, channels_last in wanted.items():
        assert bool(getattr(make_model(name, (3, 32, 32), 10), "channels_last", False)) is channels_last


def test_same_seed_same_weights_and_the_global_generator_is_untouched() -> None:
    before = torch.get_rng_state()
    first = make_model("lenet-5", (1, 28, 28), 10, seed=3).state_dict()
    again = make_model("lenet-5", (1, 28, 28), 10, seed=3).state_dict()
    other = make_model("lenet-5", (1, 28, 28), 10, seed=4).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_list_names_and_summaries() -> None:
    entries = list_models()
    of_numbers = {entry.name for entry in entries if entry.reads == "numbers"}
    assert of_numbers == {"mlp-2", "lenet-5", "lenet-zhu", "convnet", "convnet-64", "alexnet", "logistic"}
    assert {entry.name for entry in entries if entry.reads == "texts"} == {"lstm", "transformer", "bert"}
    assert {entry.name for entry in entries} - of_numbers >= {"causal-lm", "gpt"}
    assert all(entry.summary for entry in entries)


@pytest.mark.parametrize(
    "name, shape, classes, options, field, value",
    [
        ("lenet", (1, 28, 28), 10, {}, "task.model", "lenet"),
        ("lenet-5", (1, 8, 8), 10, {"padding": 0}, "input_shape", (1, 8, 8)),
        ("lenet-5", (1, 3, 3), 10, {}, "input_shape", (1, 3, 3)),
        ("lenet-5", (1, 28, 28), 10, {"padding": -1}, "padding", -1),
        ("convnet", (3, 7, 32), 10, {}, "input_shape", (3, 7, 32)),
        ("convnet", (3, 32, 32), 10, {"groups": 3}, "groups", 3),
        ("convnet-64", (3, 8, 8), 10, {}, "input_shape", (3, 8, 8)),
        ("alexnet", (3, 8, 8), 10, {}, "input_shape", (3, 8, 8)),
        ("lenet-zhu", (784,), 10, {}, "input_shape", (784,)),
        ("mlp-2", (), 10, {}, "input_shape", ()),
        ("mlp-2", (0,), 10, {}, "input_shape", (0,)),
        ("mlp-2", (4,), 0, {}, "classes", 0),
        ("mlp-2", (4,), 2, {"dropout": 1.0}, "dropout", 1.0),
        ("mlp-2", (4,), 2, {"hidden": 0}, "hidden", 0),
        ("mlp-2", (4,), 2, {"depth": 3}, "depth", 3),
    ],
)
def test_an_option_or_shape_that_cannot_be_used_is_refused(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    options: dict[str, Any],
    field: str,
    value: object,
) -> None:
    with refuses(field, value=value):
        make_model(name, shape, classes, **options)


def test_alexnet_smallest_image() -> None:
    assert make_model("alexnet", (3, 15, 15), 10).eval()(torch.zeros(1, 3, 15, 15)).shape == (1, 10)
