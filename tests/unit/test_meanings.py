"""Every key that somebody can set says what it means, and what it may be."""

from __future__ import annotations

import pytest

from fedveil.attacks.membership.all import list_membership_attacks
from fedveil.attacks.registry import ATTACKS, list_attacks
from fedveil.experiment.config import Config
from fedveil.experiment.sections import SECTIONS
from fedveil.methods import METHODS
from fedveil.methods.describe import describe_fields
from fedveil.methods.wrappers import WRAPPERS

list_attacks()
KINDS = {
    **{f"method {name}": kind for name, kind in METHODS.items()},
    **{f"wrapper {name}": kind for name, kind in WRAPPERS.items()},
    **{f"attack {name}": kind for name, kind in ATTACKS.items()},
    **{f"attack {kind.name}": kind for kind in list_membership_attacks()},
    **{f"section {name}": kind for name, kind in SECTIONS.items()},
}


@pytest.mark.parametrize("name", KINDS)
def test_every_field_has_a_meaning_and_values(name: str) -> None:
    for field in describe_fields(KINDS[name]):
        assert field.meaning, f"{name}: {field.name} does not say what it means"
        assert field.meaning.endswith((".", ":", "?")), f"{name}: {field.name}: {field.meaning}"
        assert not field.meaning.split()[0].isalpha() or field.meaning[0].isupper() or "_" in field.meaning, (
            name
        )
        assert field.values not in ("", "a value"), f"{name}: {field.name} does not say what it may be"


def test_every_section_is_listed() -> None:
    by_name = {"method", "wrap", "attack", "version"}  # listed as methods, wrappers and attacks
    assert set(Config.model_fields) - by_name == {name for name in SECTIONS if "." not in name}
