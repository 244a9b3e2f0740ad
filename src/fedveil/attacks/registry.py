"""Attacks by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from fedveil.attacks.view import Attack
from fedveil.errors import InputError, known_name, require_free, within
from fedveil.validation import refused

ATTACKS: dict[str, type[Attack]] = {}
A = TypeVar("A")
C = TypeVar("C")


@dataclass(frozen=True)
class AttackInfo:
    name: str
    summary: str
    options: tuple[str, ...]


def register_among(attacks: dict[str, type[A]], name: str, summary: str) -> Callable[[type[C]], type[C]]:
    """Register an attack under its name in `attacks`."""

    def add(attack: type[C]) -> type[C]:
        known = cast(Any, attack)
        require_free("attack", name, attack, attacks.get(name))
        known.name, known.summary = name, summary
        attacks[name] = known
        return attack

    return add


def register_attack(name: str, summary: str) -> Callable[[type[C]], type[C]]:
    """Register an attack under its name.

    Args:
        name: The name in configurations and on the command line.
        summary: A description of one line.

    Returns:
        A decorator that returns the class unchanged.
    """
    return register_among(ATTACKS, name, summary)


def attack_fields(attack: Any) -> tuple[str, ...]:
    """The names of an attack's settings, in their order."""
    return tuple(field.name for field in dataclasses.fields(attack))


def attack_settings(attack: Any) -> dict[str, Any]:
    """The settings of an attack by name."""
    return {name: getattr(attack, name) for name in attack_fields(attack)}


def list_attacks() -> list[AttackInfo]:
    """Every attack with its settings."""
    import fedveil.attacks.inversion.all  # noqa: F401  (registers them)

    return [AttackInfo(name, cls.summary, attack_fields(cls)) for name, cls in sorted(ATTACKS.items())]


def make_attack(name: str, settings: Mapping[str, Any] | None = None) -> Attack:
    """The attack of this name with these settings, validated.

    Args:
        name: One of `fedveil list attacks`.
        settings: Its fields.

    Returns:
        The attack.
    """
    list_attacks()
    return with_settings(ATTACKS[known_name("attack.name", "attack", name, ATTACKS)], settings)


def configured_attacks(
    sections: Sequence[Mapping[str, Any]],
    changes: Mapping[str, Any] | None = None,
    round: int | None = None,
    usual: str = "inverting-gradients",
) -> list[tuple[Attack, int]]:
    """The attacks of `[[attack]]` sections, each with its round; the default one if there are none."""
    planned = []
    for section in sections or [{"name": usual}]:
        fields = dict(section) | dict(changes or {})
        name, number = fields.pop("name", None), fields.pop("round", 1)
        if not isinstance(name, str) or not isinstance(number, int):
            raise InputError(
                "attack",
                dict(section),
                "needs a name, and a round that is a number",
                "Fix the [[attack]] section.",
            )
        with within("attack"):
            planned.append((make_attack(name, fields), round or number))
    return planned


def with_settings(kind: type[C], settings: Mapping[str, Any] | None) -> C:
    """An attack of this kind with validated settings."""
    try:
        return kind(**dict(settings or {}))
    except ValidationError as error:
        raise refused(error, "", attack_fields(kind)) from error
