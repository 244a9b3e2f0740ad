"""The code in README and docs runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedveil

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]
LINKS = [
    (page, link)
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
    for link in re.findall(
        r"\]\(([^)#]+?)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    )
    if "://" not in link
]


@pytest.mark.usefixtures("names_of_this_test_only")
@pytest.mark.parametrize("code", BLOCKS)
def test_code_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDVEIL_PLUGINS", "")
    exec(compile(code, "<docs>", "exec"), {"__name__": "docs"})


@pytest.mark.parametrize(("page", "link"), LINKS, ids=lambda value: str(value)[-40:])
def test_links_lead_somewhere(page: Path, link: str) -> None:
    assert (page.parent / link).exists()


def test_the_readme_has_ten_lines_that_train() -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    assert "fedveil.run(" in code[1]
    assert len([line for line in code[1].splitlines() if line.strip()]) <= 12


def test_every_public_name_is_on_its_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert {name for name in fedveil.__all__ if not re.search(rf"`{name}\b", page)} == set()
