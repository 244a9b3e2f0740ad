"""A small federation that every method can be run on in a moment: unequal clients, dropout, double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedveil import METHODS, ArrayClients, Plan, Task
from fedveil.methods.method import AnyMethod, field_names
from fedveil.privacy.releases import Sampler
from fedveil.session.loop import Callback, RoundEnd
from fedveil.tree import Params

FEATURES, CLASSES = 6, 3
SIZES = (5, 9, 1, 12, 7)

# Small enough to be quick; a field that a method does not have is left out.
QUICK: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 4,
    "lr": 0.1,
    "ipc": 1,
    "trajectories": 1,
    "max_steps": 2,
    "real_batches": 1,
    "image_updates": 2,
    "model_updates": 1,
    "image_lr": 0.1,
    "radius": 1.5,
    "server_steps": 4,
    "matching_steps": 3,
    "augment": (),
}

# What a private method becomes without noise and clipping: the method it privatises, with these fields.
BASELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp-fedags-proven": ("fedavg", {"weighting": "uniform"}),
    "dp-fedavg": ("fedavg", {"weighting": "uniform"}),
    "udp-fedavg": ("fedavg", {"weighting": "uniform"}),
    "fedlap-dp": ("fedlap", {"radius_strategy": "constant", "weighting": "uniform"}),
    # These have no namesake on the same batches: themselves, with a clip that no gradient reaches.
    "psg": ("psg", {"noise_multiplier": 0.0, "clip": 1e6}),
    "dp-fedsgd": ("dp-fedsgd", {"noise_multiplier": 0.0, "clip": 1e6}),
    "dp-fedprox": ("dp-fedprox", {"noise_multiplier": 0.0, "clip": 1e6}),
    "fedceo": ("fedavg", {"weighting": "uniform"}),
}

# Fields with which a method sends all of its update, where it does not by default.
WHOLE_UPDATE: dict[str, dict[str, Any]] = {"dp-fedags-proven": {"selected": 1.0}}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(FEATURES, 8), nn.Dropout(0.25), nn.ReLU(), nn.Linear(8, CLASSES, bias=False)
    ).double()


class Wrapped(nn.Module):
    """The same network in a form that no closed-form kernel recognises."""

    def __init__(self, build: Callable[[], nn.Module] = network) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


class Scaled(Wrapped):
    """The same network with a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(x)


def make_task(*, generic: bool = False) -> Task:
    return Task(Wrapped if generic else network)


def make_clients(sizes: tuple[int, ...] = SIZES) -> ArrayClients:
    generator = torch.Generator().manual_seed(7)
    pairs = []
    for n in sizes:
        y = torch.randint(0, CLASSES, (n,), generator=generator)
        x = torch.randn(n, FEATURES, generator=generator, dtype=torch.float64) + y[:, None]
        pairs.append((x, y))
    return ArrayClients.from_arrays(pairs)


def make_method(name: str, **fields: Any) -> AnyMethod:
    known = set(field_names(METHODS[name]))
    quick = {key: value for key, value in QUICK.items() if key in known}
    return METHODS[name](**(quick | fields))


def make_plan(
    sizes: tuple[int, ...] = SIZES, cohort: int = 3, rounds: int = 3, sampler: Sampler = "fixed"
) -> Plan:
    return Plan(len(sizes), cohort, sampler, rounds, max(1, min(sizes)), max(sizes))


def distance(a: Params, b: Params) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


class StopsAfter(Callback):
    """Interrupts a run at the end of a round."""

    def __init__(self, round: int) -> None:
        self._round = round

    def round_ends(self, end: RoundEnd) -> None:
        if end.at.round == self._round:
            raise KeyboardInterrupt
