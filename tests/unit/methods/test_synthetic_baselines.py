"""FedDM, DSC, PSG, DP-FedProx and FedLAP's server against their papers' steps, for a network of two layers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedveil import At, Plan, Task, run
from fedveil.data.client_data import ClientData
from fedveil.methods.dp_fedprox import DPFedProx
from fedveil.methods.dsc import DSC
from fedveil.methods.feddm import FedDM, nearby
from fedveil.methods.fedlap import FedLAP, MeasuredSet
from fedveil.methods.method import AnyMethod
from fedveil.methods.psg import PSG
from fedveil.methods.synthetic import SizedSet, random_starts
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.training.augmentation import Change
from fedveil.training.per_example import MARGIN
from fedveil.tree import Params, norms, sub, with_axis, without_axis
from tests.refusals import refuses

SIZES = (7, 4)
CLASSES = ((0, 1), (1, 2))
PLAN = Plan(2, 2, "all", 4, 4, 7)
AT = At(PLAN, 1)
RNG = ClientStreams(0, 1, (0, 1))
ALL = 100  # a batch size beyond anybody's examples: every batch is all of them
SETS: dict[str, Any] = {"ipc": 2, "labels": "own", "classes_per_client": 2, "batch_size": ALL}


# Two random networks, two steps each; of images with momentum, of the model without.
WALK: dict[str, Any] = {"trajectories": 2, "max_steps": 2, "image_lr": 0.4, "image_momentum": 0.5, "lr": 0.1}


def task() -> Task:
    return Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3)).double())


def data() -> ClientData:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, max(SIZES), 1, 3, 3, generator=generator, dtype=torch.float64)
    y = torch.zeros(2, max(SIZES), dtype=torch.long)
    for k, (n, held) in enumerate(zip(SIZES, CLASSES, strict=True)):
        y[k, :n] = torch.tensor([held[i % 2] for i in range(n)])
    return ClientData(x, y, torch.tensor(SIZES))


def layers(w: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features before the last layer, and scores."""
    features = functional.relu(x.flatten(1) @ w["1.weight"].T + w["1.bias"])
    return features, features @ w["3.weight"].T + w["3.bias"]


def gradient(w: Params, x: Tensor, y: Tensor, *, graph: bool = False) -> Params:
    """The gradient of the mean loss; `graph` keeps it differentiable in `x`."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in w.items()}
    loss = functional.cross_entropy(layers(leaves, x)[1], y)
    found = torch.autograd.grad(loss, list(leaves.values()), create_graph=graph)
    return dict(zip(leaves, found, strict=True))


def trained(w: Params, x: Tensor, y: Tensor, steps: int) -> Params:
    """Plain gradient descent at the rate of `WALK`."""
    for _ in range(steps):
        g = gradient(w, x, y)
        w = {name: leaf - WALK["lr"] * g[name] for name, leaf in w.items()}
    return w


def random_networks(client: int) -> list[Params]:
    """Those that this client matches its images at."""
    start = random_starts(task(), RNG.rows([client]))
    return [without_axis(start(number)) for number in range(WALK["trajectories"])]


def cosine_distance(real: Params, synthetic: Params) -> Tensor:
    """One minus the cosine of every output node's row, summed; vectors do not take part."""
    rows = [
        1 - functional.cosine_similarity(g, s, dim=0)
        for name in real
        if real[name].dim() > 1
        for g, s in zip(real[name], synthetic[name], strict=True)
    ]
    return torch.stack(rows).sum()


def examples(k: int) -> tuple[Tensor, Tensor]:
    held = data()
    return held.x[k, : SIZES[k]], held.y[k, : SIZES[k]]


def uploads(method: AnyMethod) -> Any:
    problem = task()
    down = method.broadcast(AT, method.init_server(problem.init(0), PLAN), (0, 1))
    return method.client_update(problem, AT, down, data(), {}, RNG)[0]


def first_images(method: Any) -> Tensor:
    found: Tensor = method.first_images(data(), 2, RNG)
    return found


def labels_of(k: int) -> Tensor:
    return torch.tensor(CLASSES[k]).repeat_interleave(2)


def test_feddm_matches_the_mean_features_and_logits_of_each_class() -> None:
    method = FedDM(**SETS, image_lr=0.3, image_momentum=0.5, matching_steps=3, spread=0.0)
    up, images, w = uploads(method), first_images(method), task().init(0)
    for k in range(2):
        (x, y), s, labels = examples(k), images[k].clone(), labels_of(k)
        velocity = torch.zeros_like(s)
        for _ in range(3):
            for label in CLASSES[k]:
                own = s[labels == label].detach().requires_grad_()
                means = [
                    (a.mean(0) - b.mean(0)).square().sum()
                    for a, b in zip(layers(w, x[y == label]), layers(w, own), strict=True)
                ]
                step = torch.autograd.grad(means[0] + means[1], own)[0]
                velocity[labels == label] = 0.5 * velocity[labels == label] + step
                s[labels == label] -= 0.3 * velocity[labels == label]
        torch.testing.assert_close(up.images[k], s, rtol=0, atol=1e-10)
        assert torch.equal(up.labels[k], labels)
    assert up.size.tolist() == list(SIZES)


@pytest.mark.parametrize("radius", [0.01, 1.0, math.inf])
def test_feddm_matches_at_models_near_the_servers(radius: float) -> None:
    w = with_axis(task().init(0))
    found = [nearby(w, 0.1, radius, RNG.rows([0]), step) for step in range(3)]
    lengths = [float(norms(sub(near, w))) for near in found]
    assert all(0 < length <= radius * (1 + 1e-9) for length in lengths)
    assert len(set(lengths)) == 3 or radius == 0.01


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_the_server_descends_on_all_sets_weighted_by_size(weighting: Literal["size", "uniform"]) -> None:
    """FedDM's and FedLAP's; FedLAP may also count all clients alike."""
    problem, images = task(), first_images(FedDM(**SETS))
    labels = torch.stack([labels_of(0), labels_of(1)])
    counts = SIZES if weighting == "size" else (1, 1)
    w = problem.init(0)
    for _ in range(3):
        parts = [gradient(w, images[k], labels[k]) for k in range(2)]
        step = {n: (counts[0] * g + counts[1] * parts[1][n]) / sum(counts) for n, g in parts[0].items()}
        w = {n: leaf - 0.2 * step[n] for n, leaf in w.items()}
    steps: dict[str, Any] = {"lr": 0.2, "lr_schedule": "constant", "server_steps": 3}
    fedlap = FedLAP(**SETS, **steps, weighting=weighting, radius_strategy="fixed")
    sized = torch.tensor(SIZES)
    up = MeasuredSet(images, labels, torch.ones(2, dtype=torch.float64), sized)
    server = fedlap.init_server(problem.init(0), PLAN)
    found = [fedlap.server_update(problem, AT, server, (0, 1), up, ServerStreams(0, 1)).params]
    if weighting == "size":
        sets = SizedSet(images, labels, sized)
        found.append(FedDM(**SETS, **steps).aggregate(problem, AT, problem.init(0), sets))
    for params in found:
        for name, leaf in w.items():
            torch.testing.assert_close(params[name], leaf, rtol=0, atol=1e-10)


def test_dsc_condenses_class_by_class_along_networks_trained_on_the_images() -> None:
    method = DSC(**SETS, **WALK, image_updates=2, model_updates=3, augment=())
    up, images = uploads(method), first_images(method)
    for k in range(2):
        (x, y), s, labels = examples(k), images[k].clone(), labels_of(k)
        velocity = torch.zeros_like(s)
        for w in random_networks(k):
            for _ in range(2):
                for label in CLASSES[k]:
                    place = labels == label
                    real = gradient(w, x[y == label], y[y == label])
                    for _ in range(2):
                        own = s[place].detach().requires_grad_()
                        synthetic = gradient(w, own, labels[place], graph=True)
                        step = torch.autograd.grad(cosine_distance(real, synthetic), own)[0]
                        velocity[place] = 0.5 * velocity[place] + step
                        s[place] -= 0.4 * velocity[place]
                w = trained(w, s, labels, steps=3)
        torch.testing.assert_close(up.images[k], s, rtol=0, atol=1e-10)


def test_psg_matches_the_whole_gradient_at_random_networks() -> None:
    """Without noise and with batches of everything: what is private is only how the real gradient is read."""
    method = PSG(**SETS, **WALK, model_updates=1, clip=1e6, noise_multiplier=0.0)
    up, images = uploads(method), first_images(method)
    for k in range(2):
        (x, y), s, labels = examples(k), images[k].clone(), labels_of(k)
        velocity = torch.zeros_like(s)
        for w in random_networks(k):
            for _ in range(2):
                own = s.detach().requires_grad_()
                distance = cosine_distance(gradient(w, x, y), gradient(w, own, labels, graph=True))
                velocity = 0.5 * velocity + torch.autograd.grad(distance, own)[0]
                s = s - 0.4 * velocity
                w = trained(w, s, labels, steps=1)
        torch.testing.assert_close(up.images[k], s, rtol=0, atol=1e-10)


@pytest.mark.parametrize("clip", [0.3, 1e6])
def test_dp_fedprox_clips_every_example_and_pulls_towards_the_start(clip: float) -> None:
    method = DPFedProx(
        lr=0.2,
        lr_schedule="constant",
        epochs=3,
        batch_size=ALL,
        proximal=0.7,
        clip=clip,
        noise_multiplier=0.0,
    )
    up, start = uploads(method), task().init(0)
    for k in range(2):
        x, y = examples(k)
        w = start
        for _ in range(3):
            total = {name: torch.zeros_like(leaf) for name, leaf in w.items()}
            for i in range(len(y)):
                g = gradient(w, x[i : i + 1], y[i : i + 1])
                length = math.sqrt(sum(float(leaf.square().sum()) for leaf in g.values()))
                total = {
                    name: leaf + min(1.0, clip * (1 - MARGIN) / length) * g[name]
                    for name, leaf in total.items()
                }
            w = {
                name: leaf - 0.2 * (total[name] / len(y) + 0.7 * (leaf - start[name]))
                for name, leaf in w.items()
            }
        for name, leaf in w.items():
            torch.testing.assert_close(up.params[name][k], leaf, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("layers", "augment", "field"),
    [
        ([nn.Linear(9, 3)], ("flip",), "method.augment"),
        ([nn.Unflatten(1, (1, 9)), nn.Conv1d(1, 3, 9), nn.Flatten()], (), "task.model"),
    ],
)
def test_data_and_models_that_a_method_cannot_use_are_refused_before_anything_is_written(
    tmp_path: Path, layers: list[nn.Module], augment: tuple[Change, ...], field: str
) -> None:
    flat = [(torch.randn(4, 9), torch.tensor([0, 1, 2, 0])) for _ in range(2)]
    with refuses(field):
        run(Task(nn.Sequential(*layers)), flat, FedDM(augment=augment), rounds=1, results=tmp_path / "run")
    assert not (tmp_path / "run").exists()
