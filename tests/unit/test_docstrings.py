"""Public names say what they take and give back, and every guarantee names a test that exists."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic.dataclasses import is_pydantic_dataclass

import fedveil
from fedveil.methods.describe import describe_fields
from fedveil.methods.method import Method

ROOT = Path(__file__).parents[2]
GUARANTEES = (
    "account",
    "Binomial",
    "ClientStreams",
    "clip_rows",
    "DiscreteGaussian",
    "epsilon_of",
    "Gaussian",
    "gaussian",
    "GumbelTopK",
    "Laplace",
    "privacy_statement",
    "PrivacySettings",
    "run",
    "SecureSum",
    "SparseVector",
)


def public() -> Iterator[tuple[str, Any]]:
    """What `fedveil` exports and what the page of public names lists of its modules."""
    found = {name: getattr(fedveil, name) for name in fedveil.__all__}
    page = (ROOT / "docs" / "api.md").read_text().partition("## From modules")[2]
    for module, names in re.findall(r"^\| `(fedveil[\w.]*)` \| (.*) \|$", page, re.MULTILINE):
        made = import_module(module)
        found |= {name: getattr(made, name) for name in re.findall(r"`(\w+)`", names) if hasattr(made, name)}
    for name, value in found.items():
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__.startswith("fedveil"):
            yield name, value


NAMES = dict(public())


def section(text: str, *titles: str) -> str:
    """The lines of a section of a docstring."""
    found = re.search(rf"^(?:{'|'.join(titles)}):\n((?:[ ]+.*\n|\n)*)", f"{text}\n", re.MULTILINE)
    return "" if found is None else found[1]


def described(value: Any) -> set[str]:
    """The parameters that a docstring describes."""
    listed = section(inspect.getdoc(value) or "", "Args", "Attributes")
    names = re.findall(r"^    (\w+): \S", listed, re.MULTILINE)
    if inspect.isclass(value) and is_pydantic_dataclass(value):
        names += [field.name for field in describe_fields(value) if field.meaning]
    return set(names)


def test_the_page_of_public_names_is_read() -> None:
    assert {"run", "Gaussian", "t_tsvd", "audit_sum", "ServerView"} <= set(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_public_name_has_a_summary(name: str) -> None:
    first = (inspect.getdoc(NAMES[name]) or "").partition("\n")[0]
    assert first.endswith((".", ":")), f"{name}: {first!r}"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_parameters_of_public_names_are_described(name: str) -> None:
    value = NAMES[name]
    if inspect.isclass(value) and issubclass(value, Method):
        return  # the fields of a method are described where `fedveil list methods` reads them
    try:
        parameters = {p for p in inspect.signature(value).parameters if p not in ("args", "kwargs")}
    except ValueError:  # an exception, or something built in
        return
    assert parameters - described(value) == set()


@pytest.mark.parametrize("name", sorted(n for n, value in NAMES.items() if inspect.isfunction(value)))
def test_public_functions_document_their_return_value(name: str) -> None:
    value = NAMES[name]
    returned = inspect.signature(value).return_annotation
    assert returned in ("None", None) or section(inspect.getdoc(value) or "", "Returns")


@pytest.mark.parametrize("name", GUARANTEES)
def test_guarantees_name_tests_that_exist(name: str) -> None:
    text = section(inspect.getdoc(NAMES[name]) or "", "Guarantees")
    tests = re.findall(r"`(test_\w+)`", text) + re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert tests
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for test in tests:
        exists = (ROOT / test).exists() if test.startswith("tests/") else f"def {test}(" in written
        assert exists, test
