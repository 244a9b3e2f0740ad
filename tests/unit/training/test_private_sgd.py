"""DP-SGD inside clients against a loop over single examples, in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from fedveil import ArrayClients, Task
from fedveil.privacy.mechanisms import gaussian
from fedveil.streams import ClientStreams
from fedveil.training.per_example import MARGIN
from fedveil.training.private_sgd import (
    PoissonBatches,
    StepStreams,
    accumulated_noise,
    private_sgd,
    private_steps,
)
from fedveil.tree import Params, expand, with_axis
from tests.contract.federation import Wrapped

SIZES = (9, 4, 13)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3, bias=False)).double()


def clients() -> ArrayClients:
    generator = torch.Generator().manual_seed(3)
    pairs = [
        (torch.randn(n, 6, generator=generator).double(), torch.randint(0, 3, (n,), generator=generator))
        for n in SIZES
    ]
    return ArrayClients.from_arrays(pairs)


def trained(task: Task, *, clip: float = 0.7, multiplier: float = 0.0, momentum: float = 0.0) -> Params:
    w = expand(with_axis(task.init(1)), 3)
    return private_sgd(
        task,
        w,
        clients().load(range(3)),
        StepStreams.of(ClientStreams(5, 1, (0, 1, 2))),
        PoissonBatches.of_epochs(SIZES, 4, 2),
        gaussian(clip, multiplier),
        lr=0.3,
        momentum=momentum,
        weight_decay=0.01,
    )


def by_loop(k: int, clip: float, momentum: float) -> Params:
    """Client k one example at a time, with torch's own gradients."""
    module = network()
    module.load_state_dict(Task(network).init(1))
    x, y, n = clients().load([k]).x[0], clients().load([k]).y[0], SIZES[k]
    batches = math.ceil(n / 4)
    stream = ClientStreams(5, 1, (0, 1, 2)).of_round("batches")[k]
    velocity = [torch.zeros_like(leaf) for leaf in module.parameters()]
    for _ in range(2 * batches):
        total = [torch.zeros_like(leaf) for leaf in module.parameters()]
        for i in np.flatnonzero(stream.random(n) < 1 / batches):
            loss = nn.functional.cross_entropy(module(x[i : i + 1]), y[i : i + 1])
            gradient = torch.autograd.grad(loss, list(module.parameters()))
            norm = float(torch.cat([g.flatten() for g in gradient]).norm())
            for sum_, g in zip(total, gradient, strict=True):
                sum_ += g * min(1.0, clip * (1 - MARGIN) / norm)
        with torch.no_grad():
            for leaf, g, v in zip(module.parameters(), total, velocity, strict=True):
                v.mul_(momentum).add_(g / (n / batches) + 0.01 * leaf)
                leaf.sub_(0.3 * v)
    return dict(module.state_dict())


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("clip", [0.7, math.inf])
def test_it_is_the_loop_over_examples(clip: float, momentum: float) -> None:
    found = trained(Task(network), clip=clip, momentum=momentum)
    for k in range(3):
        for name, leaf in by_loop(k, clip, momentum).items():
            torch.testing.assert_close(found[name][k], leaf, rtol=0, atol=2e-6)


def test_any_network_gives_what_the_closed_form_gives() -> None:
    closed, generic = (
        trained(Task(network), multiplier=0.4),
        trained(Task(lambda: Wrapped(network)), multiplier=0.4),
    )
    for name, leaf in closed.items():
        torch.testing.assert_close(leaf, generic[f"inner.{name}"], rtol=0, atol=2e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_noise_is_what_is_declared(momentum: float) -> None:
    """On examples without gradient only noise moves the model; its size is the one automatic lambdas rely on."""
    task = Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(400, 50, bias=False)).double())
    data = ArrayClients.from_arrays([(torch.zeros(40, 400).double(), torch.zeros(40, dtype=torch.long))])
    start = with_axis(task.init(0))
    after = private_sgd(
        task,
        start,
        data.load([0]),
        StepStreams.of(ClientStreams(0, 1, (0,))),
        PoissonBatches.of_epochs([40], 16, 3),
        gaussian(0.5, 2.0),
        lr=0.2,
        momentum=momentum,
    )
    moved = float((after["1.weight"] - start["1.weight"]).std())
    declared = accumulated_noise(0.2, 16, 3, momentum, 40) * 2.0 * 0.5
    if momentum:
        assert 0.8 * declared < moved <= declared  # the last steps are not repeated to the end
    else:
        assert moved == pytest.approx(declared, rel=0.02)


def test_a_client_without_examples_keeps_its_start() -> None:
    task = Task(network)
    parts = [torch.tensor([0, 1]), torch.tensor([])]
    data = ArrayClients(torch.zeros(2, 6).double(), torch.zeros(2, dtype=torch.long), parts)
    start, rng = expand(with_axis(task.init(0)), 2), StepStreams.of(ClientStreams(0, 1, (0, 1)))
    batches = PoissonBatches.of_epochs([2, 0], 4, 1)
    after = private_sgd(task, start, data.load([0, 1]), rng, batches, gaussian(1.0, 1.0), lr=0.1)
    assert torch.equal(after["1.weight"][1], start["1.weight"][1])
    assert not torch.equal(after["1.weight"][0], start["1.weight"][0])


def test_unequal_clients_are_charged_as_the_worst_of_them() -> None:
    assert private_steps(100, 100, 30, 2) == (8, 1 / 4)
    assert private_steps(50, 100, 30, 2) == (8, 1 / 2)


@pytest.mark.parametrize("dropout", [True, False])
def test_a_deployed_node_draws_its_dropout_in_secret(dropout: bool) -> None:
    """Masks go by place in the batch: to whoever knows them, one record less changes the gradients of all others."""

    def with_dropout() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double()

    task, found = Task(with_dropout), []
    for source in ("seeded", "seeded", "entropy", "entropy"):
        streams = ClientStreams(5, 1, (0,), noise_source=source)
        data = clients().load([0])
        own, batches = StepStreams.of(streams, dropout=dropout), PoissonBatches.of_epochs([9], 9, 1)
        w = private_sgd(task, with_axis(task.init(1)), data, own, batches, gaussian(0.7, 0.0), lr=0.3)
        found.append(w["1.weight"])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3]) != dropout
