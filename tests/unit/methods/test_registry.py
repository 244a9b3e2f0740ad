"""Names are known before anything is loaded; each module registers what is said of it, and nothing else."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import pytest

import fedveil.methods
import fedveil.methods.wrappers
from fedveil.errors import InputError
from fedveil.methods import METHODS
from fedveil.methods.method import register
from fedveil.methods.registry import LazyRegistry
from fedveil.methods.wrappers import WRAPPERS


@pytest.mark.parametrize(
    ("package", "known"), [(fedveil.methods, METHODS), (fedveil.methods.wrappers, WRAPPERS)]
)
def test_every_module_registers_exactly_its_listed_names(package: object, known: object) -> None:
    assert isinstance(known, LazyRegistry)
    name = package.__name__  # type: ignore[attr-defined]
    for module in pkgutil.iter_modules(package.__path__):  # type: ignore[attr-defined]
        importlib.import_module(f"{name}.{module.name}")
    said = {(key, f"{name}.{module}") for key, module in package._MODULES}  # type: ignore[attr-defined]
    assert {(key, kind.__module__) for key, kind in known.items()} == said


def test_listing_names_loads_no_module() -> None:
    known: LazyRegistry[object] = LazyRegistry()
    known.offer({"a": "no.such.module"})
    assert list(known) == ["a"]
    assert "a" in known
    assert len(known) == 1
    with pytest.raises(ModuleNotFoundError):
        known["a"]
    assert "no.such.module" not in sys.modules


def test_a_method_that_is_not_loaded_yet_keeps_its_name() -> None:
    fedavg = METHODS["fedavg"]
    other = type("Other", (fedavg,), {"__module__": "somebody.elses"})
    known: LazyRegistry[object] = LazyRegistry()
    known.offer({"fedavg": "fedveil.methods.fedavg"})
    assert known.other("fedavg", "fedveil.methods.fedavg") is None
    made = register("fedavg", "", server=fedavg.server_type, down=fedavg.down_type, up=fedavg.up_type)
    with pytest.raises(InputError) as caught:
        made(other)
    assert caught.value.field == "name"
