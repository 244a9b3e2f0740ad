"""PPSGD and CENTAUR against their algorithms written out for one client, and how personal models are scored."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fedveil import ArrayClients, At, Plan, Task, run
from fedveil.evaluation.accuracy import evaluate
from fedveil.methods.centaur import Centaur
from fedveil.methods.ppsgd import PPSGD
from fedveil.methods.shared_model import Server
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.methods.user_level import NoisyModel
from fedveil.privacy.accounting import account
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.tree import Params, add, without_axis
from tests.refusals import refuses

PLAN = Plan(4, 2, "fixed", 3, 8, 8)
AT = At(PLAN, 1)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def clients(count: int = 4) -> ArrayClients:
    generator = torch.Generator().manual_seed(3)
    pairs = [
        (torch.randn(8, 6, generator=generator).double(), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(count)
    ]
    return ArrayClients.from_arrays(pairs)


def full_gradient(params: Params, x: torch.Tensor, y: torch.Tensor) -> Params:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    scores = torch.func.functional_call(network(), leaves, (x,))
    found = torch.autograd.grad(nn.functional.cross_entropy(scores, y), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def test_ppsgd_takes_joint_steps_on_both_parts() -> None:
    """Full batches: w and theta step along the same gradient at w + theta, each with its own step size."""
    method = PPSGD(lr=0.2, personal_lr=0.5, epochs=3, batch_size=8, noise_multiplier=0.0, clip=math.inf)
    task, data = Task(network), clients().load([0])
    server = method.init_server(task.init(0), PLAN)
    state = {name: 0.1 * torch.ones_like(leaf).unsqueeze(0) for name, leaf in server.params.items()}
    up, after = method.client_update(
        task, AT, method.broadcast(AT, server, [0]), data, state, ClientStreams(0, 1, (0,))
    )
    w, theta = dict(server.params), without_axis(state)
    for _ in range(3):
        g = full_gradient(add(w, theta), data.x[0], data.y[0])
        w, theta = add(w, g, scale=-0.2), add(theta, g, scale=-0.5)
    for name in w:
        torch.testing.assert_close(up.params[name][0], w[name], rtol=0, atol=1e-12)
        torch.testing.assert_close(after[name][0], theta[name], rtol=0, atol=1e-12)
    personal = method.personal_model(Server(w), after)
    torch.testing.assert_close(without_axis(personal), add(w, theta))


def test_ppsgd_with_a_still_personal_part_is_udp_fedavg() -> None:
    fields: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 4, "noise_multiplier": 0.5}
    ours = run(
        Task(network),
        clients(),
        PPSGD(personal_lr=1e-15, **fields),
        rounds=3,
        cohort=2,
        workers=1,
        noise="seeded",
    )
    plain = run(Task(network), clients(), UDPFedAvg(**fields), rounds=3, cohort=2, workers=1, noise="seeded")
    for name, leaf in plain.model.items():
        torch.testing.assert_close(ours.model[name], leaf, rtol=0, atol=1e-9)


def test_centaur_tunes_the_head_then_the_representation() -> None:
    method = Centaur(lr=0.2, epochs=2, head_epochs=3, batch_size=8, noise_multiplier=0.0, clip=math.inf)
    task, data = Task(network), clients().load([0])
    server = method.init_server(task.init(0), PLAN)
    rng = ClientStreams(0, 1, (0,))
    state = method.init_client(task, data, rng)
    down = method.broadcast(AT, server, [0])
    assert set(down.params) == {"1.weight", "1.bias"}
    assert set(state) == {"3.weight", "3.bias"}
    up, after = method.client_update(task, AT, down, data, state, rng)
    w = dict(server.params)
    for moving, steps in ((set(state), 3), (set(down.params), 2)):
        for _ in range(steps):
            g = full_gradient(w, data.x[0], data.y[0])
            w = {name: leaf - 0.2 * g[name] if name in moving else leaf for name, leaf in w.items()}
    for name in up.params:
        torch.testing.assert_close(up.params[name][0], w[name], rtol=0, atol=1e-12)
    for name in after:
        torch.testing.assert_close(after[name][0], w[name], rtol=0, atol=1e-12)
    found = method.server_update(task, AT, server, (0,), up, ServerStreams(0, 1))
    torch.testing.assert_close(without_axis(method.personal_model(found, after)), w)


def test_centaur_keeps_the_leading_directions_of_the_noisy_representation() -> None:
    method = Centaur(noise_multiplier=0.0, clip=math.inf, rank=2)
    task = Task(network)
    server = method.init_server(task.init(0), PLAN)
    noisy = {name: torch.randn(2, *server.params[name].shape).double() for name in ("1.weight", "1.bias")}
    found = method.server_update(task, AT, server, (0, 1), NoisyModel(noisy), ServerStreams(0, 1)).params
    left, values, right = torch.linalg.svd(noisy["1.weight"].mean(0))
    expected = left[:, :2] @ torch.diag(values[:2]) @ right[:2]
    torch.testing.assert_close(found["1.weight"], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found["1.bias"], noisy["1.bias"].mean(0))
    assert torch.equal(found["3.weight"], server.params["3.weight"])


def test_centaur_needs_something_to_share() -> None:
    with refuses("head"):
        Centaur(head=2).init_server(Task(network).init(0), PLAN)


@pytest.mark.parametrize("method", [PPSGD(), Centaur()])
def test_they_disclose_what_udp_fedavg_discloses(method: PPSGD | Centaur) -> None:
    plan = Plan(100, 10, "poisson", 20)
    ours, plain = (account(m.releases(plan), plan, 1e-5) for m in (method, UDPFedAvg()))
    assert [row.epsilon for row in ours] == [row.epsilon for row in plain]


@pytest.mark.parametrize("kind", [PPSGD, Centaur])
def test_uploads_that_depend_on_earlier_cohorts_make_fixed_size_cohorts_visible(
    kind: type[PPSGD] | type[Centaur],
) -> None:
    method = kind(noise_multiplier=0.0, clip=math.inf, batch_size=8)
    task, data, rng = Task(network), clients().load([0]), ClientStreams(0, 2, (0,))
    down = method.broadcast(AT, method.init_server(task.init(0), PLAN), [0, 1])
    new = method.init_client(task, data, rng)
    first, after = method.client_update(task, AT, down, data, new, rng)
    second, _ = method.client_update(task, AT, down, data, after, rng)
    assert any(bool((first.params[name] != leaf).any()) for name, leaf in second.params.items())
    plan = Plan(1000, 10, "fixed", 300)
    rows = {row.adversary: row for row in account(kind().releases(plan), plan, 1e-5)}
    assert rows["observer"].adjacency == rows["client"].adjacency == "zero-out"
    assert rows["observer"].epsilon == pytest.approx(13.14, abs=0.01)  # 9.30 if the cohorts stayed hidden


@pytest.mark.parametrize("kind", [PPSGD, Centaur])
def test_personal_models_are_scored_beside_the_shared_one(kind: type[PPSGD] | type[Centaur]) -> None:
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(1)).double()
    y = torch.randint(0, 3, (30,), generator=torch.Generator().manual_seed(2))
    head: dict[str, Any] = {"head_epochs": 100} if kind is Centaur else {}
    method = kind(lr=0.3, epochs=20, batch_size=8, noise_multiplier=0.01, **head)
    options: dict[str, Any] = {"rounds": 3, "sampler": "all", "noise": "seeded", "workers": 1}
    found = run(Task(network), clients(), method, test=(x, y), **options)
    personal = found.summary["personal"]
    assert personal["clients"] == 4
    assert personal["own_accuracy"] > 0.9  # its own eight examples are easily learnt by heart
    assert 0 < personal["test_accuracy"] < 1
    shared = evaluate(Task(network), found.model, x, y).accuracy
    assert found.accuracy == pytest.approx(shared)


def test_methods_without_personal_models_are_refused() -> None:
    found = run(Task(network), clients(), UDPFedAvg(), rounds=1, cohort=2, workers=1)
    assert found.summary["personal"] is None
