"""Local SGD against a plain loop over clients that shares nothing with it but the order of the examples."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedveil import ArrayClients, Task
from fedveil.streams import ClientStreams
from fedveil.training import linear_sgd
from fedveil.training.batching import LastBatch, batch_sizes
from fedveil.training.local_sgd import Trained, local_sgd, scheduled_lr
from fedveil.tree import Params, expand, with_axis
from tests.contract.federation import make_clients

SIZES = (5, 9, 0, 12, 7)
STREAMS = ClientStreams(4, 2, (0, 1, 2, 3, 4))


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def generic() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)).double()


def plain(
    make: object,
    start: Params,
    client: int,
    *,
    batch_size: int,
    epochs: int,
    steps: int | None,
    momentum: float,
    weight_decay: float,
    proximal: float,
    correction: Params | None,
    last_batch: str,
) -> Params:
    assert callable(make)
    data = make_clients(SIZES)
    x, y = data.x[data.parts[client]], data.y[data.parts[client]]
    model = make()
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, weight_decay=weight_decay)
    stream = STREAMS.rows([client]).of_round("batches")[0]
    taken = 0
    passes = epochs if steps is None else 1000
    for _ in range(passes if len(y) else 0):
        order = torch.from_numpy(stream.permutation(len(y)))
        parts = list(order.split(batch_size))
        short = len(parts[-1])
        if last_batch == "drop" and len(parts) > 1 and short < batch_size:
            parts.pop()
        if last_batch == "merge" and len(parts) > 1 and short < batch_size / 2:
            parts[-2:] = [torch.cat(parts[-2:])]
        for index in parts:
            if steps is not None and taken == steps:
                return dict(model.state_dict())
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                parameter.grad += proximal * (parameter.detach() - start[name])
                if correction is not None:
                    parameter.grad += correction[name][client]
            optimizer.step()
            taken += 1
    return dict(model.state_dict())


@pytest.mark.parametrize("make", [linear, generic])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.1, "proximal": 0.3},
        {"momentum": 0.5, "weight_decay": 0.1, "proximal": 0.3, "correct": True},
        {"correct": True},
        {"steps": 7},
        {"batch_size": 100},
        {"last_batch": "keep"},
        {"last_batch": "drop", "momentum": 0.5},
        {"last_batch": "merge", "steps": 5},
    ],
)
def test_it_is_what_a_plain_loop_computes(make: object, options: dict[str, Any]) -> None:
    assert callable(make)
    task = Task(make)
    usual = {
        "momentum": 0.0,
        "weight_decay": 0.0,
        "proximal": 0.0,
        "batch_size": 4,
        "epochs": 3,
        "steps": None,
        "last_batch": "merge",
    }
    settings: dict[str, Any] = usual | options
    correct = settings.pop("correct", False)
    start = task.init(1)
    generator = torch.Generator().manual_seed(0)
    correction = (
        {
            n: torch.randn(5, *leaf.shape, generator=generator, dtype=torch.float64)
            for n, leaf in start.items()
        }
        if correct
        else None
    )
    clients = make_clients(SIZES)
    data = clients.load(range(5))
    got = local_sgd(task, with_axis(start), data, STREAMS, lr=0.05, correction=correction, **settings)
    for client in range(5):
        expected = plain(make, start, client, correction=correction, **settings)
        for name in start:
            assert torch.allclose(got.params[name][client], expected[name], atol=1e-11)
    width, steps = settings["batch_size"], settings["steps"]
    for client, n in enumerate(SIZES):
        whole = 3 * len(batch_sizes(n, width, settings["last_batch"]))
        assert int(got.steps[client]) == (whole if steps is None or n == 0 else steps)


@pytest.mark.parametrize(
    ("last_batch", "expected"),
    [("keep", [64] * 7 + [2]), ("drop", [64] * 7), ("merge", [64] * 6 + [66])],
)
def test_what_becomes_of_a_remainder(last_batch: LastBatch, expected: list[int]) -> None:
    assert batch_sizes(450, 64, last_batch) == expected
    assert batch_sizes(448, 64, last_batch) == [64] * 7
    assert batch_sizes(3, 64, last_batch) == [3]
    assert batch_sizes(0, 64, last_batch) == []


def test_only_a_remainder_below_half_a_batch_is_merged() -> None:
    assert batch_sizes(95, 64, "merge") == [95]
    assert batch_sizes(96, 64, "merge") == [64, 32]


def test_the_tracked_loss_is_the_mean_over_an_epoch_summed_over_epochs() -> None:
    task = Task(linear)
    clients = make_clients(SIZES)
    start = with_axis(task.init(0))
    data = clients.load([0, 1, 3])
    streams = ClientStreams(0, 1, (0, 1, 3))
    tiny = local_sgd(task, start, data, streams, lr=1e-12, batch_size=4, epochs=2, track_loss=True)
    assert tiny.loss is not None
    still = task.loss(expand(start, 3), data.everything())
    assert torch.allclose(tiny.loss, 2 * still, atol=1e-9)


def test_cosine_falls_from_the_first_round_to_the_floor() -> None:
    rates = [scheduled_lr(0.1, "cosine", t, 10, floor=0.01) for t in range(1, 11)]
    assert rates[0] == 0.1
    assert all(a > b for a, b in itertools.pairwise(rates))
    assert rates[-1] > 0.01
    assert scheduled_lr(0.1, "constant", 9, 10) == 0.1


def deep() -> nn.Module:
    """Every kind of step that a network of linear layers may have, dropout at both ends of an activation."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(6, 64),
        nn.Dropout(0.5),
        nn.ReLU(),
        nn.Linear(64, 8, bias=False),
        nn.Sigmoid(),
        nn.Dropout(0.25),
        nn.Linear(8, 7),
        nn.Tanh(),
        nn.Linear(7, 3),
    ).double()


def sgd_of(task: Task, trainable: set[str] | None = None) -> Trained:
    data = make_clients(SIZES).load(range(5))
    return local_sgd(
        task, with_axis(task.init(2)), data, STREAMS, lr=0.05, batch_size=4, epochs=3, trainable=trainable
    )


@pytest.mark.parametrize("make", [linear, deep])
@pytest.mark.parametrize("trainable", [None, {"5.weight", "1.weight"}])
def test_closed_form_steps_are_those_of_automatic_differentiation(
    make: Callable[[], nn.Module], trainable: set[str] | None
) -> None:
    task, generic_task = Task(make), Task(make)
    generic_task.linear = None
    names = None if trainable is None else trainable & set(task.init(0))
    got, expected = sgd_of(task, names), sgd_of(generic_task, names)
    for name in expected.params:
        assert torch.allclose(got.params[name], expected.params[name], atol=1e-12)


@pytest.mark.parametrize("cache", [1, 2048])
def test_the_size_of_a_block_changes_nothing(cache: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sgd_of(Task(deep))
    monkeypatch.setattr(linear_sgd, "_CACHE", cache)
    parts = sgd_of(Task(deep))
    assert torch.equal(parts.steps, whole.steps)
    for name in whole.params:
        assert torch.allclose(parts.params[name], whole.params[name], atol=1e-12)


@pytest.mark.parametrize("make", [linear, generic])
@pytest.mark.parametrize("sizes", [(6, 6, 6), (6, 4, 5)], ids=["one size", "several sizes"])
def test_one_batch_of_all_examples_is_the_full_gradient_in_any_order(
    make: Callable[[], nn.Module], sizes: tuple[int, ...]
) -> None:
    task = Task(make)
    start = task.init(0)
    clients = make_clients(sizes)
    turned = ArrayClients(clients.x, clients.y, [part.flip(0) for part in clients.parts])
    for data in (clients, turned):
        trained = local_sgd(
            task,
            with_axis(start),
            data.load([0, 1, 2]),
            STREAMS.rows([0, 1, 2]),
            lr=0.5,
            batch_size=6,
            epochs=3,
        )
        for client, part in enumerate(clients.parts):
            model = make()
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(clients.x[part]), clients.y[part]).backward()
                optimizer.step()
            for name, leaf in model.state_dict().items():
                torch.testing.assert_close(trained.params[name][client], leaf, rtol=1e-10, atol=1e-12)
