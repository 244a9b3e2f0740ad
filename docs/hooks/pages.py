"""Pages of the site that are made, not written: the home page, one page per method, the API reference.

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
_FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)


def written() -> set[str]:
    """The pages on disk, by their path below docs/."""
    return {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def made() -> dict[str, str]:
    """Every page that is made, by its path below docs/."""
    pages = {target: (ROOT / source).read_text() for source, target in _ROOT_PAGES.items()}
    return pages | method_pages() | reference_pages() | reproduction_page()


def method_pages() -> dict[str, str]:
    """One page per method and one table of all, from the registry."""
    from fedveil.methods import METHODS

    pages = {f"methods/all/{name}.md": _method_page(name, METHODS[name]) for name in sorted(METHODS)}
    rows = [f"| [`{name}`](all/{name}.md) | {METHODS[name].summary} |" for name in sorted(METHODS)]
    top = [
        "# All methods",
        "",
        "`fedveil list methods` prints the same list.",
        "",
        "| name | idea |",
        "|---|---|",
    ]
    return pages | {"methods/index.md": "\n".join([*top, *rows, ""])}


def _method_page(name: str, kind: Any) -> str:
    from fedveil.methods.describe import describe_fields

    module = inspect.getmodule(kind)
    assert module is not None
    assert module.__doc__ is not None
    title, _, rest = module.__doc__.partition("\n")
    rows = [
        f"| `{field.name}` | {_cell(field.meaning)} | {_cell(field.values)} | `{field.default}` |"
        for field in describe_fields(kind)
    ]
    parts = [
        f"# {name}",
        "",
        title.rstrip("."),
        "",
        _picture(kind),
        "",
        "## Source, symbols and deviations",
        "",
        _lists(rest.strip()),
        "",
        "## Fields of `[method]`",
        "",
        "| field | meaning | values | default |",
        "|---|---|---|---|",
        *rows,
        "",
        "## Privacy",
        "",
        _privacy(kind),
        "",
        *_more(name),
    ]
    return "\n".join(parts) + "\n"


def _picture(kind: Any) -> str:
    """Who sends what: drawn as text, so that it needs no script."""
    down, up = _contents(kind.down_type), _contents(kind.up_type)
    width = max(len(down), len(up)) + 4
    return "\n".join(
        [
            "```text",
            f"server  ──{down.center(width, '─')}─>  client",
            f"server  <─{up.center(width, '─')}──  client",
            "```",
        ]
    )


def _contents(message: Any) -> str:
    from dataclasses import fields

    return f" {', '.join(field.name.replace('_', ' ') for field in fields(message))} "


def _privacy(kind: Any) -> str:
    """What is proven with the method's default fields, for one stated plan."""
    from fedveil.errors import FedveilError
    from fedveil.privacy.releases import Plan
    from fedveil.session.privacy_guard import privacy_statement

    plan = Plan(clients=100, cohort=10, sampler="poisson", rounds=100, records_per_client=600)
    lead = (
        "With the default fields, 100 clients of 600 records, Poisson cohorts of 10 expected, 100 rounds, "
        "delta 1e-5. `fedveil account CONFIG` computes this for your run."
    )
    try:
        rows = privacy_statement(kind(), plan, 1e-5).proven
    except FedveilError as error:  # defaults that need more than this plan
        return f"The default fields do not fit this plan: {error}"
    table = ["| against | unit | epsilon | by, or why not |", "|---|---|---|---|"]
    for row in rows:
        epsilon = "none" if row.epsilon is None else f"{row.epsilon:.4g}"
        why = row.reason if row.epsilon is None else row.theorem
        table.append(f"| {row.adversary} | {row.unit} | {epsilon} | {_cell(why)} |")
    return "\n".join([lead, "", *table])


def _more(name: str) -> list[str]:
    """Links to the pages that say more about this method."""
    found = [
        page
        for page in sorted(written())
        if page.startswith(("methods/", "reproduction/")) and f"`{name}`" in (DOCS / page).read_text()
    ]
    if not found:
        return []
    links = [f"- [{_title(page)}]({_relative(f'methods/all/{name}.md', page)})" for page in found]
    return ["## When to use it, and results", "", *links]


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
    lead = "What was run for each paper and what came of it, negative results included."
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
    return _redirect(page.file.src_uri, markdown)
