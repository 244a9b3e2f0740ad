"""The documentation opened as a file: search works, and there is no network request."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.browser import Page


def test_the_search_works_without_server_and_network(page: Page, site: Path) -> None:
    page.requests.clear()
    page.complaints.clear()
    page.size(1280, 900)
    page.open((site / "index.html").as_uri())
    page.value("document.querySelector('[data-md-component=search-query]').focus()")
    page.value(
        "(() => { const q = document.querySelector('[data-md-component=search-query]');"
        "q.value = 'ledger'; q.dispatchEvent(new KeyboardEvent('keyup', {key: 'r'}));"
        "q.dispatchEvent(new InputEvent('input', {bubbles: true})) })()"
    )
    page.wait("document.querySelectorAll('.md-search-result__item').length > 2")
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:", "about:"))] == []
    assert page.complaints == []


PAGES = ("index", "methods/fedceo", "methods/fedem", "attacks/images", "tutorials/deploy", "speed", "peers")


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("dark", [False, True])
def test_pages_fit_a_phone(page: Page, site: Path, name: str, dark: bool) -> None:
    page.size(390, 844, dark=dark)
    page.open((site / f"{name}.html").as_uri())
    assert page.value("document.documentElement.scrollWidth") <= 390


def test_equations_are_set_by_the_browser_itself(page: Page, site: Path) -> None:
    page.requests.clear()
    page.size(1280, 900)
    page.open((site / "methods" / "fedceo.html").as_uri())
    fraction = "document.querySelector('.equation mfrac')"
    heights = (
        f"[{fraction}.getBoundingClientRect().height, {fraction}.children[0].getBoundingClientRect().height]"
    )
    whole, numerator = page.value(heights)
    assert whole > 1.5 * numerator
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:", "about:"))] == []
