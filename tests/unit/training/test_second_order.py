"""Gradients that are differentiated by formula are those of autograd's double backward pass."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from fedveil.models.registry import make_model
from fedveil.training.second_order import Network
from fedveil.tree import Params

SHAPE = (2, 9, 8)
CLASSES = 4


def tailored() -> nn.Module:
    """Layers in every form that is recognised: strides, dilation, no bias, all activations."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            first=nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), bias=False),
            tanh=nn.Tanh(),
            second=nn.Conv2d(3, 4, 2, dilation=2),
            relu=nn.ReLU(),
            drop=nn.Dropout(0.5),
            flatten=nn.Flatten(),
            third=nn.Linear(4 * 3 * 5, 7),
            sigmoid=nn.Sigmoid(),
            last=nn.Linear(7, CLASSES, bias=False),
        )
    )


MODELS = {
    "lenet-zhu": lambda: make_model("lenet-zhu", SHAPE, CLASSES),
    "mlp-2": lambda: make_model("mlp-2", SHAPE, CLASSES),
    "logistic": lambda: make_model("logistic", SHAPE, CLASSES),
    "tailored": tailored,
}


def by_autograd(module: nn.Module, w: Params, x: Tensor, y: Tensor) -> Params:
    def loss(leaves: Params, xs: Tensor, ys: Tensor) -> Tensor:
        scores = functional_call(module, leaves, (xs,))
        if ys.is_floating_point():
            return -(ys * functional.log_softmax(scores, dim=-1)).sum(-1).mean()
        return functional.cross_entropy(scores, ys)

    found: Params = vmap(grad(loss), in_dims=(None, 0, 0))(w, x, y)
    return found


@pytest.mark.parametrize("soft", [False, True], ids=["classes", "soft labels"])
@pytest.mark.parametrize(("rows", "examples"), [(1, 1), (5, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_their_gradients_are_autograds(name: str, rows: int, examples: int, soft: bool) -> None:
    torch.manual_seed(0)
    module = MODELS[name]().eval().requires_grad_(False).double()
    network = Network.recognise(module)
    assert network is not None
    w = {key: leaf.detach() for key, leaf in module.named_parameters()}
    x = torch.randn(rows, examples, *SHAPE, dtype=torch.float64, requires_grad=True)
    y = torch.randint(CLASSES, (rows, examples))
    if soft:  # not normalised: then their sum counts, too
        y = torch.rand(rows, examples, CLASSES, dtype=torch.float64, requires_grad=True)
    wanted, found = by_autograd(module, w, x, y), network.gradients(w, x, y)
    assert found.keys() == wanted.keys()
    pulls = {key: torch.randn_like(leaf) for key, leaf in wanted.items()}
    of = (x, y) if soft else (x,)
    second = [
        torch.autograd.grad([held[key] for key in pulls], of, list(pulls.values()))
        for held in (wanted, found)
    ]
    for key, leaf in wanted.items():
        torch.testing.assert_close(found[key], leaf, rtol=1e-10, atol=1e-13)
    for ours, theirs in zip(second[1], second[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


def test_a_part_of_the_gradient_can_be_compared_alone() -> None:
    module = tailored().eval().requires_grad_(False).double()
    network = Network.recognise(module)
    assert network is not None
    w = {key: leaf.detach() for key, leaf in module.named_parameters()}
    x = torch.randn(2, 1, *SHAPE, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[0], [3]])
    ours, theirs = (
        torch.autograd.grad(held["second.weight"].square().sum(), x)[0]
        for held in (network.gradients(w, x, y), by_autograd(module, w, x, y))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * functional.relu(x)


def test_other_models_are_not_recognised() -> None:
    shared = nn.Linear(3, 3)
    others = [
        nn.Linear(3, 3),
        Twice(nn.Linear(3, 3)),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU()),
        nn.Sequential(nn.ReLU(), nn.Linear(3, 3)),
        nn.Sequential(shared, nn.ReLU(), shared),
        nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3)),
        nn.Sequential(nn.Flatten(0), nn.Linear(3, 3)),
        nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 2)),
        nn.Sequential(nn.Conv2d(1, 4, 3, padding="same"), nn.Flatten(), nn.Linear(4, 2)),
        nn.Sequential(nn.Conv2d(1, 4, 3, padding_mode="reflect", padding=1), nn.Flatten(), nn.Linear(4, 2)),
        make_model("lenet-5", (1, 16, 16), 3),
        make_model("convnet", (1, 16, 16), 3),
    ]
    for model in others:
        assert Network.recognise(model) is None
