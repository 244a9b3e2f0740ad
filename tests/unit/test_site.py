"""The site is built strictly, is complete, and asks nothing of other hosts."""

from __future__ import annotations

import html
import re
from pathlib import Path

import fedveil
from fedveil.methods import METHODS
from fedveil.methods.method import field_names

ROOT = Path(__file__).parents[2]


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    loads = re.compile(r'<(?:script|img|iframe|link)[^>]+(?:src|href)="(https?:)?//[^"]*"')
    assert {page.name for page in site.rglob("*.html") if loads.search(page.read_text())} == set()


def test_every_method_has_a_page_with_all_its_fields(site: Path) -> None:
    for name, kind in METHODS.items():
        text = (site / "methods" / f"{name}.html").read_text()
        missing = {field for field in field_names(kind) if f"<code>{field}</code>" not in text}
        assert missing == set(), name


def test_no_mark_and_no_tex_is_left(site: Path) -> None:
    pages = {page: re.sub(r"<code>.*?</code>", "", page.read_text()) for page in site.rglob("*.html")}
    left = re.compile(r"<!-- (fields|privacy|source):|\$`|language-math|\\\\frac")
    assert {page.name for page, text in pages.items() if left.search(text)} == set()


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "fedveil.html").read_text()
    assert {name for name in fedveil.__all__ if f'id="fedveil.{name}"' not in text} == set()


def test_every_page_has_its_own_title(site: Path) -> None:
    """Not the name of its file, which stands in where a page does not begin with a heading."""
    for source in (ROOT / "docs").rglob("*.md"):
        page = site / source.relative_to(ROOT / "docs").with_suffix(".html")
        heading = re.search(r"^# (.*)$", source.read_text(), re.MULTILINE)
        title = re.search(r"<title>(.*?) - fedveil</title>", page.read_text())
        assert heading is not None
        assert title is not None
        assert html.unescape(title[1]) == heading[1].replace("`", ""), source.name


def test_every_written_page_is_in_the_site(site: Path) -> None:
    docs = ROOT / "docs"
    pages = [page.relative_to(docs).with_suffix(".html") for page in docs.rglob("*.md")]
    assert [page for page in pages if not (site / page).exists()] == []
