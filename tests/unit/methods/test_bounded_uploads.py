"""The bound on the length of an upload: from the mechanism's own clip and noise, never below an honest upload."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats

from fedveil.experiment.config import build_method, wrap_method
from fedveil.methods.disclosure import BoundedUpload
from fedveil.methods.method import At
from fedveil.privacy.mechanisms import Gaussian, Unnoised
from fedveil.privacy.releases import Plan
from fedveil.streams import ClientStreams
from fedveil.task import Task
from tests.engines.configs import quick_config

PLAN = Plan(3, 3, "all", 2, 1, 9)
AT = At(PLAN, 1)


@pytest.mark.parametrize("dimension", [1, 2, 10, 1000, 10**6])
@pytest.mark.parametrize("multiplier", [0.01, 1.0, 30.0])
def test_the_tail_beyond_the_bound_is_that_small(dimension: int, multiplier: float) -> None:
    """Without the margin for rounding: the exact law of the norm of normal noise, against its bound."""
    mechanism = Gaussian(2.0, multiplier)
    bounded = BoundedUpload.of_values({"x": torch.zeros(1, dimension)}, mechanism)
    noise = (float(bounded.longest()[0]) / (1 + 2.0**-9) - mechanism.clip) / mechanism.std
    assert stats.chi2.sf(noise**2, dimension) <= 1e-12


def test_without_noise_the_bound_is_the_clip() -> None:
    bounded = BoundedUpload.of_values({"x": torch.ones(2, 4)}, Unnoised(2.0))
    assert bounded.lengths().tolist() == [2.0, 2.0]
    assert bounded.longest().tolist() == pytest.approx([2.0, 2.0], rel=3e-3)
    assert bool((bounded.lengths() <= bounded.longest()).all())
    assert BoundedUpload.of_values({"x": torch.ones(1, 4)}, Unnoised()).longest().tolist() == [math.inf]


BOUNDED: list[dict[str, Any]] = [
    {"name": "udp-fedavg", "noise_scope": "local"},
    {"name": "udp-fedavg", "noise_scope": "shared", "server_lr": 0.3},
    {"name": "ppsgd", "noise_multiplier": 0.1},
    {"name": "centaur"},
    {"name": "fedceo"},
    {"name": "dp-fedavg", "noise_scope": "central", "clip": 0.01},
    {"name": "dp-fedavg", "noise_scope": "local"},
    {"name": "dp-fedsgd", "record_rate": 0.5, "noise_multiplier": 0.1},
    {"name": "dp-fedags-proven", "variant": "everywhere"},
    {"name": "dp-fedags-proven", "variant": "public-mask"},
    {"name": "dp-fedags-proven", "variant": "top-k"},
]


def uploads(fields: dict[str, Any], seed: int) -> BoundedUpload | None:
    """What three clients with large gradients send, read by the server."""
    method = build_method(fields)
    task = Task(lambda: torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)))
    from fedveil.data.client_data import ClientData

    generator = torch.Generator().manual_seed(seed)
    x = 100 * torch.randn(3, 6, 5, generator=generator)
    data = ClientData(x, torch.randint(0, 3, (3, 6), generator=generator), torch.full((3,), 6))
    rng = ClientStreams(seed, 1, (0, 1, 2))
    down = method.broadcast(AT, method.init_server(task.init(0), PLAN), range(3))
    up, _ = method.client_update(task, AT, down, data, method.init_client(task, data, rng), rng)
    return method.bounded_upload(AT, down, up)


@pytest.mark.parametrize("fields", BOUNDED, ids=lambda fields: "-".join(str(v) for v in fields.values()))
def test_honest_uploads_are_within_the_bound(fields: dict[str, Any]) -> None:
    for seed in range(20):
        bounded = uploads(fields, seed)
        assert bounded is not None
        assert bool((bounded.lengths() <= bounded.longest()).all())


def test_the_bound_is_not_far_above_what_is_sent() -> None:
    """Else it would bound nothing: in many dimensions the noise has nearly one length."""
    mechanism = Gaussian(1.0, 1.0)
    noisy = Gaussian(1.0, 1.0)({"x": torch.zeros(1, 100_000)}, ClientStreams(0, 1, (0,)).noise())
    bounded = BoundedUpload.of_values(noisy, mechanism)
    assert float(bounded.longest()[0]) < 1.05 * float(bounded.lengths()[0])


@pytest.mark.parametrize("name", ["fedavg", "fedsgd", "scaffold", "dp-fedprox", "fedlap-dp"])
def test_methods_that_do_not_clip_what_is_sent_have_no_bound(name: str) -> None:
    method = quick_config(name).build_method()
    assert method.bounded_upload(AT, None, None) is None


def test_a_defence_that_changes_uploads_has_no_bound() -> None:
    method = wrap_method(build_method({"name": "fedsgd"}), [{"name": "gradient-gaussian", "std": 1.0}])
    assert method.bounded_upload(AT, None, None) is None
