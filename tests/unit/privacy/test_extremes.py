"""Extreme numbers: refused with field, value and remedy, or accounted for; never a traceback or a wrong epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedveil.errors import InputError
from fedveil.experiment.config import make_config
from fedveil.methods import METHODS
from fedveil.methods.method import field_names
from fedveil.privacy.accounting import Guarantee, account, account_participation
from fedveil.privacy.releases import (
    ApproximateDP,
    GaussianNoise,
    LaplaceNoise,
    Plan,
    Protection,
    PureDP,
    RandomGaussianNoise,
    Release,
    ZeroConcentratedDP,
)

NOISY = sorted(name for name, method in METHODS.items() if "noise_multiplier" in field_names(method))
SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))

edges = st.sampled_from(
    [
        0.0,
        -1.0,
        5e-324,
        1e-300,
        1e-200,
        2.0**-30,
        1e-9,
        1e-8,
        1.0,
        1e8,
        2.0**30,
        1e200,
        1.7e308,
        math.inf,
        math.nan,
    ]
)
numbers = edges | st.floats(-308, 308).map(lambda power: 10.0**power)
sizes = st.sampled_from([-1, 0, 1, 2, 10, 1000, 10**7, 10**9, 10**12, 10**18, 10**30])
rates = st.sampled_from([0.0, 5e-324, 1e-300, 1e-12, 1e-6, 0.5, 1.0, 2.0, math.nan]) | numbers


def _protection(kind: str, value: float) -> Protection:
    match kind:
        case "gaussian":
            return GaussianNoise(value)
        case "random":
            return RandomGaussianNoise((value, 1.0), (0.5, 0.5))
        case "laplace":
            return LaplaceNoise(value)
        case "pure":
            return PureDP(value)
        case "approximate":
            return ApproximateDP(value, 1e-9)
    return ZeroConcentratedDP(value)


kinds = st.sampled_from(["gaussian", "random", "laplace", "pure", "approximate", "zcdp"])


def _require_sound(rows: Iterable[Guarantee]) -> None:
    for row in rows:
        assert row.epsilon is None or (math.isfinite(row.epsilon) and row.epsilon >= 0), row


def _refused_or_sound(rows: Callable[[], Iterable[Guarantee]]) -> None:
    """Whatever happens is either an error that a user can act on or a number that can be true."""
    refused = None
    try:
        _require_sound(rows())
    except InputError as error:
        refused = error
    assert refused is None or (refused.field and refused.remedy)


@settings(SETTINGS, max_examples=200)
@given(
    kind=kinds,
    value=numbers,
    rate=rates,
    accesses=sizes,
    unit=st.sampled_from(["record", "client"]),
    participation=st.sampled_from(["seen", "hidden", "charged"]),
    sampler=st.sampled_from(["poisson", "fixed", "all"]),
    clients=sizes,
    rounds=sizes,
    delta=st.sampled_from([1e-300, 1e-12, 1e-5, 0.5]),
)
def test_the_accountant_refuses_or_bounds_extreme_numbers(
    kind: str, value: float, rate: float, accesses: int, clients: int, rounds: int, delta: float, **words: Any
) -> None:
    sampler = words.pop("sampler")

    def rows() -> Iterable[Guarantee]:
        plan = Plan(clients, min(10, clients), sampler, rounds)
        release = Release(
            "x",
            visible_to=("server",),
            protection=_protection(kind, value),
            rate=rate if words["unit"] == "record" else 1.0,
            accesses=accesses,
            **words,
        )
        return [*account([release], plan, delta), *account_participation([release], plan, delta)]

    _refused_or_sound(rows)


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("value", [1e-200, 1e200, 5e-324, 9e-10, 1.1e9, -1.0, math.nan, math.inf])
def test_a_multiplier_that_cannot_be_added_is_refused_by_configuration(name: str, value: float) -> None:
    with pytest.raises(InputError) as refused:
        make_config({"method": {"name": name, "noise_multiplier": value}})
    assert refused.value.field == "method.noise_multiplier"
    assert refused.value.value is value


def test_the_smallest_and_largest_multipliers_are_accounted_for() -> None:
    plan = Plan(100, 10, "poisson", 50)
    smallest, small, large = (
        make_config({"method": {"name": "udp-fedavg", "noise_multiplier": value}}).build_method()
        for value in (2.0**-30, 2.0**-13, 2.0**30)
    )
    with pytest.raises(InputError) as refused:  # float32 does not hold update and noise
        smallest.releases(plan)
    assert refused.value.field == "noise_multiplier"
    _require_sound(account(small.releases(plan), plan, 1e-5))
    for row in account(large.releases(plan), plan, 1e-5):
        assert row.epsilon is not None
        assert row.epsilon < 1e-3


def _numeric_fields(name: str) -> dict[str, type]:
    found: dict[str, type] = {}
    for field, hint in get_type_hints(METHODS[name]).items():
        for kind in (int, float):
            if field in field_names(METHODS[name]) and hint in (kind, kind | None):
                found[field] = kind
    return found


@SETTINGS
@given(data=st.data())
def test_every_method_refuses_or_bounds_extreme_fields(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(METHODS)))
    fields = _numeric_fields(name)
    chosen = data.draw(st.lists(st.sampled_from(sorted(fields)), max_size=2, unique=True)) if fields else []
    values = {field: data.draw(sizes if fields[field] is int else numbers) for field in chosen}
    plan = Plan(
        1000,
        data.draw(st.sampled_from([1, 10, 1000])),
        data.draw(st.sampled_from(["poisson", "fixed"])),
        data.draw(st.sampled_from([1, 10**9])),
        data.draw(st.sampled_from([1, 10**12])),
        10**12,
    )

    def rows() -> Iterable[Guarantee]:
        method = make_config({"method": {"name": name, **values}}).build_method()
        return account(method.releases(plan), plan, 1e-5)

    _refused_or_sound(rows)
