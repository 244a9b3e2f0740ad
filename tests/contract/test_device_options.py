"""Options of methods, networks of convolutions, wrappers and attacks, on the simulated device of `device.py`."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedveil import METHODS, ArrayClients, Task, make_model
from fedveil.attacks.registry import ATTACKS, attack_fields, list_attacks
from fedveil.attacks.view import ServerView, image_box
from fedveil.errors import InputError
from fedveil.methods.method import field_names
from fedveil.methods.wrappers import WRAPPERS
from fedveil.task import Batch
from fedveil.tree import expand, with_axis
from tests.contract.device import DEVICE, Elsewhere, other_device
from tests.contract.federation import CLASSES, SIZES, Wrapped, make_method, network
from tests.contract.test_device import trained

SHAPE = (1, 16, 16)
LOCAL = {
    "momentum",
    "weight_decay",
    "lr_schedule",
    "local_steps",
    "last_batch",
}  # shared by most: of FedAvg only
VALUES: dict[str, Any] = {
    "momentum": 0.9,
    "weight_decay": 0.1,
    "local_steps": 3,
    "batch_size": 64,
    "server_batch": 2,
    "server_lr": 0.5,
    "radius_examples": 2,
    "rank": 2,
    "records": 12,
    "lam": 0.1,
    "interval": 1,
    "classes_per_client": 1,
    "real_batches": 2,
    "squared_weight": 0.1,
    "lr_floor": 0.01,
    "block": 2,
}
TOGETHER: dict[str, dict[str, Any]] = {  # values that need others
    "sparse-vector": {"upload_epsilon": 1.0},
    "record": {"epochs": 1},
}


def alternatives(name: str) -> Iterator[tuple[str, Any]]:
    """Every choice among names, both answers to a question, and `VALUES`, apart from the defaults."""
    hints = typing.get_type_hints(METHODS[name])
    for field in field_names(METHODS[name]):
        if field in LOCAL and name != "fedavg":
            continue
        found = [*_choices(hints[field]), *(value for known, value in VALUES.items() if known == field)]
        yield from ((field, value) for value in found if value != getattr(METHODS[name], field, None))


def _choices(hint: Any) -> list[Any]:
    kind = typing.get_origin(hint)
    if kind is typing.Literal:
        return list(typing.get_args(hint))
    if kind in (typing.Union, types.UnionType):
        return [value for part in typing.get_args(hint) for value in _choices(part)]
    return [True, False] if hint is bool else []


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_option_computes_on_the_tasks_device(name: str) -> None:
    tried = 0
    for field, value in alternatives(name):
        others = TOGETHER.get(value, {}) if field in ("variant", "unit") else {}
        with other_device():
            there = trained(make_method(name, **{field: value}, **others), Task(network, device=DEVICE))
        assert all(isinstance(leaf, Elsewhere) for leaf in there.values()), (field, value)
        tried += 1
    assert tried


def images() -> ArrayClients:
    generator = torch.Generator().manual_seed(7)
    labels = [torch.randint(0, CLASSES, (n,), generator=generator) for n in SIZES]
    return ArrayClients.from_arrays(
        [(torch.rand(len(y), *SHAPE, generator=generator, dtype=torch.float64), y) for y in labels]
    )


def blocks() -> nn.Module:
    return make_model("convnet", SHAPE, CLASSES, width=4, blocks=2).double()


def convolutions() -> nn.Module:
    return make_model("lenet-zhu", SHAPE, CLASSES).double()


@pytest.mark.parametrize(
    ("name", "build"),
    [
        *((name, blocks) for name in ("dsc", "feddm", "fedlap", "fedlap-dp", "psg")),
        *((name, convolutions) for name in ("dp-fedavg", "dp-fedsgd", "fedavg", "fedem", "fedsgd")),
    ],
)
def test_networks_of_convolutions_are_trained_on_the_tasks_device(
    name: str, build: Callable[[], nn.Module]
) -> None:
    known = field_names(METHODS[name])
    augment = {"augment": ("flip", "crop", "cutout", "scale", "rotate", "brightness", "contrast")}
    method = make_method(name, **{key: value for key, value in augment.items() if key in known})
    with other_device():
        there = trained(method, Task(build, device=DEVICE), images(), "one-by-one")
    assert all(isinstance(leaf, Elsewhere) for leaf in there.values())


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_wrappers_compute_on_the_tasks_device(name: str) -> None:
    with other_device():
        there = trained(WRAPPERS[name]().around(make_method("fedsgd")), Task(network, device=DEVICE))
    assert all(isinstance(leaf, Elsewhere) for leaf in there.values())


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.Sigmoid(), nn.Linear(8, CLASSES)).double()


def unknown() -> nn.Module:
    return Wrapped(convolutions)


@pytest.mark.parametrize("build", [convolutions, linear, unknown])
@pytest.mark.parametrize("examples", [1, 2])
@pytest.mark.parametrize(
    "name", sorted({one.name for one in list_attacks() if not ATTACKS[one.name].of_texts} - {"gias"})
)
def test_inversion_attacks_search_on_the_device_of_the_gradient(
    name: str, examples: int, build: Callable[[], nn.Module]
) -> None:
    """Without gias, whose generator's parameters are in single precision."""
    attack = ATTACKS[name]
    quick = {field: 2 for field in attack_fields(attack) if field in ("steps", "restarts")}

    def found(device: torch.device) -> Any:
        generator = torch.Generator().manual_seed(0)
        task = Task(build, device=device)
        params = task.init(0)
        x = torch.rand(2, examples, *SHAPE, generator=generator, dtype=torch.float64).to(device)
        y = torch.randint(CLASSES, (2, examples), generator=generator).to(device)
        observed = task.grad(expand(with_axis(params), 2), Batch(x, y))
        low, high = image_box((0.0,), (1.0,))
        view = ServerView(task, params, observed, examples, SHAPE, CLASSES, (low.to(device), high.to(device)))
        return attack(**quick)(view, np.random.default_rng(0)).images

    try:
        here = found(torch.device("cpu"))
    except InputError:
        pytest.skip("the attack does not know such networks or batches")
    with other_device():
        there = found(DEVICE)
    assert isinstance(there, Elsewhere)
    assert there.shape == here.shape
