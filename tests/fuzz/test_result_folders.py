"""A report is made of whatever lies in a result folder, and says what it could not read."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.report.html import write_report
from tests.unit.report.makers import write_everything

pytestmark = pytest.mark.usefixtures("bounded")

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=10),
    st.sampled_from([10**400, -(10**400), 1e308, -1e308, 5e-324, "\ud800"]),
    st.sampled_from(
        ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "' onload=alert(1) x='", "\u202e",
         "x" * 5000, "../../etc", "javascript:alert(1)"]
    ),
)  # fmt: skip
_json = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, inner in items for place in places(inner, (*at, key)))]


def put(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    value[at[0]] = put(value[at[0]], at[1:], new)
    return value


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The folder of a run with everything a report can show."""
    root = tmp_path_factory.mktemp("results")
    write_everything(root)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def report(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder) / "results" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        page = write_report([Path(folder) / "results"], Path(folder) / "page.html").read_text()
    assert page.rstrip().endswith("</html>")
    reader = Reader()
    reader.feed(page)
    assert reader.scripts == 1, "the page's own, which its policy names by hash"
    assert reader.harmful == []


class Reader(HTMLParser):
    """Reads a page as a browser does, and notes whatever could run or fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts = 0
        self.harmful: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        for name, value in attributes:
            place = (value or "").strip().lower()
            elsewhere = name in ("src", "href", "action") and not place.startswith(("data:", "#"))
            if name.startswith("on") or elsewhere or tag in ("iframe", "object", "embed", "base", "form"):
                self.harmful.append(f"<{tag} {name}={value}>")


def test_the_unharmed_folder(files: dict[str, bytes]) -> None:
    report(files)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_other_values_in_the_json_files(files: dict[str, bytes], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(name for name in files if name.endswith((".json", ".jsonl")))))
    lines = files[name].splitlines() if name.endswith(".jsonl") else [files[name]]
    number = data.draw(st.integers(0, len(lines) - 1))
    value = json.loads(lines[number])
    for _ in range(data.draw(st.integers(1, 3))):
        value = put(value, data.draw(st.sampled_from(places(value))), data.draw(_json))
    lines[number] = json.dumps(value).encode()
    report(files | {name: b"\n".join(lines)})


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_files(files: dict[str, bytes], data: st.DataObject) -> None:
    harmed = dict(files)
    for name in data.draw(st.lists(st.sampled_from(sorted(files)), min_size=1, max_size=3)):
        cut = data.draw(st.integers(0, len(files[name])))
        harmed[name] = files[name][:cut] + data.draw(st.binary(max_size=20))
    report(harmed)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_missing_files(files: dict[str, bytes], data: st.DataObject) -> None:
    gone = set(data.draw(st.lists(st.sampled_from(sorted(files)), min_size=1)))
    kept = {name: content for name, content in files.items() if name not in gone}
    if kept:
        report(kept)


ODD: dict[str, Callable[[Path], object]] = {
    "nested without end": lambda path: path.write_text('{"round": ' + "[" * 100_000),
    "a number without end": lambda path: path.write_text('{"round": ' + "9" * 5000 + "}"),
    "nothing": lambda path: path.write_bytes(b""),
    "what a power cut leaves": lambda path: path.write_bytes(bytes(4096)),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["config.toml", "rounds.jsonl", "summary.json", "figures/spectrum.png"])
def test_a_missing_file_is_reported_and_loses_only_its_content(
    name: str, kind: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    for path, content in files.items():
        (tmp_path / "r" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "r" / path).write_bytes(content)
    harmed = tmp_path / "r" / "demo" / "fedavg" / "seed-0" / name
    harmed.unlink()
    ODD[kind](harmed)
    page = write_report([tmp_path / "r"], tmp_path / "page.html").read_text()
    assert harmed.name in page or kind == "nothing"


@pytest.mark.parametrize(
    "name", ["<img src=x onerror=alert(1)>", "1\u00b21", "a\nb", "x" * 200, b"seed-\xff"]
)
def test_any_name_of_a_folder(name: str | bytes, files: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "r" / os.fsdecode(name)
    folder.mkdir(parents=True)
    for path in ("summary.json", "rounds.jsonl"):
        (folder / path).write_bytes(files[f"demo/fedavg/seed-0/{path}"])
    reader = Reader()
    reader.feed(write_report([tmp_path / "r"], tmp_path / "page.html").read_text())
    assert (reader.scripts, reader.harmful) == (1, [])
