"""One browser for all tests; without one they are skipped, and say so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.browser import Page, browse, find_browser


@pytest.fixture(scope="session")
def page() -> Iterator[Page]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with browse(path) as opened:
        yield opened
