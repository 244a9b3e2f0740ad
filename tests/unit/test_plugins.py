from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedveil.errors import InputError
from fedveil.models.registry import list_models
from fedveil.plugins import VARIABLE, load_plugins

GOOD = """
from torch import nn
from fedveil import register_model
RUNS = []
RUNS.append(1)

@register_model("plugged-in", "a test's")
def build(input_shape, classes):
    return nn.Linear(input_shape[0], classes)
"""


@pytest.mark.usefixtures("names_of_this_test_only")
def test_a_plugin_is_run_once_and_named_for_child_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    path = tmp_path / "plugged.py"
    path.write_text(GOOD)
    load_plugins([path])
    first = [entry.build for entry in list_models() if entry.name == "plugged-in"]
    load_plugins([path])
    assert [entry.build for entry in list_models() if entry.name == "plugged-in"] == first != []
    assert os.environ[VARIABLE] == str(path)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("absent.py", None, "not a Python file"),
        ("text.txt", "x = 1", "not a Python file"),
        ("broken.py", "1 / 0", "ZeroDivisionError"),
        ("syntax.py", "def", "SyntaxError"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str | None, problem: str
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=problem):
        load_plugins([path])
