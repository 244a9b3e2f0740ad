"""The documentation opened as a file: the search answers, and nothing is asked of the network."""

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


@pytest.mark.parametrize("dark", [False, True])
def test_pages_fit_a_phone(page: Page, site: Path, dark: bool) -> None:
    page.size(390, 844, dark=dark)
    page.open((site / "index.html").as_uri())
    assert page.value("document.documentElement.scrollWidth") <= 390
