from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedveil import Batch, Task
from fedveil.linear_network import LinearNetwork, cross_entropy_gradient, example_norms
from fedveil.streams import ClientStreams
from fedveil.tree import Params, norms
from tests.refusals import refuses
from tests.unit.example_gradients import example_gradients


def stack(task: Task, k: int) -> Params:
    return {name: torch.stack([task.init(seed)[name] for seed in range(k)]).double() for name in task.init(0)}


def batch(k: int = 3, b: int = 5, masked: bool = True, shape: tuple[int, ...] = (2, 4, 4)) -> Batch:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(k, b, dtype=torch.bool)
    if masked:
        mask[1, 2:] = False
    x = torch.randn(k, b, *shape, generator=generator, dtype=torch.float64)
    return Batch(x, torch.randint(0, 3, (k, b), generator=generator), mask if masked else None)


def linear_net() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(32, 6), nn.Tanh(), nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3, bias=False)
    ).double()


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    ).double()


@pytest.mark.parametrize("make", [linear_net, conv_net])
@pytest.mark.parametrize("masked", [True, False])
def test_gradients_equal_a_plain_autograd_loop(make: object, masked: bool) -> None:
    assert callable(make)
    task = Task(make)
    w, data = stack(task, 3), batch(masked=masked)
    got = task.grad(w, data)
    for k in range(3):
        model = make()
        model.load_state_dict({name: leaf[k] for name, leaf in w.items()})
        keep = slice(None) if data.mask is None else data.mask[k]
        nn.functional.cross_entropy(model(data.x[k][keep]), data.y[k][keep]).backward()
        for name, parameter in model.named_parameters():
            assert torch.allclose(got[name][k], parameter.grad, atol=1e-12)
        one = task.grad({n: leaf[k : k + 1] for n, leaf in w.items()}, _row(data, k))
        assert all(torch.allclose(one[name][0], got[name][k], atol=1e-12) for name in w)


def _row(data: Batch, k: int) -> Batch:
    return Batch(data.x[k : k + 1], data.y[k : k + 1], None if data.mask is None else data.mask[k : k + 1])


def test_example_norms_need_no_gradients() -> None:
    task = Task(linear_net)
    w, data = stack(task, 3), batch(masked=False)
    assert task.linear is not None
    scores, tape = task.linear.forward(w, data.x)
    factors = task.linear.backward(w, data.x, tape, cross_entropy_gradient(scores, data.y), None)
    each = example_gradients(task, w, data)
    direct = norms({name: leaf.flatten(0, 1) for name, leaf in each.items()}).reshape(3, 5)
    assert torch.allclose(example_norms(factors), direct, atol=1e-12)


def test_a_client_without_examples_has_gradient_zero() -> None:
    data = batch()
    assert data.mask is not None
    data.mask[0] = False
    gradient = Task(conv_net).grad(stack(Task(conv_net), 3), data)
    assert all(not leaf[0].any() for leaf in gradient.values())


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(4, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)),
    ],
)
def test_only_linear_networks_are_recognised(model: nn.Module) -> None:
    assert LinearNetwork.recognise(model) is None


def test_a_layer_used_twice_is_no_chain() -> None:
    layer = nn.Linear(2, 2)
    assert LinearNetwork.recognise(nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer)) is None


def test_batch_norm_is_refused_with_a_remedy() -> None:
    with refuses("model layer '1'"):
        Task(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)))


def test_the_seed_decides_the_start_and_leaves_the_global_generator_alone() -> None:
    task = Task(linear_net)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    a, b, c = task.init(1), task.init(1), task.init(2)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_a_model_given_as_it_is_starts_from_its_weights() -> None:
    model = linear_net()
    start = Task(model).init(3)
    assert all(torch.equal(start[name], leaf) for name, leaf in model.state_dict().items())


@pytest.mark.parametrize("p", [0.5, 0.2])
def test_dropout_masks_keep_the_mean_and_ignore_padding(p: float) -> None:
    task = Task(nn.Sequential(nn.Flatten(), nn.Linear(32, 400), nn.Dropout(p), nn.Linear(400, 3)))
    data = Batch(torch.zeros(2, 50, 32), torch.zeros(2, 50, dtype=torch.long))
    streams = ClientStreams(0, 1, (0, 1))
    masks = task.dropout_masks(data, streams.of_round("d"))
    assert masks is not None
    assert abs(float(masks[0].mean()) - 1) < 0.02
    assert set(np.unique(masks[0].numpy()).round(4)) == {0.0, round(1 / (1 - p), 4)}
    short = torch.ones(2, 50, dtype=torch.bool)
    short[1, 10:] = False
    padded = task.dropout_masks(Batch(data.x, data.y, short), streams.of_round("d"))
    assert padded is not None
    alone = Batch(data.x[1:, :10], data.y[1:, :10])
    single = task.dropout_masks(alone, streams.rows([1]).of_round("d"))
    assert single is not None
    assert torch.equal(padded[0][1, :10], single[0][0])


@pytest.mark.parametrize("rates", [(0.5, 0.5), (0.2, 0.5), (0.5,)])
@pytest.mark.parametrize("alike", [True, False])
def test_masks_drawn_ahead_are_those_of_one_step_after_the_other(
    rates: tuple[float, ...], alike: bool
) -> None:
    layers = [layer for p in rates for layer in (nn.Linear(32, 32), nn.Dropout(p))]
    task = Task(nn.Sequential(nn.Flatten(), *layers, nn.Linear(32, 3)))
    counts = np.array([[4, 4], [4, 4], [2, 2]] * 7) if alike else np.array([[4, 3], [4, 1], [3, 0]] * 7)
    streams = ClientStreams(0, 1, (0, 1))
    ahead = list(task.masks_of_steps(counts, 4, [32] * len(rates), torch.zeros(0), streams.of_round("d")))
    assert len(ahead) == len(counts)
    rng = streams.of_round("d")
    for masks, taken in zip(ahead, counts, strict=True):
        real = torch.arange(4) < torch.from_numpy(taken)[:, None]
        once = task.dropout_masks(Batch(torch.zeros(2, 4, 32), torch.zeros(2, 4), real), rng)
        assert once is not None
        assert all(torch.equal(a, b) for a, b in zip(masks, once, strict=True))


def test_without_streams_there_is_no_dropout() -> None:
    task = Task(nn.Sequential(nn.Flatten(), nn.Linear(32, 4), nn.Dropout(0.9), nn.Linear(4, 3)).double())
    w, data = stack(task, 3), batch(masked=False)
    assert torch.equal(task.loss(w, data), task.loss(w, data))
    noisy = task.loss(w, data, ClientStreams(0, 1, (0, 1, 2)).of_round("d"))
    assert not torch.equal(task.loss(w, data), noisy)
