"""Every key that somebody can set says what it means, and what it may be."""

from __future__ import annotations

import pytest

from fedveil.attacks.membership.all import list_membership_attacks
from fedveil.attacks.registry import ATTACKS, list_attacks
from fedveil.methods import METHODS
from fedveil.methods.describe import describe_fields
from fedveil.methods.wrappers import WRAPPERS

list_attacks()
KINDS = {
    **{f"method {name}": kind for name, kind in METHODS.items()},
    **{f"wrapper {name}": kind for name, kind in WRAPPERS.items()},
    **{f"attack {name}": kind for name, kind in ATTACKS.items()},
    **{f"attack {kind.name}": kind for kind in list_membership_attacks()},
}


@pytest.mark.parametrize("name", KINDS)
def test_every_field_has_a_meaning_and_values(name: str) -> None:
    for field in describe_fields(KINDS[name]):
        assert field.meaning, f"{name}: {field.name} does not say what it means"
        assert field.values not in ("", "a value"), f"{name}: {field.name} does not say what it may be"
