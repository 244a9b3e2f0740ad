"""Attacks by one record: values that overflow, that vanish or that are no numbers must not show that it is there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedveil
from fedveil import METHODS, ArrayClients, SecureSum, Task
from fedveil.engines.worker import ClientWorker
from fedveil.errors import DivergedError
from fedveil.methods.dp_fedsgd import DPFedSGD
from fedveil.methods.method import AnyMethod, At
from fedveil.methods.secure import securely_aggregated
from fedveil.privacy import noise
from fedveil.session.privacy_guard import unit_of
from fedveil.streams import ServerStreams
from tests.contract.federation import CLASSES, FEATURES, make_plan
from tests.contract.test_noise_and_guarantees import DP_SGD, made
from tests.contract.test_privacy_gates import FORMS

VICTIM, COHORT, SIZES = 1, (0, 1, 3), (5, 12, 1, 12, 7)
HUGE = 3e38
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "huge": lambda x: torch.full_like(x, HUGE),
    "huge of both signs": lambda x: HUGE * torch.tensor([1.0, -1.0]).repeat(len(x) // 2),
    "large": lambda x: 1e19 * x.sign(),
    "denormal": lambda x: torch.full_like(x, 1e-45),
    "infinite": lambda x: torch.full_like(x, math.inf),
    "no number": lambda x: torch.full_like(x, math.nan),
}


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


class Unrecognised(nn.Module):
    """The same network in a form that no closed form of whole networks recognises."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def clients(first: Callable[[Tensor], Tensor] | None = None) -> ArrayClients:
    """Clients of whom one holds an adversarial record, its first: padding repeats it."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(SIZES), FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (len(x),), generator=generator)
    found = ArrayClients(x, y, list(torch.arange(len(x)).split(SIZES)))
    if first is not None:  # a node does not check its data again once it has joined
        place = int(found.parts[VICTIM][0])
        found.x[place] = first(found.x[place])
    return found


def released(
    method: AnyMethod, task: Task, held: ArrayClients, patch: pytest.MonkeyPatch
) -> list[dict[str, Tensor]]:
    """What the clients of a round give to the mechanism that adds noise, before the noise, in the order of calls."""
    given: list[dict[str, Tensor]] = []

    def watched(draw: Callable[..., Any]) -> Callable[..., Any]:
        def call(value: Any, *rest: Any) -> Any:
            rows = value if isinstance(value, dict) else {"row": torch.as_tensor(value)[None]}
            given.append({name: leaf.clone() for name, leaf in rows.items()})
            return draw(value, *rest)

        return call

    plan = make_plan(SIZES)
    with patch.context() as within:
        for name in ("add_gaussian", "add_laplace"):
            within.setattr(noise, name, watched(getattr(noise, name)))
        server = method.init_server(task.init(0), plan)
        down = method.broadcast(At(plan, 1), server, COHORT)
        worker = ClientWorker(task, held, method, 0, deployed=True)
        up, _ = worker.update(COHORT, down, {}, At(plan, 1))
    floats = [leaf for leaf in up.tensors().values() if leaf.is_floating_point()]
    assert all(bool(leaf.isfinite().all()) for leaf in floats)
    after = method.server_update(task, At(plan, 1), server, COHORT, up, ServerStreams(0, 1))
    assert all(bool(leaf.isfinite().all()) for leaf in method.model(after).values())
    return given


def norms(rows: dict[str, Tensor], less: dict[str, Tensor] | None = None) -> Tensor:
    """The norms of the rows, or of their differences."""
    moved = (
        rows if less is None else {name: leaf.double() - less[name].double() for name, leaf in rows.items()}
    )
    parts = [leaf.double().reshape(len(leaf), -1) for leaf in moved.values()]
    found: Tensor = torch.cat(parts, 1).norm(dim=1)
    return found


@pytest.mark.parametrize("model", [network, Unrecognised])
@pytest.mark.parametrize(
    ("name", "fields"),
    [*FORMS, DP_SGD],
    ids=["-".join([name, *map(str, fields.values())]) for name, fields in [*FORMS, DP_SGD]],
)
def test_an_adversarial_record_moves_what_is_released_by_no_more_than_the_sensitivity(
    name: str, fields: dict[str, Any], model: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    method, task = made(name, fields), Task(model)
    usual = released(method, task, clients(), monkeypatch)
    clip = float(getattr(method, "clip", getattr(getattr(method, "defence", None), "clip", 1.0)))
    for kind, adversarial in VALUES.items():
        found = released(method, task, clients(adversarial), monkeypatch)
        if not found or next(iter(found[0].values())).shape[0] != len(COHORT):
            continue  # noise that is not added row by row to bounded vectors
        moved = norms(found[0], usual[0])
        assert int((moved > 0).sum()) <= 1, kind  # the others' rows keep every bit
        assert float(moved.max()) <= 2 * clip, kind
        if unit_of(method, make_plan(SIZES)) == "client":
            assert float(norms(found[0]).max()) <= clip, kind


@pytest.mark.parametrize("model", [network, Unrecognised])
@pytest.mark.parametrize("name", ["dp-fedsgd", "udp-fedavg", "fedlap-dp", "cpsgd"])
def test_a_run_with_secret_noise_ends_alike_with_and_without_an_adversarial_record(
    name: str, model: type[nn.Module]
) -> None:
    small = {"record_rate": 1.0} if name == "dp-fedsgd" else {"epochs": 1} if name != "fedlap-dp" else {}
    if name == "fedlap-dp":
        small = {"ipc": 1, "trajectories": 1, "max_steps": 1, "real_batches": 1, "image_lr": 0.1}
    for first in (None, VALUES["huge of both signs"]):
        result = fedveil.run(Task(model), clients(first), METHODS[name](**small), rounds=2, noise="entropy")
        assert result.summary["rounds"] == 2
        assert all(bool(leaf.isfinite().all()) for leaf in result.model.values())


@pytest.mark.parametrize("model", [network, Unrecognised])
def test_a_secure_sum_of_records_is_noisy_whatever_a_record_holds(model: type[nn.Module]) -> None:
    method = securely_aggregated(DPFedSGD(record_rate=1.0), SecureSum())
    held = clients(VALUES["no number"])
    result = fedveil.run(Task(model), held, method, rounds=1, noise="entropy")
    assert all(bool((leaf != 0).any()) for leaf in result.model.values())
    with pytest.raises(DivergedError):
        fedveil.run(Task(model), held, method, rounds=1, noise="seeded")
