"""FedAvg, FedProx, SCAFFOLD and FedSGD against their algorithms as plain loops over the clients of every round."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from fedveil import Plan, Task, run
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.fedprox import FedProx
from fedveil.methods.fedsgd import FedSGD
from fedveil.methods.method import AnyMethod
from fedveil.methods.scaffold import Scaffold
from fedveil.privacy.sampling import draw_cohort
from fedveil.streams import ClientStreams
from fedveil.tree import Params
from tests.contract.federation import make_clients

SIZES = (5, 9, 3, 12)
PLAN = Plan(4, 2, "fixed", 4)  # eight draws of four clients: some participate twice
LR = 0.2


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def gradient(w: Params, client: int, places: Tensor | None = None) -> Params:
    """Of the mean loss on a client's examples, or on those at these places."""
    data = make_clients(SIZES)
    index = data.parts[client] if places is None else data.parts[client][places]
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
    scores = torch.func.functional_call(network(), leaves, (data.x[index],))
    loss = nn.functional.cross_entropy(scores, data.y[index])
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def walked(start: Params, client: int, proximal: float = 0.0, drift: Params | None = None) -> Params:
    """Three full-batch steps from `start`."""
    w = start
    for _ in range(3):
        g = gradient(w, client)
        pull = {name: proximal * (leaf - start[name]) for name, leaf in w.items()}
        more = dict.fromkeys(w, 0.0) if drift is None else drift
        w = {name: leaf - LR * (g[name] + pull[name] + more[name]) for name, leaf in w.items()}
    return w


def mean(trees: list[Params], weights: Sequence[float]) -> Params:
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    return {
        name: torch.tensordot(shares, torch.stack([tree[name] for tree in trees]), 1) for name in trees[0]
    }


def cohorts() -> Iterator[tuple[int, tuple[int, ...]]]:
    return ((t, draw_cohort(PLAN, 0, t)) for t in range(1, PLAN.rounds + 1))


def check(method: AnyMethod, expected: Params) -> None:
    clients = make_clients(SIZES)
    found = run(Task(network), clients, method, rounds=PLAN.rounds, cohort=PLAN.cohort, workers=1).model
    for name, leaf in expected.items():
        torch.testing.assert_close(found[name], leaf, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
@pytest.mark.parametrize("proximal", [0.0, 0.7])
def test_clients_models_are_averaged_by_their_sizes(
    weighting: Literal["size", "uniform"], proximal: float
) -> None:
    """FedAvg's and FedProx's rounds: F_k(w) + mu/2 |w - w_t|^2 from w_t, then the mean."""
    w = Task(network).init(0)
    for _, cohort in cohorts():
        trained = [walked(w, k, proximal) for k in cohort]
        w = mean(trained, [SIZES[k] if weighting == "size" else 1 for k in cohort])
    fields: dict[str, Any] = {"lr": LR, "epochs": 3, "batch_size": 16, "weighting": weighting}
    check(FedProx(proximal=proximal, **fields), w)
    if proximal == 0:
        check(FedAvg(**fields), w)


def test_scaffold_corrects_every_step_and_keeps_its_controls() -> None:
    """Algorithm 1 with option II; c moves by the share of all clients that took part."""
    w = Task(network).init(0)
    zero = {name: torch.zeros_like(leaf) for name, leaf in w.items()}
    c, own = zero, dict.fromkeys(range(4), zero)
    for _, cohort in cohorts():
        moves, changes = [], []
        for k in cohort:
            drift = {name: c[name] - own[k][name] for name in c}
            y = walked(w, k, drift=drift)
            new = {name: own[k][name] - c[name] + (w[name] - y[name]) / (3 * LR) for name in c}
            moves.append({name: y[name] - w[name] for name in w})
            changes.append({name: new[name] - own[k][name] for name in c})
            own[k] = new
        move, change = mean(moves, [1, 1]), mean(changes, [1, 1])
        w = {name: leaf + 0.5 * move[name] for name, leaf in w.items()}
        c = {name: leaf + 2 / 4 * change[name] for name, leaf in c.items()}
    check(Scaffold(lr=LR, epochs=3, batch_size=16, server_lr=0.5), w)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_fedsgd_takes_the_servers_step_batch_by_batch(weighting: Literal["size", "uniform"]) -> None:
    """Whoever has run out of examples counts nothing by size, and as a gradient of zero otherwise."""
    w = Task(network).init(0)
    for t, cohort in cohorts():
        orders = [
            torch.from_numpy(stream.permutation(SIZES[k]))
            for k, stream in zip(cohort, ClientStreams(0, t, cohort).of_round("batches"), strict=True)
        ]
        zero = {name: torch.zeros_like(leaf) for name, leaf in w.items()}
        for begin in range(0, max(SIZES), 4):
            batches = [order[begin : begin + 4] for order in orders]
            sizes = [len(batch) if weighting == "size" else 1 for batch in batches]
            parts = [
                gradient(w, k, batch) if len(batch) else zero
                for k, batch in zip(cohort, batches, strict=True)
            ]
            if sum(sizes) == 0:
                continue
            step = mean(parts, sizes)
            lr = LR * (1 + math.cos(math.pi * (t - 1) / PLAN.rounds)) / 2
            w = {name: leaf - lr * step[name] for name, leaf in w.items()}
    check(FedSGD(lr=LR, batch_size=4, lr_schedule="cosine", weighting=weighting, last_batch="keep"), w)
