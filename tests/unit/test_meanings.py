"""Every key that somebody can set says what it means, and what it may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedveil.attacks.membership.all import list_membership_attacks
from fedveil.attacks.registry import ATTACKS, list_attacks
from fedveil.data import options as of_data
from fedveil.data.registry import dataset_loader, dataset_options, list_datasets, load_dataset
from fedveil.errors import InputError
from fedveil.experiment.config import Config
from fedveil.experiment.sections import SECTIONS
from fedveil.methods import METHODS
from fedveil.methods.describe import Described, describe_fields, describe_options
from fedveil.methods.wrappers import WRAPPERS
from fedveil.models import options as of_models
from fedveil.models.registry import list_models, model_options

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


OPTIONS: dict[str, list[Described]] = {
    f"datasets {info.name}": describe_options(
        dataset_loader(info.name), dataset_options(info.name), of_data.OPTIONS
    )
    for info in list_datasets()
} | {
    f"models {entry.name}": describe_options(entry.build, model_options(entry.name), of_models.OPTIONS)
    for entry in list_models()
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_a_meaning_and_values(name: str) -> None:
    for option in OPTIONS[name]:
        assert option.meaning, f"{name}: {option.name} does not say what it means"
        assert option.values not in ("", "a value"), f"{name}: {option.name} does not say what it may be"
        if "number" in option.values and option.name != "target":
            assert ">" in option.values, f"{name}: {option.name} does not say its bounds"


def test_no_meaning_is_of_an_option_that_there_is_not() -> None:
    for kind, known in (("datasets", of_data.OPTIONS), ("models", of_models.OPTIONS)):
        taken = {option.name for name, told in OPTIONS.items() if name.startswith(kind) for option in told}
        assert set(known) == taken


@pytest.mark.parametrize(
    "option", ["max_train", "pad_to", "seed", "test_fraction", "rows_per_person", "limit"]
)
def test_numbers_beyond_the_declared_bounds_are_refused(option: str, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("who,age,ill\n" + "".join(f"p{k % 20},{k % 7}.5,{k % 2}\n" for k in range(60)))
    name: str = "digits"
    more: dict[str, Any] = {}
    if option in ("rows_per_person", "limit"):
        name, more = "table", {"path": table, "label": "ill", "person": "who"}
    for wrong in (-1, 1.5 if option != "limit" else 0.0):
        with pytest.raises(InputError) as refused:
            load_dataset(name, **{**more, option: wrong})
        assert refused.value.field == option


def test_every_section_is_listed() -> None:
    by_name = {"method", "wrap", "attack", "version"}  # listed as methods, wrappers and attacks
    assert set(Config.model_fields) - by_name == {name for name in SECTIONS if "." not in name}
