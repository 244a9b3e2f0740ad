"""Pages and parts of pages that are made, not written: the home page, methods' fields, the API reference.

MkDocs calls the functions at the end of this file. Pages made here are never on disk, so nothing can be out of date.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "src"))

_ROOT_PAGES = {"CONTRIBUTING.md": "project/contributing.md", "SECURITY.md": "project/reporting.md"}
_ROOT_PAGES |= {"CHANGELOG.md": "project/changelog.md", "README.md": "index.md"}
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)]*)?\)")
_MARK = re.compile(r"^<!-- (fields|privacy|source): ([a-z-]+) -->$", re.MULTILINE)
_FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)


def written() -> set[str]:
    """The pages on disk, by their path below docs/."""
    return {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def made() -> dict[str, str]:
    """Every page that is made, by its path below docs/."""
    pages = {target: (ROOT / source).read_text() for source, target in _ROOT_PAGES.items()}
    return pages | reference_pages() | reproduction_page()


def fill(text: str) -> str:
    """Replace each comment like `fields: NAME` by what the registry of methods says of that method."""
    from fedveil.methods import METHODS

    parts = {"fields": _fields, "privacy": _privacy, "source": _source}
    return _MARK.sub(lambda mark: parts[mark[1]](METHODS[mark[2]]), text)


def _fields(kind: Any) -> str:
    from fedveil.methods.describe import describe_fields

    rows = [
        f"| `{field.name}` | {_cell(field.meaning)} | {_cell(field.values)} | `{field.default}` |"
        for field in describe_fields(kind)
    ]
    return "\n".join(["| field | meaning | values | default |", "|---|---|---|---|", *rows])


def _source(kind: Any) -> str:
    """The docstring of the method's file, but for its title."""
    module = inspect.getmodule(kind)
    assert module is not None
    assert module.__doc__ is not None
    return _lists(module.__doc__.partition("\n")[2].strip())


def _privacy(kind: Any) -> str:
    """What is proven with the method's default fields, for one stated plan."""
    from fedveil.errors import FedveilError
    from fedveil.methods.one_shot import OneShot
    from fedveil.privacy.meaning import plain
    from fedveil.privacy.releases import Plan
    from fedveil.session.privacy_guard import privacy_statement

    rounds = 1 if issubclass(kind, OneShot) else 100
    plan = Plan(clients=100, cohort=10, sampler="poisson", rounds=rounds, records_per_client=600)
    lead = (
        "What is proven with the default fields, 100 clients of 600 records, Poisson cohorts of 10 expected, "
        f"{'one round' if rounds == 1 else '100 rounds'}, delta 1e-5. `fedveil account CONFIG` computes this for your "
        "run."
    )
    try:
        rows = privacy_statement(kind(), plan, 1e-5).proven
    except FedveilError as error:  # defaults that need more than this plan
        return f"The default fields do not fit this plan: {error}"
    table = ["| against | unit | epsilon | by, or why not |", "|---|---|---|---|"]
    for row in rows:
        epsilon = "none" if row.epsilon is None else f"{row.epsilon:.4g}"
        why = row.reason if row.epsilon is None else plain(row.theorem)
        table.append(f"| {row.adversary} | {row.unit} | {epsilon} | {_cell(why)} |")
    return "\n".join([lead, "", *table])


def reference_pages() -> dict[str, str]:
    """The API reference: a page per module that docs/api.md lists."""
    import fedveil

    api = (DOCS / "api.md").read_text()
    modules = {
        module: re.findall(r"`(\w+)`", names)
        for module, names in re.findall(r"^\| `(fedveil\.[\w.]+)` \| (.*) \|$", api, re.MULTILINE)
    }
    pages = {"reference/fedveil.md": _reference("fedveil", fedveil.__all__)}
    for module, names in modules.items():
        pages[f"reference/{module}.md"] = _reference(module, names)
    return pages


def _reference(module: str, names: Iterable[str]) -> str:
    blocks = [
        f"::: {module}.{name}\n    options:\n      inherited_members: false\n"
        for name in dict.fromkeys(names)
    ]
    return f"# {module}\n\n" + "\n".join(blocks)


def reproduction_page() -> dict[str, str]:
    """The list of reproduction pages, unless one is written."""
    target = "reproduction/index.md"
    pages = sorted(page for page in written() if page.startswith("reproduction/"))
    if target in pages or not pages:
        return {}
    links = [f"- [{_title(page)}]({page.removeprefix('reproduction/')})" for page in pages]
    lead = "What was run for each paper, and the results, negative ones included."
    return {target: "\n".join(["# Reproduction", "", lead, "", *links, ""])}


def _title(page: str) -> str:
    first = next(line for line in (DOCS / page).read_text().splitlines() if line.startswith("# "))
    return first.removeprefix("# ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _lists(text: str) -> str:
    """Docstrings start lists right after a line; Markdown wants a blank line there."""
    return re.sub(r"(?m)^(?!- )(\S.*)\n(?=- )", r"\1\n\n", text)


def _relative(source: str, target: str) -> str:
    """The link from one page to another."""
    up = "../" * (len(PurePosixPath(source).parts) - 1)
    return f"{up}{target}"


def _redirect(source: str, text: str) -> str:
    """Lead links to files outside docs/ to the page made of them; what has none becomes plain text."""
    origin = next((name for name, page in _ROOT_PAGES.items() if page == source), None)
    base = PurePosixPath(origin or f"docs/{source}").parent

    def one(match: re.Match[str]) -> str:
        words, link, anchor = match[1], match[2], match[3] or ""
        if "://" in link or link.startswith("mailto:"):
            return match[0]
        target = _normal(base / link)
        page = _ROOT_PAGES.get(target)
        if page is None and target.startswith("docs/"):
            page = target.removeprefix("docs/")
            if (DOCS / page).is_dir():
                page = f"{page}/index.md"
        return words if page is None else f"[{words}]({_relative(source, page)}{anchor})"

    text = re.sub(r"(!\[[^\]]*\]\()docs/", rf"\1{_relative(source, '')}", text) if origin else text
    return "".join(part if part.startswith("```") else _LINK.sub(one, part) for part in _FENCE.split(text))


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts = parts[:-1]
        else:
            parts.append(part)
    return "/".join(parts)


def expand(nav: Sequence[Any], pages: set[str]) -> list[Any]:
    """Replace each folder in the navigation by its pages that no other entry names."""
    named = set(_leaves(nav))

    def inside(folder: str) -> list[str]:
        prefix = "" if folder == "./" else folder
        found = [page for page in pages - named if page.startswith(prefix)]
        if folder == "./":
            found = [page for page in found if "/" not in page]
        return sorted(found, key=lambda page: (page.count("/"), not page.endswith("index.md"), page))

    def walk(entries: Sequence[Any]) -> list[Any]:
        out: list[Any] = []
        for entry in entries:
            if isinstance(entry, dict):
                ((title, below),) = entry.items()
                if isinstance(below, str) and below.endswith("/"):
                    out.append({title: inside(below)})
                else:
                    out.append({title: below if isinstance(below, str) else walk(below)})
            elif entry.endswith("/"):
                out.extend(inside(entry))
            else:
                out.append(entry)
        return [entry for entry in out if entry != {next(iter(entry)): []} or not isinstance(entry, dict)]

    return walk(nav)


def _leaves(nav: Sequence[Any]) -> list[str]:
    out: list[str] = []
    for entry in nav:
        below = next(iter(entry.values())) if isinstance(entry, dict) else entry
        out += [below] if isinstance(below, str) else _leaves(below)
    return [leaf for leaf in out if not leaf.endswith("/")]


_MADE: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the pages, and complete the navigation by what is there."""
    _MADE.clear()
    _MADE.update(made())
    assert config.nav is not None
    config.nav = expand(config.nav, written() | set(_MADE))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, text in _MADE.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    titled = re.sub(r"\A<!--.*?-->\s*", "", markdown, flags=re.DOTALL)  # a title is what stands first
    return _redirect(page.file.src_uri, fill(titled))
