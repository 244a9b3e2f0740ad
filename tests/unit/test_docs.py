"""The code in README and docs runs as it stands."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click import Group

import fedveil
from fedveil.cli.lazy import all_commands
from fedveil.federation.processes import free_port

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    if 'title="Terminal"' not in page.read_text()  # those are run as a whole, below
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


TITLED = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WALKED = [page for page in PAGES if 'title="Terminal"' in page.read_text()]


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Runs a command as a user would, in an empty folder; what it left running is stopped."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, command in (("fedveil", "-m fedveil"), ("python", "")):
        shim = folder / name
        shim.write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
        shim.chmod(0o755)
    (tmp_path / "work").mkdir()
    path = os.pathsep.join((str(folder), os.environ["PATH"]))
    source = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    where = os.environ | {"PATH": path, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    groups: list[int] = []

    def run(command: list[str]) -> None:
        with (tmp_path / "out").open("w+") as out:
            process = subprocess.Popen(
                command,
                cwd=tmp_path / "work",
                env=where,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            groups.append(process.pid)
            code = process.wait()
            out.seek(0)
            assert code == 0, f"{command[-1]}\n{out.read()[-4000:]}"

    yield run
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


@pytest.mark.parametrize("page", WALKED, ids=lambda page: page.name)
def test_the_commands_of_a_page_run_as_a_user_types_them(
    page: Path, tmp_path: Path, typed: Callable[..., None]
) -> None:
    """Blocks with a file's name are saved under it; Python without one is run; so are those titled Terminal."""
    for language, title, code in TITLED.findall(page.read_text()):
        if title and title != "Terminal":
            (tmp_path / "work" / title).write_text(code)
        elif title:
            free = code.replace("--port 8443", f"--port {free_port()}")  # another test may have it
            typed(["bash", "-euo", "pipefail", "-c", free])
        elif language == "python":
            typed([sys.executable, "-c", code])


def test_every_terminal_block_of_a_tutorial_is_run() -> None:
    """Only installation stands apart: the tests run in what it would install."""
    for page in [ROOT / "docs" / "quickstart.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]:
        for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            assert "make demo" in block, f"{page.name}: give the block the title Terminal\n{block}"


SHOWN = [
    pytest.param(command, id=f"{page.name}-{place}")
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
    for block in re.findall(r"^```sh[^\n]*\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    for place, command in enumerate(re.findall(r"^ *(fedveil .*)$", block.replace("\\\n", " "), re.MULTILINE))
]


@pytest.mark.parametrize("command", SHOWN)
def test_commands_and_options_that_pages_show_exist(command: str) -> None:
    words = shlex.split(re.split(r"[|&>]", command)[0], comments=True)[1:]
    if words[0] == "--plugin":
        words = words[2:]
    known: Any = all_commands().get(words[0])
    words = words[1:]
    if isinstance(known, Group):
        known, words = known.commands.get(words[0]), words[1:]
    assert known is not None, command
    options = {name for parameter in known.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert given <= options | {"-h", "--help"}, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configurations_on_pages_are_toml(page: Path) -> None:
    for block in re.findall(r"^```toml[^\n]*\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        tomllib.loads(block)


def test_no_page_drives_the_commands_from_python() -> None:
    assert [page.name for page in PAGES if "CliRunner" in page.read_text()] == []


@pytest.mark.parametrize(("page", "link"), LINKS, ids=lambda value: str(value)[-40:])
def test_links_lead_somewhere(page: Path, link: str) -> None:
    assert (page.parent / link).exists()


def test_the_tutorials_method_can_move_into_the_package() -> None:
    """Methods are imported while `fedveil` is: what they import from it is not there yet."""
    text = (ROOT / "docs" / "tutorials" / "own-method.md").read_text()
    code = re.search(r"```python title=\"noisy_sign.py\"\n(.*?)```", text, re.DOTALL)
    assert code is not None
    modules = {node.module for node in ast.walk(ast.parse(code[1])) if isinstance(node, ast.ImportFrom)}
    assert "fedveil.methods.method" in modules
    assert "fedveil" not in modules


def test_the_readme_has_ten_lines_that_train() -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    assert "fedveil.run(" in code[1]
    assert len([line for line in code[1].splitlines() if line.strip()]) <= 12


API = (ROOT / "docs" / "api.md").read_text()
MODULES = {
    module: set(re.findall(r"`(\w+)`", names))
    for module, names in re.findall(r"^\| `(fedveil\.[\w.]+)` \| (.*) \|$", API, re.MULTILINE)
}


def test_every_public_name_is_on_its_page() -> None:
    top, _ = API.split("## From modules")
    on_page = {
        name
        for cell in re.findall(r"^\| (`.*?) \|", top, re.MULTILINE)
        for name in re.findall(r"`(\w+)", cell)
    }
    assert on_page == set(fedveil.__all__)


@pytest.mark.parametrize("module", MODULES)
def test_the_names_of_a_module_are_there(module: str) -> None:
    found = importlib.import_module(module)
    assert {name for name in MODULES[module] if not hasattr(found, name)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_import_only_public_names(page: Path) -> None:
    for code in re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(), re.DOTALL):
        for module, names in re.findall(
            r"^from (fedveil[\w.]*) import ([\w, ]+$|\([^)]*\))", code, re.MULTILINE
        ):
            known = set(fedveil.__all__) if module == "fedveil" else MODULES[module]
            assert {*re.findall(r"\w+", names)} <= known


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(row for rows in project["optional-dependencies"].values() for row in rows),
    ]
    names = {re.split(r"[\[<>=]", row)[0] for row in wanted}
    page = (ROOT / "docs" / "dependencies.md").read_text()
    assert {name for name in names if not re.search(rf"\b{re.escape(name)}\b", page)} == set()


def test_extras_are_installed_from_the_clone_and_exist() -> None:
    """The package is in no index, so its bare name installs nothing, or something else."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "src").rglob("*.py"))]
    for path in files:
        text = path.read_text()
        assert not re.search(r"[Ii]nstall [\"']?fedveil\b(\[| *$)", text, re.MULTILINE), path
        for extras in re.findall(r"pip install [^\n`]*\"\.\[([a-z,]+)\]\"", text):
            assert {*extras.split(",")} <= {*known, "name"}, path
        for extra in re.findall(r"install\([\"']([a-z]+)[\"']\)", text):
            assert extra in known, path


def test_the_release_has_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == version


PROSE = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_prose_has_at_most_100_columns(page: Path) -> None:
    """Tables, pictures and code cannot be wrapped; everything else is."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "!["))]
    bare = [re.sub(r"`[^`]*`|\]\([^)]*\)", "", line) for line in lines]
    assert [line for line in bare if len(line) > 100] == []


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_code_has_at_most_92_columns(page: Path) -> None:
    """So many stand beside both sidebars of the site; equations are set anew."""
    blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for language, code in blocks if language != "math" for line in code.splitlines()]
    assert [line for line in lines if len(line) > 92] == []


WRITTEN = [page for page in PROSE if page.name not in ("best.md",)]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_paragraphs_have_at_most_five_lines(page: Path) -> None:
    """So have items of lists; tables and code are as long as they must be."""
    text = re.sub(r"^```.*?^```$", "\n", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    parts = re.split(r"\n[ \t]*\n|\n(?=\s*(?:[-*] |\d+\. |#))", text)
    long = [part for part in parts if len(part.strip().splitlines()) > 5]
    assert [part for part in long if not re.match(r"[ \t]*(\||<!--|!\[| {4})", part.strip("\n"))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_say_what_is_true_now(page: Path) -> None:
    """The history of the project is in the CHANGELOG."""
    history = (
        r"(?i)\b(an earlier (figure|version|table)|made before|used to be|no longer|formerly|previously)\b"
    )
    assert re.findall(history, page.read_text()) == []


def test_every_picture_is_shown_on_a_page() -> None:
    shown = "".join(page.read_text() for page in PAGES)
    pictures = [path for kind in ("png", "svg") for path in (ROOT / "docs").rglob(f"*.{kind}")]
    assert {path.name for path in pictures if path.name not in shown} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_is_empty(page: Path) -> None:
    text = page.read_text()
    assert re.search(r"^# \S", text, re.MULTILINE)
    assert len(text.split()) > 40


def test_versions_of_peers_are_those_that_were_read() -> None:
    readme = (ROOT / "README.md").read_text()
    pins = (ROOT / "constraints.txt").read_text() + (ROOT / "benchmarks/peers/requirements.txt").read_text()
    for title, package in (("Flower", "flwr"), ("Opacus", "opacus"), ("pfl-research", "pfl")):
        pinned = re.search(rf"^{package}==(\S+)$", pins, re.MULTILINE)
        assert pinned is not None
        assert f"| {title} {pinned[1]} |" in readme
