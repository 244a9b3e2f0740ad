"""Whatever a configuration says, the answer is a configuration or an error that names the field."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import FedveilError
from fedveil.experiment.config import load_config

pytestmark = pytest.mark.usefixtures("bounded")

EXPERIMENTS = sorted(
    path
    for path in (Path(__file__).parents[2] / "experiments").rglob("*.toml")
    if not path.name.startswith(("table-", "figure-"))
)
VALUES = st.sampled_from(
    ["0", "-1", "1e400", "nan", "inf", "true", '""', "[]", "[[]]", "{}", "99999999999999999999", '"\\u0000"',
     "2026-01-01", "'a' ", '"' + "x" * 300 + '"', "[1, 'a']", "{name = 1}"]
)  # fmt: skip

KEYS = st.sampled_from(
    ["method", "method.name", "method.lr", "task", "task.dataset", "task.data_options", "partition.kind",
     "partition.clients", "run.rounds", "run.seeds", "run.cohort", "run.transcript", "privacy.delta",
     "privacy.budget", "wrap", "attack", "paper.expected", "version"]
)  # fmt: skip


def load(text: bytes, changes: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_bytes(text)
        with contextlib.suppress(FedveilError):
            load_config(path, changes).build_method()


@settings(max_examples=300, deadline=None)
@given(source=st.sampled_from(EXPERIMENTS), data=st.data())
def test_a_published_configuration_with_other_values(source: Path, data: st.DataObject) -> None:
    lines = source.read_text().splitlines()
    settable = [number for number, line in enumerate(lines) if "=" in line and not line.startswith("#")]
    for number in data.draw(st.lists(st.sampled_from(settable), min_size=1, max_size=3)):
        lines[number] = lines[number].split("=")[0] + "= " + data.draw(VALUES)
    load("\n".join(lines).encode(), [])


@settings(max_examples=200, deadline=None)
@given(source=st.sampled_from(EXPERIMENTS), data=st.data())
def test_a_published_configuration_with_damaged_bytes(source: Path, data: st.DataObject) -> None:
    content = bytearray(source.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    load(bytes(content), [])


@settings(max_examples=200, deadline=None)
@given(
    changes=st.lists(
        st.tuples(
            st.one_of(KEYS, st.text(alphabet="abcdmethodrunx._-[] \n\0é", max_size=20)),
            st.one_of(VALUES, st.text(max_size=20)),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_changes_from_the_command_line(changes: list[tuple[str, str]]) -> None:
    for source in (b'[task]\ndataset = "digits"\n[method]\nname = "fedavg"\n', b"task = 3\nmethod = []\n"):
        load(source, [f"{key}={value}" for key, value in changes])


@pytest.mark.parametrize("depth", [500, 20_000])
def test_deep_nesting(depth: int) -> None:
    load(b"[method]\nname = " + b"[" * depth + b"]" * depth, [])
    load(b'[method]\nname = "fedavg"\n', ["method.lr=" + "[" * depth + "]" * depth])
    load(b'[method]\nname = "fedavg"\n', [".".join("a" * depth) + "=1"])
