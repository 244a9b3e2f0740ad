"""Distances of linear networks' gradients that form no gradient are those of autograd's double backward pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fedveil.attacks.inversion import matching
from fedveil.attacks.inversion.closed_form import variation_with_gradient
from fedveil.attacks.inversion.linear_matching import LinearMatching, linear_layers
from fedveil.attacks.inversion.matching import candidate_gradients, closed_gradient, cosine_distance
from fedveil.attacks.registry import make_attack
from fedveil.attacks.view import ServerView, image_box
from fedveil.methods.disclosure import Adaptation, LocalSteps
from fedveil.models.registry import make_model
from fedveil.streams import named_stream
from fedveil.task import Batch, Task
from fedveil.tree import Params, expand, with_axis

SHAPE = (1, 7, 6)
INPUTS = 42
CLASSES = 4


def deep() -> nn.Module:
    """Biases and none, all activations, two linear layers without an activation between them."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            flatten=nn.Flatten(),
            first=nn.Linear(INPUTS, 20),
            tanh=nn.Tanh(),
            second=nn.Linear(20, 18, bias=False),
            third=nn.Linear(18, 16),
            sigmoid=nn.Sigmoid(),
            drop=nn.Dropout(0.5),
            fourth=nn.Linear(16, 12),
            relu=nn.ReLU(),
            last=nn.Linear(12, CLASSES, bias=False),
        )
    )


def conv() -> nn.Module:
    return make_model("lenet-zhu", SHAPE, CLASSES)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp-2": lambda: make_model("mlp-2", SHAPE, CLASSES),
    "mlp-2 with bias": lambda: make_model("mlp-2", SHAPE, CLASSES, bias=True, hidden=30),
    "logistic": lambda: make_model("logistic", SHAPE, CLASSES),
    "deep": deep,
}


def make_view(
    make: Callable[[], nn.Module], targets: int, examples: int, shape: tuple[int, ...] = SHAPE
) -> ServerView:
    task = Task(make)
    params = {name: leaf.double() for name, leaf in task.init(1).items()}
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(targets, examples, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (targets, examples), generator=generator)
    observed = task.grad(expand(with_axis(params), targets), Batch(x, y))
    low, high = image_box((0.0,), (1.0,))
    box = (low.double(), high.double())
    return ServerView(task, params, observed, examples, shape, CLASSES, box, y)


def linear_matching(view: ServerView) -> LinearMatching:
    layers = linear_layers(view.task.module, SHAPE)
    assert layers is not None
    assert view.labels is not None
    return LinearMatching(layers, view.params, view.observed, view.labels)


def random_images(view: ServerView) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(
        view.targets, view.examples, *view.input_shape, generator=generator, dtype=torch.float64
    )


def by_double_backward(module: nn.Module, w: Params, wanted: Params, x: Tensor, y: Tensor) -> Tensor:
    """The distance of one row."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in w.items()}
    loss = functional.cross_entropy(functional_call(module, leaves, (x,)), y)
    found = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    flat = torch.cat([leaf.flatten() for leaf in found])
    return 1 - torch.cosine_similarity(flat, torch.cat([wanted[name].flatten() for name in w]), dim=0)


def each_by_double_backward(view: ServerView, x: Tensor) -> Tensor:
    assert view.labels is not None
    rows = [
        by_double_backward(
            view.task.module,
            view.params,
            {key: leaf[row] for key, leaf in view.observed.items()},
            x[row],
            view.labels[row],
        )
        for row in range(len(x))
    ]
    return torch.stack(rows)


@pytest.mark.parametrize(("rows", "examples"), [(1, 1), (5, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("name", MODELS)
def test_distance_and_its_gradient_are_those_of_a_double_backward_pass(
    name: str, rows: int, examples: int
) -> None:
    view = make_view(MODELS[name], rows, examples)
    x = random_images(view).requires_grad_()
    assert view.labels is not None
    wanted = each_by_double_backward(view, x)
    found = linear_matching(view)(x)
    pulls = torch.randn(rows, dtype=torch.float64)
    second = [torch.autograd.grad(held, x, pulls)[0] for held in (wanted, found)]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(second[1], second[0], rtol=1e-9, atol=1e-12)
    assert float(second[0].abs().max()) > 1e-6


@pytest.mark.parametrize(("rows", "examples"), [(1, 1), (3, 1), (2, 3)])
def test_distance_of_convolutions_is_that_of_a_double_backward_pass(rows: int, examples: int) -> None:
    view = make_view(conv, rows, examples)
    assert view.labels is not None
    distance = matching.upload_cosine(view, view.observed, view.labels, None)
    closed = closed_gradient(distance)
    assert closed is not None
    x = random_images(view).requires_grad_()
    found = distance(x)
    wanted = each_by_double_backward(view, x)
    second = [torch.autograd.grad(held.sum(), x)[0] for held in (wanted, found)]
    value, along = closed(x.detach())
    for ours in (value, found):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-12)
    for ours in (along, second[1]):
        torch.testing.assert_close(ours, second[0], rtol=1e-9, atol=1e-12)


class Largest(TorchDispatchMode):
    """Counts the numbers of the largest tensor that is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().nbytes() >= out.numel() * out.element_size():
            inputs = {held.untyped_storage().data_ptr() for held in args if isinstance(held, Tensor)}
            if out.untyped_storage().data_ptr() not in inputs:  # else a view
                self.numbers = max(self.numbers, out.numel())
        return out


@pytest.mark.parametrize(("rows", "examples"), [(1, 1), (3, 2)])
def test_no_tensor_is_as_large_as_the_weights(rows: int, examples: int) -> None:
    view = make_view(MODELS["mlp-2"], rows, examples)
    closed, x = linear_matching(view), random_images(view)
    with Largest() as largest:
        closed.with_gradient(x)
    assert rows * examples * INPUTS <= largest.numbers < view.params["hidden.weight"].numel()
    distance = cosine_distance(view.observed, Adaptation())
    assert view.labels is not None
    with Largest() as largest:  # the check does see a gradient
        distance(candidate_gradients(view, x, view.labels))
    assert largest.numbers >= view.params["hidden.weight"].numel()


def test_a_row_does_not_depend_on_the_others() -> None:
    view = make_view(deep, 3, 2)
    x = random_images(view)
    distance, along = linear_matching(view).with_gradient(x)
    assert view.labels is not None
    for t in range(3):
        observed = {name: leaf[t : t + 1] for name, leaf in view.observed.items()}
        alone = linear_matching(replace(view, observed=observed, labels=view.labels[t : t + 1]))
        for ours, theirs in zip(alone.with_gradient(x[t : t + 1]), (distance[t], along[t]), strict=True):
            torch.testing.assert_close(ours[0], theirs, rtol=1e-9, atol=1e-13)


def test_a_zero_gradient_has_distance_one() -> None:
    view = make_view(MODELS["mlp-2"], 2, 1)
    view = replace(view, params={name: torch.zeros_like(leaf) for name, leaf in view.params.items()})
    distance, along = linear_matching(view).with_gradient(random_images(view))
    assert distance.tolist() == [1.0, 1.0]
    assert bool(torch.isfinite(along).all())


def local_steps(epochs: int) -> LocalSteps:
    return LocalSteps(lr=0.1, batch_size=None, epochs=epochs)


def test_the_closed_form_is_used_where_it_holds_and_only_there() -> None:
    plain = make_view(MODELS["mlp-2"], 2, 1)
    drift = {name: 0.1 * leaf for name, leaf in plain.observed.items()}
    known = [plain, replace(plain, local=local_steps(1)), make_view(deep, 1, 3)]
    others = [
        replace(plain, local=local_steps(2)),
        replace(plain, local=local_steps(1), drift=drift),
        replace(plain, adaptation=Adaptation("mask")),
        replace(plain, adaptation=Adaptation("noise", 0.1)),
        make_view(lambda: make_model("lenet-5", (1, 16, 16), CLASSES), 2, 1, (1, 16, 16)),
    ]
    of_gradients = [
        make_view(conv, 2, 1),
        make_view(MODELS["logistic"], 2, 9),  # inner products of 9 examples are more numbers than gradients
    ]
    for view in [*known, *of_gradients, *others]:
        assert view.labels is not None
        x = random_images(view)
        distance = matching.upload_cosine(view, view.observed, view.labels, None)
        assert isinstance(distance, LinearMatching) == any(view is one for one in known)
        assert (closed_gradient(distance) is None) == any(view is one for one in others)
        wanted = cosine_distance(view.observed, view.adaptation)(candidate_gradients(view, x, view.labels))
        torch.testing.assert_close(distance(x), wanted, rtol=1e-9, atol=1e-12)


def test_other_networks_are_not_linear() -> None:
    linear = [nn.Flatten(), nn.Linear(INPUTS, 5)]
    for others in (
        nn.Sequential(nn.Linear(6, 5), nn.Flatten(), nn.Linear(35, CLASSES)),
        nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(INPUTS, CLASSES)),
        nn.Sequential(*linear, nn.Tanh(), nn.ReLU(), nn.Linear(5, CLASSES)),
        nn.Sequential(*linear, nn.GELU(), nn.Linear(5, CLASSES)),
        nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(INPUTS, CLASSES)),
        nn.Sequential(nn.Flatten(), nn.Linear(INPUTS + 1, CLASSES)),
    ):
        assert linear_layers(others, SHAPE) is None
    assert linear_layers(nn.Sequential(nn.Linear(6, CLASSES)), (6,)) is not None


@pytest.mark.parametrize(
    ("attack", "options"),
    [
        ("inverting-gradients", {"steps": 60, "restarts": 2}),
        ("inverting-gradients", {"steps": 60, "tv": 0.0, "signed": False}),
        ("gradinversion", {"steps": 60, "restarts": 2}),
    ],
)
@pytest.mark.parametrize(("model", "examples"), [("mlp-2 with bias", 1), ("mlp-2 with bias", 2), ("conv", 1)])
def test_attacks_find_what_they_find_through_autograd(
    attack: str, options: dict[str, Any], model: str, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = make_view(conv if model == "conv" else MODELS[model], 2, examples)
    closed = make_attack(attack, options)(view, named_stream(0, "attack"))
    monkeypatch.setattr(matching, "_without_a_graph", lambda *_: None)
    generic = make_attack(attack, options)(view, named_stream(0, "attack"))
    torch.testing.assert_close(closed.losses, generic.losses, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(closed.images, generic.images, rtol=0, atol=1e-5)
    assert float(closed.losses.min()) < 0.2


def test_variation_of_images_of_one_line() -> None:
    x = torch.tensor([[[[[0.0, 1.0, 5.0]]]]])
    value, along = variation_with_gradient(x)
    assert value.tolist() == [2.5]
    assert along.flatten().tolist() == [-0.5, 0.0, 0.5]
