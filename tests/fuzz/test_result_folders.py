"""A report is made of whatever lies in a result folder, and says what it could not read."""

from __future__ import annotations

import json
import tempfile
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
    st.sampled_from(["<script>alert(1)</script>", "\u202e", "x" * 5000, "../../etc"]),
)
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
    assert "<script>alert" not in page


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
