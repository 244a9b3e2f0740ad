"""The loops of FedLAP against plain ones, their bounds, and what they read of the private data."""

from __future__ import annotations

import math
import multiprocessing
from dataclasses import replace
from pathlib import Path as File
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedveil.data.client_data import ArrayClients, ClientData
from fedveil.models.registry import make_model
from fedveil.privacy.mechanisms import gaussian
from fedveil.privacy.noise import grid
from fedveil.streams import ClientStreams, named_stream
from fedveil.task import Task
from fedveil.training import gradient_matching, surrogate
from fedveil.training.augmentation import CHANGES, View
from fedveil.training.gradient_matching import (
    Distance,
    matching_gradient,
    matching_loss,
    weighted_gradient,
    weighted_loss,
)
from fedveil.training.private_sgd import poisson_batch
from fedveil.training.surrogate import (
    PADDING,
    Loops,
    Path,
    approximate,
    class_batch,
    class_count,
    descend,
    image_gradient,
    measure_path,
    noise_images,
    own_classes,
    set_weights,
    synthetic_labels,
)
from fedveil.tree import Params, expand, norms, sub, with_axis
from tests.refusals import refuses

CLASSES = 3
SHAPE = (1, 8, 8)


def convolutional() -> Task:
    return Task(lambda: make_model("convnet", SHAPE, CLASSES, width=4, blocks=2).double())


def linear() -> Task:
    return Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES)).double())


def examples(sizes: tuple[int, ...] = (7, 4)) -> ClientData:
    generator = torch.Generator().manual_seed(3)
    pairs = []
    for n in sizes:
        y = torch.randint(0, CLASSES, (n,), generator=generator)
        x = torch.randn(n, *SHAPE, generator=generator, dtype=torch.float64) + y[:, None, None, None]
        pairs.append((x, y))
    return ArrayClients.from_arrays(pairs).load(range(len(sizes)))


def loops(**changes: Any) -> Loops:
    base = Loops(
        trajectories=2,
        max_steps=3,
        real_batches=2,
        image_updates=2,
        model_updates=1,
        radius=math.inf,
        batch_size=4,
        lr=0.1,
        image_lr=0.5,
        image_momentum=0.5,
        distance=Distance(),
    )
    return replace(base, **changes)


def synthetic(data: ClientData, ipc: int = 2) -> tuple[Tensor, Tensor]:
    labels = synthetic_labels([range(CLASSES)] * data.count, ipc, CLASSES)
    streams = [named_stream(k, "images") for k in range(data.count)]
    return noise_images(streams, labels.shape[1], data), labels


def plain_gradient(task: Task, w: Params, x: Tensor, y: Tensor, weights: Tensor) -> Params:
    """One client's gradient by autograd in one piece, with a graph to differentiate again."""
    leaves = {name: leaf.requires_grad_() for name, leaf in w.items()}
    out = torch.func.functional_call(task.module, leaves, (x,))
    loss = (nn.functional.cross_entropy(out, y, reduction="none") * weights).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), create_graph=True), strict=True))


def plain_matching_gradient(
    task: Task, w: Params, real: Params, x: Tensor, y: Tensor, weights: Tensor, **fields: Any
) -> Tensor:
    x = x.clone().requires_grad_()
    own = {name: leaf.clone() for name, leaf in w.items()}
    loss = matching_loss(real, plain_gradient(task, own, x, y, weights), **fields)
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("make", [convolutional, linear])
@pytest.mark.parametrize("kept", [0, 2**40])
def test_image_gradients_are_those_of_plain_double_backward(
    make: Any, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size of the pieces, and whether their graphs are kept or made again."""
    monkeypatch.setattr(gradient_matching, "_KEPT_BYTES", kept)
    for limit in ("_PIECE_BYTES", "_BLOCK_PIECE_BYTES"):
        monkeypatch.setattr(gradient_matching, limit, 2 * 4 * 64 * 8)
    task, data = make(), examples()
    x, labels = synthetic(data)
    labels[1, -2:] = PADDING
    y, weights = set_weights(labels, x.dtype)
    w = expand(with_axis(task.init(1)), 2)
    real = weighted_gradient(task, w, data.x, data.y, data.mask().double())
    vectors = make is linear  # a bias in front of a norm would be matched to rounding errors
    found = matching_gradient(task, w, real, x, y, weights, Distance(0.3, "mean", vectors))
    for k in range(2):
        own = {name: leaf[k] for name, leaf in w.items()}
        target = {name: leaf[k] for name, leaf in real.items()}
        expected = plain_matching_gradient(
            task,
            own,
            target,
            x[k],
            y[k],
            weights[k],
            squared_weight=0.3,
            reduce="mean",
            include_vectors=vectors,
        )
        assert torch.allclose(found[k], expected, rtol=1e-8, atol=1e-11)


def test_padding_is_never_moved_and_moves_nothing() -> None:
    task, data = convolutional(), examples()
    x, labels = synthetic(data)
    labels[:, -2:] = PADDING
    y, weights = set_weights(labels, x.dtype)
    w = expand(with_axis(task.init(1)), 2)
    real = weighted_gradient(task, w, data.x, data.y, data.mask().double())
    found = matching_gradient(task, w, real, x, y, weights, Distance())
    assert not bool(found[:, -2:].any())
    fewer = matching_gradient(task, w, real, x[:, :-2], y[:, :-2], weights[:, :-2], Distance())
    assert torch.allclose(found[:, :-2], fewer)


def test_losses_and_gradients_in_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    task, data = convolutional(), examples()
    w = expand(with_axis(task.init(1)), 2)
    weights = torch.rand(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = (
        weighted_gradient(task, w, data.x, data.y, weights),
        weighted_loss(task, w, data.x, data.y, weights),
    )
    for limit in ("_PIECE_BYTES", "_BLOCK_PIECE_BYTES"):
        monkeypatch.setattr(gradient_matching, limit, 1)
    pieces = weighted_gradient(task, w, data.x, data.y, weights)
    assert all(torch.allclose(whole[0][name], leaf) for name, leaf in pieces.items())
    assert torch.allclose(whole[1], weighted_loss(task, w, data.x, data.y, weights))


def test_augmented_gradients_pass_through_the_change() -> None:
    task, data = convolutional(), examples((7,))
    x, labels = synthetic(data)
    y, weights = set_weights(labels, x.dtype)
    w = with_axis(task.init(1))
    real = weighted_gradient(task, w, data.x, data.y, data.mask().double())
    target = {name: leaf[0] for name, leaf in real.items()}
    view = View("rotate", 0.9)
    found = image_gradient(task, w, real, x, y, weights, Distance(), [view])[0]
    images = x[0].clone().requires_grad_()
    own = {name: leaf[0].clone() for name, leaf in w.items()}
    loss = matching_loss(target, plain_gradient(task, own, view(images), y[0], weights[0]))
    assert torch.allclose(found, torch.autograd.grad(loss, images)[0])


def test_the_synthetic_gradient_approaches_the_real_one() -> None:
    """As many images as examples, many updates, a linear model: the cosine exceeds 0.95."""
    task, data = linear(), examples((12,))
    w = with_axis(task.init(0))
    labels = data.y.clone()
    x = noise_images([named_stream(0, "images")], 12, data)
    settings = loops(
        trajectories=1, max_steps=1, real_batches=1, image_updates=200, model_updates=0, batch_size=12
    )
    streams = ClientStreams(0, 1, (0,))
    x = approximate(task, lambda _: w, data, x, labels, streams, replace(settings, image_lr=1.0))
    y, weights = set_weights(labels, x.dtype)
    made = weighted_gradient(task, w, x, y, weights)
    real = weighted_gradient(task, w, data.x, data.y, torch.full((1, 12), 1 / 12, dtype=torch.float64))
    a, b = (torch.cat([leaf.flatten() for leaf in g.values()]) for g in (made, real))
    assert float(torch.nn.functional.cosine_similarity(a, b, dim=0)) > 0.95


class Reads:
    """Counts the batches that are read of each client, in place of `poisson_batch`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, data: ClientData) -> None:
        self.counts = [0] * data.count
        self.sizes: list[int] = []
        read = poisson_batch

        def counting(rows: ClientData, rates: list[float], draws: list[np.random.Generator]) -> Any:
            for own in rows.x:
                k = next(i for i in range(data.count) if torch.equal(data.x[i], own))
                self.counts[k] += 1
            batch = read(rows, rates, draws)
            assert batch.mask is not None
            self.sizes += batch.mask.sum(1).tolist()
            return batch

        monkeypatch.setattr(surrogate, "poisson_batch", counting)


@pytest.mark.parametrize("make", [convolutional, linear])
def test_data_is_read_exactly_as_charged_without_a_radius(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task, data = make(), examples()
    reads = Reads(monkeypatch, data)
    settings = loops(mechanism=gaussian(1.0, 1.0))
    w = with_axis(task.init(0))
    approximate(task, lambda _: w, data, *synthetic(data), ClientStreams(0, 1, (0, 1)), settings)
    assert reads.counts == [settings.accesses] * 2
    assert settings.accesses == 2 * 3 * 2


@pytest.mark.parametrize("radius", [1e-6, 0.05, 0.2])
def test_data_is_never_read_more_often_than_charged(radius: float, monkeypatch: pytest.MonkeyPatch) -> None:
    task, data = linear(), examples()
    reads = Reads(monkeypatch, data)
    settings = loops(mechanism=gaussian(1.0, 1.0), radius=radius, max_steps=6)
    w = with_axis(task.init(0))
    approximate(task, lambda _: w, data, *synthetic(data), ClientStreams(0, 1, (0, 1)), settings)
    assert all(settings.trajectories * settings.real_batches <= n <= settings.accesses for n in reads.counts)
    if radius == 1e-6:  # the first step leaves it
        assert reads.counts == [settings.trajectories * settings.real_batches] * 2


def test_batches_are_poisson_samples_of_the_declared_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    task, data = linear(), examples((40,))
    reads = Reads(monkeypatch, data)
    real = surrogate.RealGradients(task, data, ClientStreams(0, 1, (0,)), loops())
    w = with_axis(task.init(0))
    for _ in range(300):
        real.draw(w, [0])
    sizes = np.asarray(reads.sizes)
    rate = 4 / 40
    assert abs(sizes.mean() - 4) < 4 * math.sqrt(40 * rate * (1 - rate) / len(sizes))
    assert abs(sizes.var() - 40 * rate * (1 - rate)) < 1.2


def test_a_batch_larger_than_the_data_is_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    task, data = linear(), examples((3,))
    reads = Reads(monkeypatch, data)
    w = with_axis(task.init(0))
    real = surrogate.RealGradients(task, data, ClientStreams(0, 1, (0,)), loops(batch_size=100))
    found, _ = real.draw(w, [0])
    mean = weighted_gradient(task, w, data.x, data.y, torch.full((1, 3), 1 / 3, dtype=torch.float64))
    assert reads.sizes == [3]
    assert all(torch.allclose(found[name], leaf) for name, leaf in mean.items())


def test_a_deployed_node_draws_its_batches_in_secret() -> None:
    """Whoever knows the run's seed could replay the batches, and sampling would hide nothing."""
    task, data = linear(), examples((40,))
    w = with_axis(task.init(0))
    settings = loops(batch_size=20)
    found = []
    for source in ("seeded", "seeded", "entropy", "entropy"):
        streams = ClientStreams(0, 1, (0,), noise_source=source)
        found.append(surrogate.RealGradients(task, data, streams, settings).draw(w, [0])[0]["1.weight"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[2], found[3])


def test_noise_is_drawn_once_per_batch_with_the_declared_deviation() -> None:
    task, data = linear(), examples((20,))
    w = with_axis(task.init(0))
    settings = loops(mechanism=gaussian(0.5, 2.0), batch_size=20)
    noisy = surrogate.RealGradients(task, data, ClientStreams(0, 1, (0,)), settings)
    bare = surrogate.RealGradients(
        task, data, ClientStreams(0, 1, (0,)), replace(settings, mechanism=gaussian(0.5, 0.0))
    )
    differences = []
    for _ in range(40):
        a, b = noisy.draw(w, [0])[0], bare.draw(w, [0])[0]
        differences.append(torch.cat([(a[name] - b[name]).flatten() for name in a]))
    found = torch.stack(differences)
    std = 2.0 * 0.5 / 20
    assert abs(float(found.std()) / std - 1) < 0.03
    assert abs(float(found.mean())) < 4 * std / math.sqrt(found.numel())


def test_one_example_moves_the_sum_by_no_more_than_the_clip() -> None:
    task = convolutional()
    data, w = examples((6,)), with_axis(task.init(0))
    fewer = ClientData(data.x, data.y, torch.tensor([5]))
    settings = loops(mechanism=gaussian(0.1, 0.0), batch_size=6, augment=CHANGES)
    streams = ClientStreams(0, 1, (0,))
    whole, _ = surrogate.RealGradients(task, data, streams, settings).draw(w, [0])
    part, _ = surrogate.RealGradients(task, fewer, streams, settings).draw(w, [0])
    moved = {name: 6 * whole[name] - 5 * part[name] for name in whole}
    assert 0 < float(norms(moved)) <= 0.1 * (1 + 1e-6)


def test_augmentation_leaves_the_noise_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[np.ndarray] = []

    def watched(words: np.ndarray) -> np.ndarray:
        drawn.append(original(words))
        return drawn[-1].copy()

    original = grid.normal_quantiles
    monkeypatch.setattr(grid, "normal_quantiles", watched)
    task, data = convolutional(), examples((9,))
    images, labels = synthetic(data)
    w = with_axis(task.init(0))
    runs: list[list[np.ndarray]] = []
    for changes in ((), CHANGES):
        drawn.clear()
        settings = loops(mechanism=gaussian(1.0, 1.0), augment=changes, trajectories=1)
        approximate(task, lambda _: w, data, images, labels, ClientStreams(0, 1, (0,)), settings)
        runs.append(list(drawn))
    assert len(runs[0]) == len(runs[1]) > 0
    assert all((a == b).all() for a, b in zip(*runs, strict=True))


def test_inputs_are_left_as_they_are() -> None:
    task, data = linear(), examples()
    images, labels = synthetic(data)
    before = images.clone()
    w = with_axis(task.init(0))
    after = approximate(task, lambda _: w, data, images, labels, ClientStreams(0, 1, (0, 1)), loops())
    assert torch.equal(images, before)
    assert not torch.equal(after, before)


@pytest.mark.parametrize("make", [convolutional, linear])
@pytest.mark.parametrize("radius", [0.01, 0.3, math.inf])
def test_the_server_stops_at_most_one_step_beyond_the_radius(make: Any, radius: float) -> None:
    task, data = make(), examples()
    images, labels = synthetic(data)
    start = task.init(0)
    shares = torch.tensor([0.25, 0.75])
    arguments: dict[str, Any] = {"lr": 0.2, "radius": radius}
    params, steps = descend(task, start, images, labels, shares, max_steps=12, **arguments)
    assert 1 <= steps <= 12
    if radius == math.inf:
        assert steps == 12
        return
    before, fewer = descend(task, start, images, labels, shares, max_steps=steps - 1, **arguments)
    assert fewer == steps - 1
    assert float(norms(with_axis(sub(before, start)))) < radius
    if steps < 12:
        assert float(norms(with_axis(sub(params, start)))) >= radius


def test_the_server_descends_on_the_weighted_union() -> None:
    task, data = convolutional(), examples()
    images, labels = synthetic(data)
    labels[1, -2:] = PADDING
    start, shares = task.init(0), torch.tensor([0.3, 0.7])
    params, _ = descend(task, start, images, labels, shares, lr=0.2, radius=math.inf, max_steps=1)
    y, weights = set_weights(labels, images.dtype)
    parts = weighted_gradient(task, expand(with_axis(start), 2), images, y, weights)
    for name, leaf in start.items():
        expected = leaf - 0.2 * (0.3 * parts[name][0] + 0.7 * parts[name][1])
        assert torch.allclose(params[name], expected)


def test_batches_of_the_server_walk_through_all_images_in_every_step() -> None:
    """One batch of everything is the whole step; small batches take several, over real images only."""
    task, data = convolutional(), examples()
    images, labels = synthetic(data)
    labels[1, -2:] = PADDING
    start, shares = task.init(0), torch.tensor([0.3, 0.7])
    arguments: dict[str, Any] = {"lr": 0.2, "radius": math.inf, "max_steps": 2}
    whole, _ = descend(task, start, images, labels, shares, **arguments)
    one, steps = descend(
        task, start, images, labels, shares, **arguments, shuffle=(512, np.random.default_rng(0))
    )
    assert steps == 2
    small, _ = descend(
        task, start, images, labels, shares, **arguments, shuffle=(2, np.random.default_rng(0))
    )
    for name in start:
        torch.testing.assert_close(one[name], whole[name], rtol=1e-4, atol=1e-5)
    assert any(not torch.allclose(small[name], whole[name], atol=1e-4) for name in start)


def test_the_radius_is_where_the_real_loss_is_smallest() -> None:
    distance = torch.tensor([[0.1, 0.2], [0.5, 0.6], [0.9, 1.4]], dtype=torch.float64)
    real = torch.tensor([[3.0, 1.0], [2.0, 2.0], [2.5, 0.5]], dtype=torch.float64)
    path = Path(distance, real, real)
    assert path.radii(10.0).tolist() == [0.5, 1.4]
    assert path.radii(1.0).tolist() == [0.5, 0.2]  # what lies beyond the radius does not count
    assert path.radii(0.05).tolist() == [0.05, 0.05]  # and caps it


def test_the_path_is_plain_descent_on_the_own_set() -> None:
    task, data = linear(), examples()
    images, labels = synthetic(data)
    start = with_axis(task.init(0))
    path = measure_path(task, start, images, labels, data, lr=0.3, radius=math.inf, steps=5)
    y, weights = set_weights(labels, images.dtype)
    w = expand(start, 2)
    for step in range(5):
        g = weighted_gradient(task, w, images, y, weights)
        w = {name: leaf - 0.3 * g[name] for name, leaf in w.items()}
        assert torch.allclose(path.distance[step], norms(sub(w, start)))
        assert torch.allclose(path.real[step], task.loss(w, data.everything()))
    assert bool((path.synthetic[1:] < path.synthetic[:-1]).all())


def test_labels_are_balanced_and_padded() -> None:
    labels = synthetic_labels([(2, 0), (1,)], 2, 2)
    assert labels.tolist() == [[0, 0, 2, 2], [1, 1, PADDING, PADDING]]
    y, weights = set_weights(labels, torch.float64)
    assert y.tolist() == [[0, 0, 2, 2], [1, 1, 0, 0]]
    assert weights.sum(1).tolist() == [1.0, 1.0]
    assert set_weights(labels[:0], torch.float64)[1].shape == (0, 4)


def test_classes_are_those_held_and_those_scored() -> None:
    data = examples((7, 1))
    assert own_classes(data)[1] == [int(data.y[1, 0])]
    task = convolutional()
    assert class_count(task, with_axis(task.init(0)), data) == CLASSES
    words = ClientData(data.x.long(), data.y, data.sizes)
    with refuses("task.dataset"):
        class_count(task, with_axis(task.init(0)), words)


def test_class_batches_hold_one_class() -> None:
    data = examples((20,))
    label = int(data.y[0, 0])
    batch = class_batch(data, label, 3, named_stream(0, "b"))
    assert batch is not None
    assert batch.y.shape == (1, 3)
    assert set(batch.y[0].tolist()) == {label}
    assert class_batch(data, CLASSES + 5, 3, named_stream(0, "b")) is None


def private_step_on_cifar(answers: multiprocessing.SimpleQueue[float]) -> None:
    """One step of a client at the paper's size: a clipped batch of 256, then an update of 100 images."""
    torch.set_num_threads(1)
    task = Task(lambda: make_model("convnet", (3, 32, 32), 10))
    labels = torch.arange(256).remainder(10)[None]
    data = ClientData(torch.randn(1, 256, 3, 32, 32), labels, torch.tensor([256]))
    once = {"trajectories": 1, "max_steps": 1, "real_batches": 1, "image_updates": 1}
    step = loops(**once, batch_size=256, mechanism=gaussian(1.0, 1.0))
    start = with_axis(task.init(0))
    images = torch.randn(1, 100, 3, 32, 32)
    approximate(task, lambda _: start, data, images, labels[:, :100], ClientStreams(0, 1, (0,)), step)
    status = File("/proc/self/status").read_text().splitlines()
    answers.put(int(next(line for line in status if "VmHWM" in line).split()[1]) / 2**20)


@pytest.mark.slow
@pytest.mark.skipif(not File("/proc/self/status").exists(), reason="reads the peak where Linux tells it")
def test_a_step_on_the_cifar_convnet_stays_below_a_gibibyte_and_a_half() -> None:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.SimpleQueue[float] = context.SimpleQueue()
    process = context.Process(target=private_step_on_cifar, args=(answers,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert answers.get() < 1.5  # of the whole process, the interpreter and the libraries included
