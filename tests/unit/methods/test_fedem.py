"""FedEM: the projection, the inner steps, and that it is FedSGD when there is no perturbation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedveil.data.client_data import ArrayClients, ClientData
from fedveil.methods.fedem import FedEM, Norm, example_norm, project_to_shell
from fedveil.methods.fedsgd import FedSGD, batch_in_step
from fedveil.methods.method import AnyMethod, At
from fedveil.methods.shared_model import Model
from fedveil.models.registry import make_model
from fedveil.privacy.releases import Plan
from fedveil.streams import ClientStreams, NoiseSource, ServerStreams
from fedveil.task import Batch, Task
from fedveil.training.batching import LastBatch
from fedveil.tree import Params, expand, with_axis
from tests.refusals import refuses

SHAPE = (1, 8, 8)


def make_task(model: str = "lenet-zhu") -> Task:
    return Task(lambda: make_model(model, SHAPE, 4))


def make_data(sizes: list[int], dtype: torch.dtype = torch.float64) -> ClientData:
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (
            torch.randn(n, *SHAPE, generator=generator, dtype=dtype),
            torch.randint(4, (n,), generator=generator),
        )
        for n in sizes
    ]
    return ArrayClients.from_arrays(pairs).load(range(len(sizes)))


def start(task: Task) -> Params:
    return {name: leaf.double() for name, leaf in task.init(3).items()}


def one_round(
    method: AnyMethod, task: Task, data: ClientData, rounds: int = 1
) -> tuple[Params, Tensor | None]:
    plan = Plan(data.count, data.count, "all", rounds, int(data.sizes.min()), int(data.sizes.max()))
    server = method.init_server(start(task), plan)
    ids = tuple(range(data.count))
    state = method.init_client(task, data, ClientStreams(0, 0, ids))
    for number in range(1, rounds + 1):
        for exchange in range(method.exchanges(plan)):
            at = At(plan, number, exchange)
            down = method.broadcast(at, server, ids)
            up, state = method.client_update(
                task, at, down, data, state, ClientStreams(0, number, ids, exchange)
            )
            server = method.server_update(task, at, server, ids, up, ServerStreams(0, number, exchange))
    return method.model(server), state.get("delta")


@given(
    low=st.just(0.0) | st.floats(1e-6, 2),
    width=st.floats(0, 3),
    scale=st.sampled_from([0.0, 1e-30, 1e-6, 1.0, 1e6]),
    norm=st.sampled_from(["l2", "linf"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_projection_lands_in_the_shell(low: float, width: float, scale: float, norm: Norm, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    delta = scale * torch.randn(2, 3, 1, 4, 4, generator=generator)
    high = low + width
    found = project_to_shell(delta, low, high, norm, lambda: torch.randn(2, 3, 1, 4, 4, generator=generator))
    size = example_norm(found, norm)
    assert bool((size >= low * (1 - 1e-6)).all())
    assert bool((size <= high * (1 + 1e-6) + 1e-12).all())


def test_projection_leaves_what_is_inside() -> None:
    delta = torch.full((1, 2, 1, 2, 2), 0.25)
    assert torch.equal(project_to_shell(delta, 0.1, 1.0, "l2", lambda: delta), delta)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_first_perturbation_is_anywhere_between_the_radii(norm: Norm) -> None:
    method = FedEM(batch_size=400, perturbation_steps=0, rho_min=0.3, rho_max=0.7, norm=norm)
    _, delta = one_round(method, make_task("logistic"), make_data([400]))
    assert delta is not None
    size = example_norm(delta, norm)[0]
    assert 0.3 <= float(size.min()) < 0.32
    assert 0.68 < float(size.max()) <= 0.7 + 1e-12
    assert float(size.mean()) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("model", ["lenet-zhu", "logistic"])
@pytest.mark.parametrize("sizes", [[8, 8], [9, 3, 1]])
def test_no_perturbation_is_fedsgd_bit_for_bit(model: str, sizes: list[int]) -> None:
    task, data = make_task(model), make_data(sizes)
    ours, _ = one_round(FedEM(batch_size=4, perturbation_steps=0, rho_max=0), task, data)
    plain, _ = one_round(FedSGD(batch_size=4), task, data)
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


def test_one_client_whole_batch_is_one_gradient_step_on_the_perturbed_data() -> None:
    task, data = make_task(), make_data([6])
    method = FedEM(batch_size=6, perturbation_steps=3, rho_max=0.5, lr=0.2)
    found, delta = one_round(method, task, data)
    assert delta is not None
    batch = batch_in_step(data, 6, 0, ClientStreams(0, 1, (0,)))
    seen = Batch(batch.x + delta[:, :6], batch.y)
    gradient = task.grad(with_axis(start(task)), seen)
    for name, leaf in start(task).items():
        torch.testing.assert_close(found[name], leaf - 0.2 * gradient[name][0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("norm", "low", "high"), [("l2", 0.0, 0.6), ("l2", 0.5, 5.0), ("linf", 0.0, 0.15), ("linf", 0.3, 0.4)]
)
def test_two_batches_equal_algorithm_1_written_out(norm: Norm, low: float, high: float) -> None:
    """Lines 8 to 16 with a plain module and autograd; the start is the one that no perturbation steps leave."""
    task, data = make_task(), make_data([8])
    steps, inner_lr, lr = 4, 0.05, 0.2
    first = FedEM(batch_size=4, perturbation_steps=0, rho_min=low, rho_max=high, norm=norm)
    _, start_delta = one_round(first, task, data)
    found, delta = one_round(
        FedEM(
            batch_size=4,
            perturbation_steps=steps,
            perturbation_lr=inner_lr,
            lr=lr,
            rho_min=low,
            rho_max=high,
            norm=norm,
        ),
        task,
        data,
    )
    assert delta is not None
    assert start_delta is not None

    def loss_of(w: Params, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(torch.func.functional_call(task.module, w, (x,)), y)

    def step_of(w: Params, x: Tensor, y: Tensor) -> Params:
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in w.items()}
        loss_of(leaves, x, y).backward()
        return {
            name: (leaf - lr * leaf.grad).detach() for name, leaf in leaves.items() if leaf.grad is not None
        }

    theta, own = start(task), start_delta[0, :4].clone()
    for index in range(2):
        batch = batch_in_step(data, 4, index, ClientStreams(0, 1, (0,)))
        x, y = batch.x[0], batch.y[0]
        theta_u = theta
        for _ in range(steps):
            moving = own.detach().requires_grad_()
            loss_of(theta_u, x + moving, y).backward()
            assert moving.grad is not None
            own = own - inner_lr * moving.grad.sign()
            for example in own:
                size = float(example.norm()) if norm == "l2" else float(example.abs().max())
                if norm == "linf":
                    example.clamp_(-high, high)
                elif size > high:
                    example.mul_(high / size)
                if size < low:
                    example.mul_(low / size)
            theta_u = step_of(theta_u, x + own, y)
        theta = step_of(theta, x + own, y)
    torch.testing.assert_close(delta[0, :4], own, rtol=1e-8, atol=1e-10)
    for name, leaf in theta.items():
        torch.testing.assert_close(found[name], leaf, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("model", ["lenet-zhu", "mlp-2", "logistic"])
def test_input_gradient_against_finite_differences(model: str) -> None:
    task, data = make_task(model), make_data([3, 2])
    batch = data.everything()
    w = expand(with_axis(start(task)), 2)
    found = task.input_grad(w, batch)
    step = 1e-6
    for place in [(0, 1, 0, 2, 3), (1, 0, 0, 7, 0)]:
        up, down = batch.x.clone(), batch.x.clone()
        up[place] += step
        down[place] -= step
        rise = task.loss(w, Batch(up, batch.y, batch.mask)) - task.loss(w, Batch(down, batch.y, batch.mask))
        assert float(found[place]) == pytest.approx(float(rise[place[0]]) / (2 * step), rel=1e-5, abs=1e-10)
    assert float(found[1, 2].abs().max()) == 0.0  # padding


def test_stacked_equals_one_by_one() -> None:
    task, data = make_task(), make_data([5, 3, 1])
    method = FedEM(batch_size=4, perturbation_steps=3, rho_min=0.1, rho_max=0.4)
    plan = Plan(3, 3, "all", 1, 1, 5)
    down = Model(with_axis(start(task)))
    state = method.init_client(task, data, ClientStreams(0, 0, (0, 1, 2)))
    alone = {k: {name: leaf[k : k + 1] for name, leaf in state.items()} for k in range(3)}
    for exchange in range(2):
        at = At(plan, 1, exchange)
        up, state = method.client_update(
            task, at, down, data, state, ClientStreams(0, 1, (0, 1, 2), exchange)
        )
        for k in range(3):
            one, alone[k] = method.client_update(
                task, at, down, data.rows([k]), alone[k], ClientStreams(0, 1, (k,), exchange)
            )
            for name, leaf in one.gradient.items():
                torch.testing.assert_close(up.gradient[name][k], leaf[0], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(state["delta"][k], alone[k]["delta"][0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("block", [2, 3, 100])
def test_blocks_of_one_client_are_the_same_steps_in_fewer_messages(block: int) -> None:
    """With one client its own step between the batches of a block is the server's."""
    task, data = make_task(), make_data([13])
    paper, paper_delta = one_round(
        FedEM(batch_size=4, perturbation_steps=3, rho_min=0.1, rho_max=0.4), task, data, rounds=2
    )
    blocks, delta = one_round(
        FedEM(batch_size=4, perturbation_steps=3, rho_min=0.1, rho_max=0.4, block=block), task, data, rounds=2
    )
    assert paper_delta is not None
    torch.testing.assert_close(delta, paper_delta, rtol=1e-7, atol=1e-9)
    for name, leaf in paper.items():
        torch.testing.assert_close(blocks[name], leaf, rtol=1e-9, atol=1e-11)
    assert FedEM(batch_size=4, block=block).exchanges(Plan(1, 1, "all", 1, 13, 13)) == -(-3 // block)


def test_a_block_stacked_equals_one_by_one() -> None:
    task, data = make_task(), make_data([11, 3, 1])
    method = FedEM(batch_size=4, block=3, perturbation_steps=2, rho_min=0.1, rho_max=0.4)
    at, down = At(Plan(3, 3, "all", 1, 1, 11), 1), Model(with_axis(start(task)))
    state = method.init_client(task, data, ClientStreams(0, 0, (0, 1, 2)))
    up, _ = method.client_update(task, at, down, data, state, ClientStreams(0, 1, (0, 1, 2)))
    assert up.size.tolist() == [11, 3, 1]
    for k in range(3):
        alone = {name: leaf[k : k + 1] for name, leaf in state.items()}
        one, _ = method.client_update(task, at, down, data.rows([k]), alone, ClientStreams(0, 1, (k,)))
        for name, leaf in one.gradient.items():
            torch.testing.assert_close(up.gradient[name][k], leaf[0], rtol=1e-9, atol=1e-12)


def test_inner_steps_leave_the_model_alone_and_lower_the_loss() -> None:
    task, data = make_task(), make_data([6])
    theta = with_axis(start(task))
    before = {name: leaf.clone() for name, leaf in theta.items()}
    method = FedEM(batch_size=6, perturbation_steps=20, perturbation_lr=0.01, rho_max=2.0, lr=1e-6)
    plan = Plan(1, 1, "all", 1, 6, 6)
    streams = ClientStreams(0, 1, (0,))
    state = method.init_client(task, data, streams)
    _, after = method.client_update(task, At(plan, 1), Model(theta), data, state, streams)
    assert all(torch.equal(theta[name], before[name]) for name in theta)
    batch = batch_in_step(data, 6, 0, streams)
    perturbed = task.loss(theta, Batch(batch.x + after["delta"][:, :6], batch.y))
    assert float(perturbed) < float(task.loss(theta, batch))


@pytest.mark.parametrize(
    ("last_batch", "counts"),
    [("keep", [(4, 4), (4, 4), (1, 3)]), ("drop", [(4, 4), (4, 4)]), ("merge", [(4, 4), (5, 4), (0, 3)])],
)
@pytest.mark.parametrize("made", [FedSGD, FedEM])
def test_what_becomes_of_the_last_batch(made: Any, last_batch: LastBatch, counts: list[Any]) -> None:
    """Clients of 9 and 11 examples; every example is in one batch at most, and the stack does not matter."""
    task, data = make_task(), make_data([9, 11])
    method = made(batch_size=4, last_batch=last_batch)
    plan = Plan(2, 2, "all", 1, 9, 11)
    assert method.exchanges(plan) == len(counts)
    down, seen = Model(with_axis(start(task))), []
    state = method.init_client(task, data, ClientStreams(0, 0, (0, 1)))
    alone = method.init_client(task, data.rows([0]), ClientStreams(0, 0, (0,)))
    for exchange, expected in enumerate(counts):
        at = At(plan, 1, exchange)
        up, state = method.client_update(task, at, down, data, state, ClientStreams(0, 1, (0, 1), exchange))
        assert tuple(up.size.tolist()) == expected
        (batch,) = method.batches_behind(at, data, ClientStreams(0, 1, (0, 1), exchange))
        mask = torch.ones_like(batch.y, dtype=torch.bool) if batch.mask is None else batch.mask
        seen += [tuple(x.flatten().tolist()) for x in batch.x[mask]]
        one, alone = method.client_update(
            task, at, down, data.rows([0]), alone, ClientStreams(0, 1, (0,), exchange)
        )
        for name, leaf in one.gradient.items():
            torch.testing.assert_close(up.gradient[name][:1], leaf, rtol=1e-9, atol=1e-12)
    assert len(set(seen)) == len(seen) == sum(sum(pair) for pair in counts)


def test_the_perturbation_persists_between_batches_and_is_drawn_again_each_round() -> None:
    task, data = make_task(), make_data([4])
    method = FedEM(batch_size=2, perturbation_steps=0, rho_max=0.5)
    plan = Plan(1, 1, "all", 2, 4, 4)
    down = Model(with_axis(start(task)))
    first = method.init_client(task, data, ClientStreams(0, 0, (0,)))
    _, second = method.client_update(task, At(plan, 1, 0), down, data, first, ClientStreams(0, 1, (0,), 0))
    _, third = method.client_update(task, At(plan, 1, 1), down, data, second, ClientStreams(0, 1, (0,), 1))
    _, fourth = method.client_update(task, At(plan, 2, 0), down, data, third, ClientStreams(0, 2, (0,), 0))
    assert not torch.equal(first["delta"], second["delta"])
    assert torch.equal(second["delta"], third["delta"])
    assert not torch.equal(third["delta"], fourth["delta"])


def test_a_deployed_clients_initial_state_does_not_depend_on_the_seed() -> None:
    """The server knows the seed; from it alone it could draw the simulated start again."""
    task, data = make_task(), make_data([4])
    method = FedEM(batch_size=4, perturbation_steps=0, rho_max=0.5)
    down, at = Model(with_axis(start(task))), At(Plan(1, 1, "all", 1, 4, 4), 1)

    def first_delta(source: NoiseSource) -> Tensor:
        streams = ClientStreams(0, 1, (0,), noise_source=source)
        state = method.init_client(task, data, streams)
        return method.client_update(task, at, down, data, state, streams)[1]["delta"]

    assert torch.equal(first_delta("seeded"), first_delta("seeded"))
    drawn = [first_delta("entropy") for _ in range(2)]
    assert not torch.equal(*drawn)
    assert all(float(example_norm(delta, "l2").max()) <= 0.5 + 1e-9 for delta in drawn)


def test_rho_min_above_rho_max_is_refused() -> None:
    with refuses("method.rho_min"):
        FedEM(rho_min=1.0, rho_max=0.5)


def test_nothing_is_proven() -> None:
    releases = FedEM().releases(Plan(4, 4, "all", 30, 100, 100))
    assert {release.protection.kind for release in releases} == {"unprotected"}
