"""FedSGD, FedAvg, FedProx and SCAFFOLD against their algorithms written out, cohort by cohort.

Clients of unequal size hold one batch each, so that their order within it does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import pytest
import torch
from torch import Tensor, nn

from fedveil import ArrayClients, At, Plan, Task
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.fedprox import FedProx
from fedveil.methods.fedsgd import FedSGD
from fedveil.methods.method import AnyMethod
from fedveil.methods.scaffold import Scaffold
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.tree import Params, State, add, concatenate, rows, scale, sub, zeros_like

SIZES = (4, 9, 2, 7)
COHORTS = ((0, 1), (1, 3), (0, 2, 3))
EPOCHS, LR = 3, 0.3


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def examples() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(n, 6, generator=generator).double(), torch.randint(0, 3, (n,), generator=generator))
        for n in SIZES
    ]


def gradient(params: Params, x: Tensor, y: Tensor) -> Params:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    scores = torch.func.functional_call(network(), leaves, (x,))
    found = torch.autograd.grad(nn.functional.cross_entropy(scores, y), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def mean_of(models: Sequence[Params], weights: Sequence[float]) -> Params:
    total = zeros_like(models[0])
    for model, weight in zip(models, weights, strict=True):
        total = add(total, model, scale=weight / sum(weights))
    return total


def models_of(method: AnyMethod) -> Iterator[Params]:
    """The server's model after each cohort."""
    task, clients = Task(network), ArrayClients.from_arrays(examples())
    plan = Plan(len(SIZES), 2, "fixed", len(COHORTS), min(SIZES), max(SIZES))
    server = method.init_server(task.init(0), plan)
    held: dict[int, State] = {}
    for number, cohort in zip(count(1), COHORTS, strict=False):
        at = At(plan, number)
        data, streams = clients.load(cohort), ClientStreams(0, number, tuple(cohort))
        for row, client in enumerate(cohort):
            if client not in held:
                held[client] = method.init_client(task, data.rows([row]), streams.rows([row]))
        state = concatenate([held[client] for client in cohort]) if held[cohort[0]] else {}
        down = method.broadcast(at, server, cohort)
        up, after = method.client_update(task, at, down, data, state, streams)
        held |= {client: rows(after, [row]) for row, client in enumerate(cohort)}
        server = method.server_update(task, at, server, cohort, up, ServerStreams(0, number))
        yield method.model(server)


def same(found: Iterator[Params], expected: Sequence[Params]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_fedavg_and_fedprox_average_what_clients_reach(weighting: str, mu: float) -> None:
    data, w = examples(), Task(network).init(0)
    expected: list[Params] = []
    for cohort in COHORTS:
        reached = []
        for client in cohort:
            own = w
            for _ in range(EPOCHS):
                pulled = add(gradient(own, *data[client]), sub(own, w), scale=mu)
                own = add(own, pulled, scale=-LR)
            reached.append(own)
        w = mean_of(reached, [SIZES[client] if weighting == "size" else 1 for client in cohort])
        expected.append(w)
    fields = {"lr": LR, "epochs": EPOCHS, "batch_size": 9, "weighting": weighting}
    same(models_of(FedProx(proximal=mu, **fields)), expected)  # type: ignore[arg-type]
    if mu == 0:
        same(models_of(FedAvg(**fields)), expected)  # type: ignore[arg-type]


def test_fedsgd_is_one_step_on_the_examples_of_the_cohort() -> None:
    data, w = examples(), Task(network).init(0)
    expected: list[Params] = []
    for cohort in COHORTS:
        x, y = (torch.cat([data[client][part] for client in cohort]) for part in (0, 1))
        w = add(w, gradient(w, x, y), scale=-LR)
        expected.append(w)
    same(models_of(FedSGD(lr=LR)), expected)


def test_scaffold_is_algorithm_1_with_option_2() -> None:
    """Lines 7 to 17; who did not take part keeps its c_i, and c moves by their share of all clients."""
    server_lr = 0.8
    data, x = examples(), Task(network).init(0)
    c, own = zeros_like(x), {client: zeros_like(x) for client in range(len(SIZES))}
    expected: list[Params] = []
    for cohort in COHORTS:
        moves, changes = [], []
        for client in cohort:
            y = x
            for _ in range(EPOCHS):
                y = add(y, add(sub(gradient(y, *data[client]), own[client]), c), scale=-LR)
            fresh = add(sub(own[client], c), sub(x, y), scale=1 / (EPOCHS * LR))
            moves.append(sub(y, x))
            changes.append(sub(fresh, own[client]))
            own[client] = fresh
        alike = [1.0] * len(cohort)
        x = add(x, mean_of(moves, alike), scale=server_lr)
        c = add(c, scale(mean_of(changes, alike), len(cohort) / len(SIZES)))
        expected.append(x)
    method = Scaffold(lr=LR, epochs=EPOCHS, batch_size=9, server_lr=server_lr)
    same(models_of(method), expected)
