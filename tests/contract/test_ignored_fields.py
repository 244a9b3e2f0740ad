"""Every field of every method takes effect, or the method names it as unused: no field is ignored silently.

A field is changed in the usual configuration and in every configuration that differs from it in one choice (of a
`Literal`, a bool, or an optional number). Either the tiny run changes somewhere (a message, the server, a release or
its price), or the change is refused, or `unused_fields` names the field. And a field that `unused_fields` names has no
effect. A number at which a mechanism is off, such as a noise multiplier of 0, is not a choice; 0 steps are one.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from fedveil import METHODS, ArrayClients, Plan, Task
from fedveil.engines.simulation import Simulation
from fedveil.errors import InputError
from fedveil.messages import Message, Record
from fedveil.methods.method import AnyMethod, At, field_names
from fedveil.methods.wrappers import WRAPPERS
from fedveil.methods.wrappers.wrapper import wrapper_fields
from fedveil.session.loop import Callback, RoundEnd, run_rounds
from tests.contract.federation import QUICK, make_method

SIDE, CLASSES, ROUNDS = 4, 3, 4
HELD = (
    (0, 1, 1, 0, 1),
    (0, 1) * 4 + (1,),
    (2, 2, 2),
    (2, 1) * 6 + (1,),
)  # unequal; no client holds all classes

# Values at which a field's effect shows in a run this small, in place of those of QUICK or of the method itself.
VISIBLE: dict[str, dict[str, Any]] = {
    "dp-fedags": {"epsilon": 1e4},  # the noise of the default alone chooses the coordinates
    "dp-fedags-proven": {"epochs": 1},  # the only number for records
    "fedceo": {"interval": 2},
    "feddm": {"spread": 0.01},  # a larger one ends at the radius
    "fedem": {"batch_size": 3, "rho_max": 0.5},
    "dp-fedsgd": {"record_rate": 0.5},
    "dp-fedavg": {"record_rate": 0.5},
}
# Other values of fields whose type does not say which.
OTHERS: dict[str, tuple[Any, ...]] = {
    "layers": ("last:1",),
    "labels": ("own", ((0,), (1,), (2,), (1, 2))),
    "augment": (("flip", "crop"),),
    "lam": (0.5,),
    "sensitivity": (0.5, "record"),
    "upload_epsilon": (3.0,),
    "classes_per_client": (2,),
    "rank": (1, 2),
    "local_steps": (3, 4),
    "server_batch": (2, 3),
    "records": (4,),
    "radius_examples": (1, 2, 6),
    "radius": (1e-3,),
    "rho_min": (0.25,),
    "clip": (0.01,),
}
STEPS = ("model_updates", "perturbation_steps")  # of which 0 is a choice


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(8, 5), nn.Sigmoid(), nn.Linear(5, CLASSES)
    ).double()


@cache
def clients() -> ArrayClients:
    generator = torch.Generator().manual_seed(3)
    pairs = []
    for held in HELD:
        y = torch.tensor(held)
        x = torch.randn(len(y), 1, SIDE, SIDE, generator=generator, dtype=torch.float64)
        pairs.append((x + y[:, None, None, None], y))
    return ArrayClients.from_arrays(pairs)


class Trace(Callback):
    """What a run sends and what its server holds."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def add(self, record: Record | None) -> None:
        if record is not None:
            self.seen.append({name: leaf.clone() for name, leaf in record.tensors().items()})
            self.seen.append(str(record.head()))

    def exchange_ends(self, at: At, cohort: Any, down: Message, up: Message | None) -> None:
        self.add(down)
        self.add(up)

    def round_ends(self, end: RoundEnd) -> None:
        self.add(end.server)


def trace(method: AnyMethod) -> list[Any] | None:
    """A run with this method and what it releases; None if it is refused."""
    sizes = [len(held) for held in HELD]
    plan = Plan(len(sizes), len(sizes) - 1, "fixed", ROUNDS, min(sizes), max(sizes))
    task, seen = Task(network), Trace()
    engine = Simulation(task, clients(), method, plan, seed=0)
    try:
        method.check_clients(task, clients())
        start = method.init_server(task.init(0), plan)
        run_rounds(task, method, engine, plan, start, seed=0, callbacks=[seen])
        return [*seen.seen, str(method.releases(plan)), method.paper_claim(plan)]
    except InputError:
        return None
    finally:
        engine.close()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def choices(kind: Any) -> list[Any]:
    """The values that a type lists: of a Literal or a bool."""
    if get_origin(kind) is Annotated:
        return choices(get_args(kind)[0])
    if kind is bool:
        return [False, True]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return [value for part in get_args(kind) for value in choices(part)]
    return []


class Examined:
    """A registered class with fields, and the traces of its configurations."""

    def __init__(self, name: str, kind: Any, fields: list[str], start: Mapping[str, Any]) -> None:
        self.name, self.kind, self.fields, self.start = name, kind, fields, dict(start)
        self.types = get_type_hints(kind, include_extras=True)
        self._traces: dict[str, list[Any] | None] = {}

    def method(self, made: Any) -> AnyMethod:
        method: AnyMethod = made
        return method

    def build(self, setting: Mapping[str, Any]) -> Any:
        """None where the combination is refused."""
        try:
            return self.kind(**setting)
        except (InputError, ValidationError):
            return None

    def trace(self, made: Any) -> list[Any] | None:
        key = str(sorted(dataclasses.asdict(made).items()))
        if key not in self._traces:
            self._traces[key] = trace(self.method(made))
        return self._traces[key]

    def others(self, field: str, now: Any) -> Iterator[Any]:
        """Other values of a field than the one it has."""
        yield from (v for v in (*OTHERS.get(field, ()), *choices(self.types[field])) if v != now)
        if isinstance(now, bool) or field in OTHERS:
            return
        if isinstance(now, int):
            yield now + 1
        elif isinstance(now, float) and math.isfinite(now):
            yield from (now / 2, now * 2) if now else (0.5,)

    def choices(self) -> Iterator[dict[str, Any]]:
        """The usual fields with one choice made otherwise."""
        usual = self.kind(**self.start)
        for field in self.fields:
            now = getattr(usual, field)
            if choices(self.types[field]) or now is None:
                yield from (self.start | {field: value} for value in self.others(field, now))
            elif field in STEPS:
                yield self.start | {field: 0}

    def effects(self, setting: Mapping[str, Any]) -> Iterator[tuple[str, bool, bool]]:
        """Of each field that may be changed in a setting: its name, if it has an effect, if it is named as unused."""
        made = self.build(setting)
        plain = None if made is None else self.trace(made)
        if plain is None:
            return
        for field in self.fields:
            effect, named = [], []
            for value in self.others(field, getattr(made, field)):
                changed = self.build({**setting, field: value})
                if changed is None:
                    continue
                seen = self.trace(changed)
                effect.append(seen is None or not same(plain, seen))
                named.append(field in self.method(changed).unused_fields())
                if effect[-1] and not named[-1]:
                    break
            if effect:
                yield field, any(effect), all(named)

    def wrong(self, settings: Iterable[Mapping[str, Any]]) -> list[str]:
        """Fields that are ignored without being named, or that are named and have an effect."""
        return [
            f"{field} {'has an effect' if effect else 'is ignored'} with {setting}"
            for setting in settings
            for field, effect, named in self.effects(setting)
            if effect == named
        ]


class ExaminedWrapper(Examined):
    def method(self, made: Any) -> AnyMethod:
        around: AnyMethod = made.around(make_method("fedsgd"))
        return around


def examined(name: str) -> Examined:
    fields = field_names(METHODS[name])
    usual = {key: value for key, value in (QUICK | VISIBLE.get(name, {})).items() if key in fields}
    return Examined(name, METHODS[name], fields, usual)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_no_field_of_a_method_is_ignored_silently(name: str) -> None:
    method = examined(name)
    assert method.wrong([method.start]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS))
def test_no_field_is_ignored_silently_after_another_choice(name: str) -> None:
    method = examined(name)
    assert method.wrong(method.choices()) == []


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_no_field_of_a_wrapper_is_ignored_silently(name: str) -> None:
    wrapper = ExaminedWrapper(name, WRAPPERS[name], wrapper_fields(WRAPPERS[name]), {})
    assert wrapper.wrong([wrapper.start, *wrapper.choices()]) == []
