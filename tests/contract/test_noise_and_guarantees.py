"""The noise that a method adds is the noise that its guarantee is computed from: both come from one mechanism."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedveil import METHODS
from fedveil.engines.worker import ClientWorker
from fedveil.experiment.config import wrap_method
from fedveil.methods.method import AnyMethod, At, field_names
from fedveil.privacy import noise
from fedveil.privacy.integer_mechanisms import CalibratedBinomial
from fedveil.privacy.mechanisms import Gaussian, GumbelTopK, SparseVector
from fedveil.privacy.noise import grid
from fedveil.privacy.releases import GaussianNoise, Unprotected
from fedveil.session.privacy_guard import privacy_statement
from fedveil.streams import ServerStreams
from tests.contract.federation import make_clients, make_method, make_plan, make_task
from tests.contract.test_privacy_gates import FORMS

ENTRY_POINTS = ("add_gaussian", "add_laplace", "add_discrete_gaussian", "add_binomial")
CLIENTS, ANSWERED = (0, 1, 3), (0, 3)  # one of the cohort does not answer, so the server owes its noise
DP_SGD = ("fedsgd", {"wrap": "dp-sgd"})


def made(name: str, fields: dict[str, Any]) -> AnyMethod:
    if name == "fedsgd":
        own = {key: value for key, value in fields.items() if key != "wrap"}
        return wrap_method(make_method(name), [{"name": fields["wrap"]} | own])
    one_step = {"epochs": 1} if name == "dp-fedags-proven" and fields.get("unit") == "record" else {}
    return make_method(name, **one_step | fields)


each_form = pytest.mark.parametrize(
    ("name", "fields"),
    [*FORMS, DP_SGD],
    ids=["-".join([name, *map(str, fields.values())]) for name, fields in [*FORMS, DP_SGD]],
)


@dataclass(frozen=True)
class Added:
    """The noise of one call, and the grid that value and noise were rounded to; 0 for integers."""

    noise: Tensor
    step: float


def noise_of_a_round(method: AnyMethod, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Added], list[Added]]:
    """What clients and what the server really added to their values in one round, in the order of the calls."""
    added: list[Added] = []

    def measured(draw: Callable[..., Any]) -> Callable[..., Any]:
        def call(value: Any, *rest: Any) -> Any:
            noisy = draw(value, *rest)
            pairs = (
                [(noisy[key], value[key]) for key in value] if isinstance(value, dict) else [(noisy, value)]
            )
            parts = [torch.as_tensor(after) - torch.as_tensor(before) for after, before in pairs]
            step = rest[2] if len(rest) > 2 else noise.grid_step(rest[0]) if isinstance(value, dict) else 0.0
            added.append(Added(torch.cat([part.double().flatten() for part in parts]), step))
            return noisy

        return call

    with monkeypatch.context() as patch:
        for name in ENTRY_POINTS:
            patch.setattr(noise, name, measured(getattr(noise, name)))
        task, plan = make_task(), make_plan()
        at, worker = At(plan, 1), ClientWorker(task, make_clients(), method, 0)
        server = method.init_server(task.init(0), plan)
        down = method.broadcast(at, server, CLIENTS)
        up, _ = worker.update(ANSWERED, down, {}, at)
        uploads = added.copy()
        added.clear()
        method.server_update(task, at, server, ANSWERED, up, ServerStreams(0, 1))
    return uploads, added


def proven(method: AnyMethod) -> list[float | None]:
    rows = privacy_statement(method, make_plan(), 1e-5).proven
    return [row.epsilon for row in rows]


def weaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halve the noise of every mechanism made after this call."""
    factors: list[tuple[type, dict[str, float]]] = [
        (Gaussian, {"multiplier": 0.5}),
        (GumbelTopK, {"epsilon": 2.0}),
        (SparseVector, {"epsilon_threshold": 2.0, "epsilon_questions": 2.0, "epsilon_answers": 2.0}),
        (CalibratedBinomial, {"epsilon": 2.0}),
    ]
    for kind, changes in factors:

        def halved(self: Any, check: Any = kind.__post_init__, changes: Any = changes) -> None:  # type: ignore[attr-defined]
            for field, factor in changes.items():
                object.__setattr__(self, field, factor * getattr(self, field))
            check(self)

        monkeypatch.setattr(kind, "__post_init__", halved)


def weaker(name: str, fields: dict[str, Any]) -> AnyMethod:
    """The method whose configuration asks for half of the noise."""
    known = set(field_names(METHODS[name])) | ({"noise_multiplier"} if name == "fedsgd" else set())
    if name == "cpsgd":
        return made(name, fields | {"epsilon": 2 * METHODS[name]().epsilon})  # type: ignore[attr-defined]
    if "upload_epsilon" in fields:
        return made(name, fields | {"upload_epsilon": 2 * fields["upload_epsilon"]})
    assert "noise_multiplier" in known
    return made(name, fields | {"noise_multiplier": 0.5})


@each_form
def test_half_of_the_noise_in_the_mechanism_is_half_of_the_noise_and_of_the_guarantee(
    name: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, expected = noise_of_a_round(made(name, fields), monkeypatch), proven(weaker(name, fields))
    stated = proven(made(name, fields))
    with monkeypatch.context() as patch:
        weaken(patch)
        after, found = noise_of_a_round(made(name, fields), patch), proven(made(name, fields))
    assert found == pytest.approx(expected)
    assert found != pytest.approx(stated)
    assert sum(len(part) for part in before) > 0
    for whole, half in zip(before, after, strict=True):
        assert len(whole) == len(half)
        for a, b in zip(whole, half, strict=True):
            if name == "cpsgd":  # its trials are fewer, by Theorem 1
                assert float(b.noise.std()) < 0.9 * float(a.noise.std())
            else:  # both are rounded, to half a step each
                assert b.step == 0.5 * a.step
                torch.testing.assert_close(b.noise, 0.5 * a.noise, rtol=1e-6, atol=b.step)


@each_form
def test_the_noise_that_is_added_is_the_noise_that_is_accounted_for(
    name: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draw is replaced by 1, so that what is added is the standard deviation itself."""
    if name == "cpsgd":
        pytest.skip("binomial noise: measured by the tests of its mechanism")
    method, plan = made(name, fields | {"clip": 0.5, "noise_multiplier": 3.0}), make_plan()
    releases = [r for r in method.releases(plan) if r.costs]
    if not all(isinstance(r.protection, GaussianNoise | Unprotected) for r in releases):
        pytest.skip("not Gaussian alone: measured by the tests of its mechanism")
    with monkeypatch.context() as patch:
        patch.setattr(grid, "rounded_normal", lambda value, std, _step, _stream: value + std)
        uploads, top_up = noise_of_a_round(method, patch)
    own = {round(float(std), 9) for part in uploads for std in part.noise}
    priced = {
        r.what: 0.5 * r.protection.multiplier for r in releases if isinstance(r.protection, GaussianNoise)
    }
    assert priced
    if all(r.unit == "record" for r in releases):  # every private step
        assert [*own] == pytest.approx([*set(priced.values())])
        assert not top_up
        return
    rest = math.fsum(float(part.noise.mean()) ** 2 for part in top_up)
    upload = math.fsum(own)
    total = math.sqrt(len(ANSWERED) * upload**2 + rest)
    if upload:
        assert upload == pytest.approx(next(iter(priced.values())))
    assert total == pytest.approx(_of_mean(priced))


def _of_mean(priced: dict[str, float]) -> float:
    return next(std for what, std in priced.items() if "mean of" in what or "averaged" in what)
