"""Gradients of small batches that are computed together are those of every client alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedveil import Task
from fedveil.models.registry import make_model
from fedveil.task import Batch
from fedveil.training.small_batches import SmallBatches, differentiator, is_known
from fedveil.tree import Params, expand, rows

SHAPE, CLASSES = (2, 11, 10), 4
COUNTS = (3, 5, 0, 5, 1, 3, 5)


def tailored() -> nn.Module:
    """Layers in every form that is known: strides that leave a remainder, dilation, no bias, all activations."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            first=nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), bias=False),
            tanh=nn.Tanh(),
            second=nn.Conv2d(3, 4, 2, dilation=2),
            relu=nn.ReLU(),
            third=nn.Conv2d(4, 9, 3, stride=2, padding=1),
            flatten=nn.Flatten(),
            linear=nn.Linear(9 * 2 * 4, 7),
            sigmoid=nn.Sigmoid(),
            last=nn.Linear(7, CLASSES, bias=False),
        )
    )


def strided(stride: int, kernel: int, padding: int) -> nn.Module:
    """Few channels and a stride: the input gradient goes by phases."""
    side = [(n + 2 * padding - kernel) // stride + 1 for n in SHAPE[1:]]
    return nn.Sequential(
        nn.Conv2d(2, 3, kernel, stride=stride, padding=padding),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(3 * side[0] * side[1], CLASSES),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet-zhu": lambda: make_model("lenet-zhu", SHAPE, CLASSES),
    "tailored": tailored,
    "stride 2, remainder": lambda: strided(2, 4, 1),
    "stride 3, no padding": lambda: strided(3, 5, 0),
    "stride 3, padded": lambda: strided(3, 4, 3),
    "stride above kernel": lambda: strided(3, 2, 1),
}


def make_task(name: str, dtype: torch.dtype = torch.float64) -> Task:
    return Task(lambda: MODELS[name]().to(dtype))


def make_batch(counts: Sequence[int] = COUNTS, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(3)
    k, width = len(counts), max(counts)
    x = torch.rand(k, width, *SHAPE, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(0, CLASSES, (k, width), generator=generator)
    return Batch(x, y, torch.arange(width) < torch.tensor(counts)[:, None])


def own_weights(task: Task, k: int) -> Params:
    generator = torch.Generator().manual_seed(5)
    return {
        name: leaf
        + 0.1 * torch.randn(k, *leaf.shape, generator=generator, dtype=torch.float64).to(leaf.dtype)
        for name, leaf in task.init(0).items()
    }


def by_autograd(task: Task, w: Params, x: Tensor, y: Tensor) -> tuple[Params, Tensor]:
    """The gradients of one client's mean loss, as any script has them."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
    x = x.clone().requires_grad_()
    loss = functional.cross_entropy(torch.func.functional_call(task.module, leaves, (x,)), y)
    *found, of_x = torch.autograd.grad(loss, [*leaves.values(), x])
    return dict(zip(leaves, found, strict=True)), of_x


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_a_plain_loop(name: str) -> None:
    task, batch = make_task(name), make_batch()
    w = own_weights(task, len(COUNTS))
    by = differentiator(task, batch)
    assert isinstance(by, SmallBatches)
    gradient, of_inputs = by.grad(w, batch), by.input_grad(w, batch)
    assert list(gradient) == list(w)
    for k, count in enumerate(COUNTS):
        if count == 0:
            assert all(not bool(leaf[k].any()) for leaf in (*gradient.values(), of_inputs))
            continue
        own = {leaf: w[leaf][k] for leaf in w}
        wanted, wanted_inputs = by_autograd(task, own, batch.x[k, :count], batch.y[k, :count])
        for leaf, value in wanted.items():
            torch.testing.assert_close(gradient[leaf][k], value, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(of_inputs[k, :count], wanted_inputs, rtol=1e-11, atol=1e-13)
        assert not bool(of_inputs[k, count:].any())


def test_a_model_that_all_share_is_not_copied_by_the_caller() -> None:
    task, batch = make_task("lenet-zhu"), make_batch()
    shared = {name: leaf.unsqueeze(0) for name, leaf in task.init(0).items()}
    copied = {name: leaf.repeat(len(COUNTS), *[1] * (leaf.dim() - 1)) for name, leaf in shared.items()}
    by = differentiator(task, batch)
    a, b = by.grad(expand(shared, len(COUNTS)), batch), by.grad(copied, batch)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [1, 3, 5, 8, 16])
def test_what_a_client_gets_does_not_depend_on_whom_it_is_computed_with(name: str, count: int) -> None:
    """In single precision, bit for bit: alone, beside others in any order, beside others of other sizes."""
    task, counts = make_task(name, torch.float32), (count, count, 2, count, count, count, 7, count)
    batch, w = make_batch(counts, torch.float32), own_weights(make_task(name, torch.float32), len(counts))
    by = differentiator(task, batch)
    gradient, of_inputs = by.grad(w, batch), by.input_grad(w, batch)
    for chosen in ([0], [7], [2], [1, 0], [3, 7, 2], [7, 6, 5, 4, 3, 2, 1, 0], [0, 1, 3, 4]):
        width = max(counts[k] for k in chosen)
        assert batch.mask is not None
        part = Batch(batch.x[chosen, :width], batch.y[chosen, :width], batch.mask[chosen, :width])
        by = differentiator(task, part)
        found, inputs = by.grad(rows(w, chosen), part), by.input_grad(rows(w, chosen), part)
        assert all(torch.equal(found[leaf], gradient[leaf][chosen]) for leaf in w)
        assert torch.equal(inputs, of_inputs[chosen, :width])


def test_many_clients_are_computed_in_parts() -> None:
    task, counts = make_task("lenet-zhu"), (5,) * 31
    batch, w = make_batch(counts), own_weights(make_task("lenet-zhu"), 31)
    by = differentiator(task, batch)
    gradient = by.grad(w, batch)
    for k in (0, 12, 30):
        wanted, _ = by_autograd(task, {name: leaf[k] for name, leaf in w.items()}, batch.x[k], batch.y[k])
        for leaf, value in wanted.items():
            torch.testing.assert_close(gradient[leaf][k], value, rtol=1e-11, atol=1e-13)


def test_arguments_are_not_changed() -> None:
    task, batch = make_task("tailored"), make_batch()
    w = own_weights(task, len(COUNTS))
    before = {name: leaf.clone() for name, leaf in w.items()}, batch.x.clone()
    by = differentiator(task, batch)
    by.grad(w, batch)
    by.input_grad(w, batch)
    assert all(torch.equal(leaf, before[0][name]) for name, leaf in w.items())
    assert torch.equal(batch.x, before[1])


def test_everything_else_is_the_tasks_own() -> None:
    """Dropout, other losses, pooling, networks of linear layers only, many examples."""
    batch = make_batch()
    with_dropout = nn.Sequential(
        *tailored().children(), nn.Dropout(0.5), nn.Linear(CLASSES, CLASSES)
    ).double()
    with_pooling = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(50, CLASSES)).double()
    for task in (
        Task(lambda: with_dropout),
        Task(lambda: with_pooling),
        Task(lambda: make_model("mlp-2", SHAPE, CLASSES)),
        Task(lambda: tailored().double(), loss=lambda out, y: (out.sum(-1) - y).square()),
    ):
        assert differentiator(task, batch) is task
    assert is_known(make_task("tailored"), 16)
    assert not is_known(make_task("tailored"), 17)
