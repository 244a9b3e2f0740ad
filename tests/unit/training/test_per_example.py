"""Per-example gradients against one backward pass per example, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.errors import DivergedError
from fedveil.models.registry import make_model
from fedveil.privacy.clipping import hidden_divergence
from fedveil.streams import named_stream
from fedveil.task import Task
from fedveil.training import layer_gradients, per_example
from fedveil.training.per_example import MARGIN, clipped_gradient_sum, cross_entropy, per_example_gradients
from fedveil.tree import Params
from tests.refusals import refuses


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(torch.tanh(self.inner(torch.tanh(self.inner(x)))))
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


class ChangedInPlace(nn.Module):
    """The output of a layer is overwritten, as some published networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(torch.tanh(self.first(x)))
        out: Tensor = self.last(torch.tanh(hidden.mul_(2.0)))
        return out


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 3)
        self.idle = nn.Linear(6, 3)
        self.ignored = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.ignored(x)
        out: Tensor = self.used(x)
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.output = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        out: Tensor = self.output(hidden[:, -1])
        return out


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(4, 5)
        self.output = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(torch.tanh(self.words(x)).mean(1))
        return out


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: make_model("mlp-2", (1, 4, 4), 5), (1, 4, 4)),
    "logistic": (lambda: make_model("logistic", (7,), 5), (7,)),
    "lenet-5": (lambda: make_model("lenet-5", (2, 16, 16), 5, hidden=20), (2, 16, 16)),
    "lenet-zhu": (lambda: make_model("lenet-zhu", (1, 9, 11), 5), (1, 9, 11)),
    "convnet": (lambda: make_model("convnet", (3, 8, 8), 5, width=6), (3, 8, 8)),
    "grouped norm": (lambda: make_model("convnet", (1, 8, 8), 5, width=6, groups=2), (1, 8, 8)),
    "odd convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0), bias=False),
            nn.Tanh(),
            nn.Flatten(),
            nn.LazyLinear(3),
        ),
        (2, 7, 6),
    ),
    "in-place activation": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.GroupNorm(2, 8), nn.Linear(8, 3)),
        (6,),
    ),
    "sequence": (Sequence, (6, 4)),
    "unused": (Unused, (6,)),
    "used twice": (UsedTwice, (6,)),
    "tied": (Tied, (6,)),
    "changed in place": (ChangedInPlace, (6,)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), (6,)),
    "grouped and dilated": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, groups=2),
            nn.Tanh(),
            nn.Conv2d(4, 3, 2, dilation=2),
            nn.Flatten(),
            nn.LazyLinear(3),
        ),
        (2, 7, 7),
    ),
    "recurrent": (Recurrent, (6, 4)),
}
BY_VMAP = {"used twice", "tied", "changed in place", "layer norm", "grouped and dilated", "recurrent"}


def case(name: str, examples: int = 6) -> tuple[nn.Module, Params, Tensor, Tensor]:
    build, shape = CASES[name]
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = build().double()
        x = torch.randn(examples, *shape, dtype=torch.float64, generator=generator)
        module.eval()(x)
    params = {
        key: leaf.detach() + 0.1 * torch.randn(leaf.shape, dtype=torch.float64, generator=generator)
        for key, leaf in module.named_parameters()
    }
    return module.train(), params, x, torch.arange(examples) % 3


def by_loop(module: nn.Module, params: Params, x: Tensor, y: Tensor) -> Params:
    """One ordinary backward pass per example, without dropout."""
    module.eval()
    rows = []
    for i in range(x.shape[0]):
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
        value = cross_entropy(functional_call(module, leaves, (x[i : i + 1],)), y[i : i + 1]).sum()
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
        rows.append(dict(zip(leaves, grads, strict=True)))
    module.train()
    return {name: torch.stack([row[name] for row in rows]) for name in params}


def norms_of(gradients: Params) -> Tensor:
    return torch.stack([leaf.flatten(1).square().sum(1) for leaf in gradients.values()]).sum(0).sqrt()


def close(a: Params, b: Params, tolerance: float = 1e-10) -> None:
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_equals_the_loop(name: str) -> None:
    module, params, x, y = case(name)
    close(per_example_gradients(module, params, x, y), by_loop(module, params, x, y))


def process_at_once(examples: int, patch: pytest.MonkeyPatch) -> None:
    """Process so many examples at a time, as if memory had room for no more."""
    patch.setattr(per_example, "_micro_batch", lambda *_: examples)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("at_once", [1000, 1, 4])
def test_clipped_sum_equals_the_loop(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    process_at_once(at_once, monkeypatch)
    module, params, x, y = case(name)
    gradients = by_loop(module, params, x, y)
    norms = norms_of(gradients)
    clip = float(norms.median())  # some are clipped, some are not
    factors = (clip * (1 - MARGIN) / norms).clamp_max(1.0)
    expected = {key: torch.einsum("b,b...->...", factors, leaf) for key, leaf in gradients.items()}
    total, found = clipped_gradient_sum(module, params, x, y, clip)
    close(total, expected)
    torch.testing.assert_close(found, norms, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_book_keeping_is_used_where_it_can_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = per_example._by_vmap

    def counted(*arguments: object) -> object:
        calls.append(name)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(per_example, "_by_vmap", counted)
    module, params, x, y = case(name)
    clipped_gradient_sum(module, params, x, y, 1.0)
    assert bool(calls) is (name in BY_VMAP)


def test_channels_last_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_gradients, "_UNFOLDED_BYTES", 1)  # one example is unfolded at a time
    module, params, x, y = case("lenet-5")
    expected = clipped_gradient_sum(module, params, x, y, 0.5)
    module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    turned = {
        name: leaf.contiguous(memory_format=torch.channels_last) if leaf.dim() == 4 else leaf
        for name, leaf in params.items()
    }
    total, norms = clipped_gradient_sum(
        module, turned, x.contiguous(memory_format=torch.channels_last), y, 0.5
    )
    close(total, expected[0])
    torch.testing.assert_close(norms, expected[1])


@pytest.mark.parametrize("name", ["mlp", "lenet-5", "layer norm"])
def test_infinite_clip_is_the_gradient_of_the_summed_loss(name: str) -> None:
    module, params, x, y = case(name)
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in params.items()}
    value = cross_entropy(functional_call(module.eval(), leaves, (x,)), y).sum()
    grads = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
    close(clipped_gradient_sum(module, params, x, y, math.inf)[0], grads)


@pytest.mark.parametrize("name", ["mlp", "lenet-5", "convnet", "layer norm"])
@pytest.mark.parametrize("scale", [1e-42, 1e-20, 1.0, 1e12, 1e30])
def test_no_example_adds_more_than_the_clip(name: str, scale: float) -> None:
    """In float32, for gradients from denormal to huge."""
    module, params, x, y = case(name, examples=3)
    module, x = module.float(), x.float()
    params = {key: leaf.float() for key, leaf in params.items()}

    def scaled(outputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(outputs, labels) * scale

    for clip in (1.0, 1e-3):
        for i in range(3):
            total, norms = clipped_gradient_sum(module, params, x[i : i + 1], y[i : i + 1], clip, loss=scaled)
            size = float(torch.cat([leaf.flatten().double() for leaf in total.values()]).norm())
            assert math.isfinite(float(norms))
            assert size <= clip * (1 + 1e-6)
            assert size <= float(norms) * (1 + 1e-6 if scale >= 1e-20 else 1.01)  # denormals have few digits
            if scale >= 1e12:
                assert size >= clip * (1 - 1e-4)


@pytest.mark.parametrize("name", ["mlp", "lenet-5", "layer norm"])
def test_zero_gradients_stay_zero(name: str) -> None:
    module, params, x, y = case(name)
    total, norms = clipped_gradient_sum(
        module, params, x, y, 1.0, loss=lambda o, t: 0.0 * cross_entropy(o, t)
    )
    assert torch.equal(norms, torch.zeros(6, dtype=torch.float64))
    assert all(torch.equal(leaf, torch.zeros_like(leaf)) for leaf in total.values())


def test_a_loss_without_parameters_has_no_gradient() -> None:
    module, params, x, y = case("mlp")
    total, norms = clipped_gradient_sum(module, params, x, y, 1.0, loss=lambda o, _: o.detach().sum(1))
    assert float(norms.sum()) == 0
    assert all(torch.count_nonzero(leaf) == 0 for leaf in total.values())


@pytest.mark.parametrize("name", ["mlp", "lenet-5", "layer norm"])
def test_a_gradient_that_is_not_finite_is_named(name: str) -> None:
    module, params, x, y = case(name)
    x[4] = math.nan
    with refuses("examples", DivergedError, value=[4]):
        clipped_gradient_sum(module, params, x, y, 1.0)


@pytest.mark.parametrize("name", ["mlp", "lenet-5", "layer norm"])
def test_a_gradient_that_is_not_finite_counts_as_zero_where_an_error_would_disclose_it(name: str) -> None:
    module, params, x, y = case(name)
    others = torch.arange(6) != 4
    expected, norms = clipped_gradient_sum(module, params, x[others], y[others], 0.3)
    x[4] = math.nan
    with hidden_divergence() as happened:
        total, found = clipped_gradient_sum(module, params, x, y, 0.3)
    close(total, expected)
    torch.testing.assert_close(found[others], norms)
    assert float(found[4]) == 0
    assert happened == [1]


@pytest.mark.parametrize("name", ["mlp", "lenet-5", "layer norm"])
def test_masked_examples_add_nothing_even_if_they_are_not_numbers(name: str) -> None:
    module, params, x, y = case(name)
    mask = torch.tensor([True, False, True, True, False, True])
    expected, norms = clipped_gradient_sum(module, params, x[mask], y[mask], 0.3)
    x[~mask] = math.nan
    total, found = clipped_gradient_sum(module, params, x, y, 0.3, mask=mask)
    close(total, expected)
    torch.testing.assert_close(found[mask], norms)
    assert float(found[~mask].abs().sum()) == 0


def test_an_empty_batch_has_a_zero_sum() -> None:
    module, params, x, y = case("lenet-5")
    for rows, mask in ((0, None), (6, torch.zeros(6, dtype=torch.bool))):
        total, norms = clipped_gradient_sum(module, params, x[:rows], y[:rows], 1.0, mask=mask)
        assert norms.shape == (rows,)
        assert all(torch.count_nonzero(leaf) == 0 for leaf in total.values())
    gradients = per_example_gradients(module, params, x[:0], y[:0])
    assert all(leaf.shape == (0, *params[key].shape) for key, leaf in gradients.items())


def test_only_the_given_parameters_count() -> None:
    module, params, x, y = case("lenet-5")
    with torch.no_grad():
        for name, leaf in module.named_parameters():
            leaf.copy_(params[name])
    chosen = {name: params[name] for name in ("conv2.bias", "fc3.weight")}
    expected = {name: leaf for name, leaf in by_loop(module, params, x, y).items() if name in chosen}
    close(per_example_gradients(module, chosen, x, y), expected)
    _, norms = clipped_gradient_sum(module, chosen, x, y, 1.0)
    torch.testing.assert_close(norms, norms_of(expected), rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_the_module_is_left_as_it_was(name: str) -> None:
    module, params, x, y = case(name)
    before = {key: leaf.clone() for key, leaf in module.state_dict().items()}
    flags = [layer.training for layer in module.modules()]
    in_place = [getattr(layer, "inplace", None) for layer in module.modules()]
    given = {key: leaf.clone() for key, leaf in params.items()}
    random_state = torch.get_rng_state()
    clipped_gradient_sum(module, params, x, y, 1.0, dropout=named_stream(0, "dropout"))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(not layer._forward_hooks and not layer._backward_hooks for layer in module.modules())
    assert [layer.training for layer in module.modules()] == flags
    assert [getattr(layer, "inplace", None) for layer in module.modules()] == in_place
    assert all(leaf.grad is None for leaf in module.parameters())
    assert all(torch.equal(leaf, before[key]) for key, leaf in module.state_dict().items())
    assert all(torch.equal(leaf, given[key]) and not leaf.requires_grad for key, leaf in params.items())


def test_an_error_on_the_way_leaves_no_hook() -> None:
    module, params, x, y = case("mlp")
    with refuses("loss"):
        clipped_gradient_sum(module, params, x, y, 1.0, loss=nn.functional.cross_entropy)
    assert all(not layer._forward_hooks for layer in module.modules())
    assert all(layer.training for layer in module.modules())


class Slow(nn.Module):
    """The same network with a layer that the closed forms do not know."""

    def __init__(self, inner: nn.Sequential) -> None:
        super().__init__()
        self.inner = inner
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + self.shift
        return out


def test_dropout_masks_depend_on_the_stream_only(monkeypatch: pytest.MonkeyPatch) -> None:
    module, params, x, y = case("mlp")
    assert isinstance(module, nn.Sequential)
    draws = torch.from_numpy(named_stream(3, "dropout").random(6 * 64)).reshape(6, 64)
    mask = (draws >= 0.5).double() * 2.0
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    hidden = torch.relu(x.flatten(1) @ leaves["hidden.weight"].mT * mask)
    value = cross_entropy(hidden @ leaves["output.weight"].mT, y).sum()
    expected = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
    for at_once in (1000, 1, 4):
        process_at_once(at_once, monkeypatch)
        stream = named_stream(3, "dropout")
        total, _ = clipped_gradient_sum(module, params, x, y, math.inf, dropout=stream)
        close(total, expected)
        slow_params = {f"inner.{name}": leaf for name, leaf in params.items()}
        slow_params["shift"] = torch.zeros(1, dtype=torch.float64)
        stream = named_stream(3, "dropout")
        slow, _ = clipped_gradient_sum(Slow(module), slow_params, x, y, math.inf, dropout=stream)
        close({name: slow[f"inner.{name}"] for name in params}, expected)
    owned, _ = clipped_gradient_sum(
        Task(module).module, params, x, y, math.inf, dropout=named_stream(3, "dropout")
    )
    close(owned, expected)  # a task's dropout layers, which wait for masks, take these


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_clip_must_be_positive(clip: float) -> None:
    module, params, x, y = case("mlp")
    with refuses("clip"):
        clipped_gradient_sum(module, params, x, y, clip)


def test_bad_input_is_refused_with_a_remedy() -> None:
    module, params, x, y = case("mlp")
    with refuses("params"):
        clipped_gradient_sum(module, params | {"more": torch.zeros(1)}, x, y, 1.0)
    with refuses("params"):
        clipped_gradient_sum(module, params | {"output.weight": torch.zeros(1)}, x, y, 1.0)
    with refuses("y"):
        clipped_gradient_sum(module, params, x, y[:2], 1.0)
    with refuses("mask"):
        clipped_gradient_sum(module, params, x, y, 1.0, mask=torch.ones(2, dtype=torch.bool))
    mixing = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    leaves = {name: leaf.detach() for name, leaf in mixing.named_parameters()}
    with refuses("model"):
        clipped_gradient_sum(mixing, leaves, torch.zeros(2, 6), torch.zeros(2, dtype=torch.long), 1.0)
    odd = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Dropout2d(), nn.Flatten())
    leaves = {name: leaf.detach() for name, leaf in odd.named_parameters()}
    images = torch.zeros(2, 1, 2, 2)
    with refuses("model"):
        clipped_gradient_sum(odd, leaves, images, y[:2], 1.0, dropout=named_stream(0, "dropout"))
