"""The low bits of noisy uploads do not disclose whether a value was added to the noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fedveil import METHODS, Plan
from fedveil.audits.bits import KIND
from fedveil.audits.of_method import Audited, audit_method
from fedveil.methods.method import AnyMethod
from fedveil.privacy import noise
from fedveil.streams import Stream, normal
from fedveil.tree import Params
from tests.contract.test_privacy_gates import FORMS, quick

PLAN = Plan(20, 5, "fixed", 3, 50, 80)
DELTA = 1e-5

LEAKY: list[tuple[str, dict[str, Any], str]] = [
    ("udp-fedavg", {"noise_scope": "local", "noise_multiplier": 10.0}, "server"),
    ("dp-fedavg", {"noise_scope": "local", "noise_multiplier": 30.0}, "server"),
    ("dp-fedags-proven", {"noise_multiplier": 5.0}, "server"),
    ("dp-fedags-proven", {"variant": "everywhere", "noise_multiplier": 5.0}, "server"),
    ("dp-fedavg", {"noise_scope": "central", "noise_multiplier": 6.0}, "observer"),
]
"""Whose single uploads, or whose published model alone, floating-point noise gives away."""


def in_floating_point(
    value: Params, std: float, streams: Sequence[Stream], _step: float | None = None
) -> Params:
    """Straightforward noise, in floating point."""
    singles = {name: leaf.float() for name, leaf in value.items()}
    return {name: leaf + std * normal(streams, leaf.shape[1:], leaf) for name, leaf in singles.items()}


def bits_of(method: AnyMethod, samples: int = 400) -> dict[str, Audited]:
    """The rows of the audit that look at the bits, by adversary."""
    found = audit_method(method, PLAN, delta=DELTA, samples=samples)
    return {audited.adversary: audited for audited in found if audited.finding.kind == KIND}


def made(name: str, fields: dict[str, Any]) -> AnyMethod:
    settings = {key: value for key, value in (quick(name) | fields).items() if key != "name"}
    return METHODS[name](**settings)


@pytest.mark.parametrize(
    ("name", "fields"),
    FORMS,
    ids=lambda part: "-".join(map(str, part.values())) if isinstance(part, dict) else part,
)
def test_no_bits_distinguish_a_canary_from_noise_alone(name: str, fields: dict[str, Any]) -> None:
    found = bits_of(made(name, fields))
    assert found or name == "cpsgd"  # which sends whole numbers
    for audited in found.values():
        assert audited.finding.lower_bound < 0.2
        assert not audited.broken


@pytest.mark.parametrize(("name", "fields", "adversary"), LEAKY)
def test_floating_point_noise_is_distinguishable_and_noise_on_the_grid_is_not(
    name: str, fields: dict[str, Any], adversary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = bits_of(made(name, fields), samples=2000)[adversary]
    assert sound.finding.lower_bound == pytest.approx(0, abs=0.1)
    monkeypatch.setattr(noise, "add_gaussian", in_floating_point)
    leaky = bits_of(made(name, fields), samples=2000)[adversary]
    assert leaky.proven is not None
    assert leaky.finding.lower_bound > 2 > leaky.proven
    assert leaky.broken
