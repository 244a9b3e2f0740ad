"""Defences around FedSGD: what they do to a gradient, and what they may claim."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fedveil.data.client_data import ArrayClients, ClientData
from fedveil.experiment.config import make_config
from fedveil.methods.dp_fedags import DPFedAGS
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.fedem import FedEM
from fedveil.methods.fedsgd import FedSGD, batch_in_step
from fedveil.methods.method import AnyMethod, At
from fedveil.methods.shared_model import Model
from fedveil.methods.wrappers.defences import (
    DPSGD,
    LDPM,
    PPFA,
    Defence,
    GradientGaussian,
    GradientLaplace,
    GradientMasking,
    GradientPruning,
    SignCompression,
)
from fedveil.models.registry import make_model
from fedveil.privacy.accounting import account
from fedveil.privacy.releases import Plan
from fedveil.streams import ClientStreams
from fedveil.task import Task
from fedveil.training.per_example import MARGIN
from fedveil.tree import Params, expand, flatten, norms, sub, with_axis
from tests.refusals import refuses
from tests.unit.example_gradients import example_gradients

SHAPE = (1, 8, 8)
DEFENCES: list[Defence] = [
    GradientGaussian(),
    GradientLaplace(),
    PPFA(),
    LDPM(),
    GradientMasking(),
    SignCompression(),
    GradientPruning(),
    DPSGD(),
]


def make_task() -> Task:
    return Task(lambda: make_model("lenet-zhu", SHAPE, 4))


def make_data(sizes: tuple[int, ...] = (4, 3)) -> ClientData:
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (
            torch.randn(n, *SHAPE, generator=generator, dtype=torch.float64),
            torch.randint(4, (n,), generator=generator),
        )
        for n in sizes
    ]
    return ArrayClients.from_arrays(pairs).load(range(len(sizes)))


def sent(method: AnyMethod, exchange: int = 0) -> Params:
    task, data = make_task(), make_data()
    down = Model({name: leaf.double() for name, leaf in with_axis(task.init(0)).items()})
    streams = ClientStreams(0, 1, (0, 1), exchange)
    plan = Plan(2, 2, "all", 1, 3, 4)
    state = method.init_client(task, data, streams)
    up, _ = method.client_update(task, At(plan, 1, exchange), down, data, state, streams)
    gradient: Params = up.gradient
    return gradient


PLAIN = sent(FedSGD(batch_size=4))


@pytest.mark.parametrize("defence", DEFENCES, ids=lambda defence: defence.name)
def test_same_streams_same_bits_and_rows_on_their_own(defence: Defence) -> None:
    method = defence.around(FedSGD(batch_size=4))
    first, again = sent(method), sent(method)
    assert all(torch.equal(first[name], again[name]) for name in first)
    task, data = make_task(), make_data()
    down = Model({name: leaf.double() for name, leaf in with_axis(task.init(0)).items()})
    plan = Plan(2, 2, "all", 1, 3, 4)
    for k in range(2):
        one, _ = method.client_update(task, At(plan, 1), down, data.rows([k]), {}, ClientStreams(0, 1, (k,)))
        for name, leaf in one.gradient.items():
            torch.testing.assert_close(leaf[0], first[name][k], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "defence",
    [
        GradientGaussian(std=0),
        GradientLaplace(scale=0),
        PPFA(epsilon=1),
        LDPM(std=0, kept=1),
        GradientMasking(part=0),
        GradientPruning(part=0),
        DPSGD(clip=math.inf, noise_multiplier=0),
    ],
    ids=lambda defence: defence.name,
)
def test_switched_off_it_is_fedsgd(defence: Defence) -> None:
    found = sent(defence.around(FedSGD(batch_size=4)))
    for name, leaf in PLAIN.items():
        torch.testing.assert_close(found[name], leaf, rtol=1e-9, atol=1e-12)


def test_noise_has_its_scale() -> None:
    gaussian = flatten(sub(sent(GradientGaussian(std=0.5).around(FedSGD(batch_size=4))), PLAIN))
    laplace = flatten(sub(sent(GradientLaplace(scale=0.5).around(FedSGD(batch_size=4))), PLAIN))
    assert float(gaussian.std()) == pytest.approx(0.5, rel=0.03)
    assert float(laplace.abs().mean()) == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize(
    "inner",
    [FedSGD(batch_size=4), DPSGD(clip=1e-9).around(FedSGD(batch_size=4)), DPFedAGS()],
    ids=lambda method: method.name,
)
def test_no_two_layers_draw_the_same_noise(inner: AnyMethod) -> None:
    """Neither two layers of noise nor a layer and the method inside: the second would only double the first."""
    layers = [inner]
    for _ in range(3):
        layers.append(GradientGaussian(std=1.0).around(layers[-1]))
    uploads = [sent(method) for method in layers]
    added = [sub(after, before) for before, after in itertools.pairwise(uploads)]
    draws = torch.stack([flatten(noise).flatten() for noise in (uploads[0], *added)])
    alike = torch.corrcoef(draws) - torch.eye(len(draws))
    assert float(alike.abs().max()) < 5 / math.sqrt(draws.shape[1])


def test_ppfa_moves_by_its_length() -> None:
    defence = PPFA(epsilon=0.9)
    moved = norms(sub(sent(defence.around(FedSGD(batch_size=4))), PLAIN))
    assert moved.tolist() == pytest.approx([defence.length(flatten(PLAIN).shape[1])] * 2)


def test_ldpm_keeps_a_subspace_and_the_expectation() -> None:
    defence = LDPM(std=0, kept=0.5)
    flat = flatten(PLAIN)
    once = defence.defend(PLAIN, ClientStreams(0, 1, (0, 1)))
    twice = defence.defend(once, ClientStreams(0, 1, (0, 1)))
    torch.testing.assert_close(flatten(twice), 2 * flatten(once))  # a projection, times d / kept
    rounds = [flatten(defence.defend(PLAIN, ClientStreams(0, r, (0, 1)))) for r in range(300)]
    mean = torch.stack(rounds).mean(0)
    assert float((mean - flat).norm() / flat.norm()) < 0.1


def test_the_server_cannot_draw_a_deployed_clients_subspace_again() -> None:
    defence = LDPM(std=0)
    deployed = [
        flatten(defence.defend(PLAIN, ClientStreams(0, 1, (0, 1), noise_source="entropy"))) for _ in range(2)
    ]
    simulated = flatten(defence.defend(PLAIN, ClientStreams(0, 1, (0, 1))))
    assert not torch.equal(*deployed)
    assert not torch.equal(deployed[0], simulated)


def test_masking_pruning_and_signs_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = {
        "a": torch.randn(2, 30, 20, generator=generator),
        "b": torch.randn(2, 400, generator=generator),
    }
    streams = ClientStreams(0, 1, (0, 1))
    masked = flatten(GradientMasking(part=0.25).defend(gradient, streams))
    assert (masked == 0).sum(1).tolist() == [250, 250]
    assert torch.equal(masked[masked != 0], flatten(gradient)[masked != 0])
    pruned = flatten(GradientPruning(part=0.99).defend(gradient, streams))
    assert (pruned != 0).sum(1).tolist() == [10, 10]
    assert torch.equal(pruned.abs().sort(1).values[:, -10:], flatten(gradient).abs().sort(1).values[:, -10:])
    signs = SignCompression().defend(gradient, streams)
    for name, leaf in gradient.items():
        torch.testing.assert_close(signs[name][0], leaf[0].sign() * leaf[0].abs().mean())


def test_dp_sgd_against_a_loop_over_examples() -> None:
    task, data = make_task(), make_data()
    found = sent(DPSGD(clip=0.3, noise_multiplier=0).around(FedSGD(batch_size=4)))
    w = expand({name: leaf.double() for name, leaf in with_axis(task.init(0)).items()}, 2)
    batch = batch_in_step(data, 4, 0, ClientStreams(0, 1, (0, 1)))
    per_example = example_gradients(task, w, batch)
    for k, size in enumerate([4, 3]):
        total = {name: torch.zeros_like(leaf[k, 0]) for name, leaf in per_example.items()}
        for i in range(size):
            one = {name: leaf[k, i] for name, leaf in per_example.items()}
            length = math.sqrt(sum(float(leaf.square().sum()) for leaf in one.values()))
            for name in total:
                total[name] += one[name] * min(1.0, 0.3 * (1 - MARGIN) / length)
        for name, leaf in total.items():
            torch.testing.assert_close(found[name][k], leaf / size, rtol=1e-5, atol=1e-8)


def test_dp_sgd_declares_its_epsilon_and_noise_alone_declares_none() -> None:
    plan = Plan(4, 4, "all", 10, 100, 100)
    private = DPSGD(clip=1.0, noise_multiplier=2.0).around(FedSGD(batch_size=8))
    rows = account(private.releases(plan), plan, 1e-5)
    assert {row.unit for row in rows} == {"record"}
    for row in rows:
        assert row.epsilon is not None
        assert 5 < row.epsilon < 9  # ten Gaussian releases of multiplier 2
    noisy = GradientGaussian(std=10.0).around(FedSGD(batch_size=8))
    assert all(row.epsilon is None for row in account(noisy.releases(plan), plan, 1e-5))


def test_only_uploads_of_gradients_can_be_defended() -> None:
    with refuses("wrap.name"):
        GradientGaussian().around(FedAvg())
    with refuses("wrap.name"):
        DPSGD().around(FedEM())


def test_a_configuration_can_name_them() -> None:
    config = make_config(
        {"method": {"name": "fedsgd", "batch_size": 8}, "wrap": [{"name": "gradient-masking", "part": 0.5}]}
    )
    assert config.build_method().name == "fedsgd+gradient-masking"
    assert 'name = "gradient-masking"' in config.to_toml()
