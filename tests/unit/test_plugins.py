from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedveil.errors import InputError
from fedveil.experiment.compare import plan_cells, run_cells
from fedveil.federation.run_settings import RunSettings
from fedveil.models.registry import list_models
from fedveil.plugins import VARIABLE, load_plugins
from tests.refusals import refuses

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
    ("name", "content"),
    [("absent.py", None), ("text.txt", "x = 1"), ("broken.py", "1 / 0"), ("syntax.py", "def")],
)
def test_a_plugin_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str | None
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with refuses("--plugin", value=str(path)):
        load_plugins([path])


TWO_RUNS = """
[task]
dataset = "digits"
model = "logistic"
[partition]
clients = 4
[method]
name = "plugged-elsewhere"
[run]
rounds = 1
seeds = [0, 1]
"""

METHOD = """
from dataclasses import dataclass as record

from pydantic.dataclasses import dataclass

from fedveil.methods.fedavg import FedAvg
from fedveil.methods.fields import STRICT
from fedveil.methods.method import register


@register("plugged-method", "a test's", server=FedAvg.server_type, down=FedAvg.down_type, up=FedAvg.up_type)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Mine(FedAvg):
    pass
"""


@pytest.mark.usefixtures("names_of_this_test_only")
def test_a_process_that_flower_starts_knows_the_methods_of_its_own_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plugged_method.py"
    path.write_text(METHOD)
    monkeypatch.setenv(VARIABLE, str(path))
    values = {"config": '[method]\nname = "plugged-method"\n', "seed": 0, "experiment": "e", "results": "r"}
    given = {f"fedveil-{key}": value for key, value in (values | {"data": "", "noise": ""}).items()}
    assert RunSettings.from_run_config(given).config.build_method().name == "plugged-method"


@pytest.mark.usefixtures("names_of_this_test_only")
def test_the_processes_of_a_comparison_know_the_methods_of_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    plugin, config = tmp_path / "plugged_elsewhere.py", tmp_path / "plugged.toml"
    plugin.write_text(METHOD.replace("plugged-method", "plugged-elsewhere"))
    config.write_text(TWO_RUNS)
    load_plugins([plugin])
    cells = plan_cells([config])
    assert len(cells) == 2
    assert run_cells(cells, tmp_path / "results", jobs=2) == {}
    assert all(cell.folder(tmp_path / "results").joinpath("summary.json").is_file() for cell in cells)


@pytest.mark.usefixtures("names_of_this_test_only")
@pytest.mark.parametrize(
    ("content", "field", "value"),
    [
        (METHOD.replace('"plugged-method"', '"udp-fedavg"'), "name", "udp-fedavg"),
        (GOOD.replace('"plugged-in"', '"mlp-2"'), "name", "mlp-2"),
        (METHOD.replace("class Mine(FedAvg):", "class Mine(Method):"), "method", "Mine"),
    ],
)
def test_a_plugin_that_takes_a_registered_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, field: str, value: str
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    path = tmp_path / "passes.py"
    path.write_text(content.replace("import register\n", "import Method, register\n"))
    with refuses("--plugin", value=str(path)) as caught:
        load_plugins([path])
    cause = caught.value.__cause__
    assert isinstance(cause, InputError)
    assert (cause.field, cause.value) == (field, value)
