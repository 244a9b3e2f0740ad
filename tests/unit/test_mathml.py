"""Equations of the pages become MathML, or the page is refused."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from xml.etree.ElementTree import fromstring

import pytest

from fedveil.methods import METHODS
from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def maths() -> ModuleType:
    return load_script("docs/hooks/mathml.py")


def test_an_equation_has_its_structure(maths: ModuleType) -> None:
    tree = fromstring(maths.mathml(r"w \leftarrow \sum_{k=1}^K \frac{n_k}{n} \sqrt{2}"))
    tags = [element.tag.split("}")[1] for element in tree.iter()]
    assert tags.count("munderover") == 1
    assert tags.count("mfrac") == 1
    assert tags.count("msqrt") == 1
    assert "".join(tree.itertext()) == "w←∑k=1Knkn2"


def test_tables_and_fences_close(maths: ModuleType) -> None:
    cases = maths.mathml(r"\begin{cases} a & b \\ c & d \end{cases} \left( \text{so many} \right)")
    tree = fromstring(cases)
    assert len([element for element in tree.iter() if element.tag.endswith("mtd")]) == 4
    assert "so\N{NO-BREAK SPACE}many" in "".join(tree.itertext())


@pytest.mark.parametrize(
    "tex", [r"\unknown", r"\frac{1}", "{a", "a}", r"\begin{matrix} a \end{matrix}", r"\left( a", "a^"]
)
def test_what_is_not_understood_is_refused(maths: ModuleType, tex: str) -> None:
    with pytest.raises(maths.MathError):
        maths.mathml(tex)


def test_every_equation_of_the_pages_is_understood(maths: ModuleType) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        text = maths.equations(page.read_text())
        assert "```math" not in text, page
        assert "$`" not in text, page


def test_code_is_left_alone(maths: ModuleType) -> None:
    page = "`$XDG_CACHE_HOME` and\n```sh\necho $HOME\n```\n"
    assert maths.equations(page) == page


def test_the_pictures_of_the_methods_are_what_their_script_draws() -> None:
    figures = load_script("docs/figures/make_method_figures.py")
    for name in figures.FIGURES:
        assert (ROOT / "docs" / "methods" / f"{name}.svg").read_text() == figures.draw(name)


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_page_has_all_its_parts(name: str) -> None:
    """The idea with a picture, equations, fields, privacy, when to use it and results."""
    page = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
    parts = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    for title in ("Equations", "Fields", "Privacy", "When to use it", "Results"):
        assert parts.get(title, "").strip(), f"{name}: {title}"
    assert "```math" in page, name
    assert f"]({name}.svg)" in page.partition("## ")[0], name
    assert {f"<!-- fields: {name} -->", f"<!-- privacy: {name} -->"} <= set(page.splitlines())


def test_every_method_is_in_the_table_of_methods() -> None:

    text = (ROOT / "docs" / "methods" / "index.md").read_text()
    assert {name for name in METHODS if f"[`{name}`]({name}.md)" not in text} == set()
