"""Every experiment that is shipped can be run: its configuration holds, and two rounds of it work.

Experiments on data that does not come with fedveil are checked up to their model and method; where the data is
there (`$FEDVEIL_DATA`), they are not run either, since that takes minutes.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from fedveil.experiment.config import Config, load_config
from fedveil.experiment.run import run_seed
from fedveil.models.registry import make_model
from fedveil.privacy.releases import Plan
from tests.contract.scripts import experiment_script

ROOT = Path(__file__).parents[2] / "experiments"
FILES = sorted(ROOT.rglob("*.toml"))
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "cifar10": ((3, 32, 32), 10),
    "digits": ((1, 8, 8), 10),
    "mnist": ((1, 28, 28), 10),
    "fashion-mnist": ((1, 28, 28), 10),
    "emnist-letters": ((1, 28, 28), 26),
}
EMBEDDED = ("digits",)


def label(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix(""))


def method_fits_model(config: Config) -> None:
    shape, classes = SHAPES[config.task.dataset]
    model = make_model(config.task.model, shape, classes, seed=0, **config.task.model_options)
    method = config.build_method()
    clients = config.partition.clients or 10
    plan = Plan(clients, config.run.cohort or clients, config.run.sampler, config.run.rounds, 100, 100)
    params = {name: leaf.detach() for name, leaf in model.named_parameters()}
    method.model(method.init_server(params, plan))
    assert method.releases(plan)


@pytest.mark.parametrize("path", FILES, ids=label)
def test_the_configuration_holds(path: Path) -> None:
    config = load_config(path)
    if config.task.dataset in SHAPES:
        method_fits_model(config)
    if config.paper is not None:
        assert config.paper.source
        assert config.paper.table
        assert config.paper.row


def embedded() -> list[Path]:
    return [path for path in FILES if load_config(path).task.dataset in EMBEDDED]


@pytest.mark.parametrize("path", embedded(), ids=label)
def test_two_rounds_of_what_needs_no_download(path: Path, tmp_path: Path) -> None:
    config = load_config(path, ["run.rounds=2", "run.seeds=[0]", "run.workers=1"])
    result = run_seed(config, 0, experiment=path.stem, results=tmp_path)
    assert result.summary["rounds"] == 2
    assert result.accuracy is not None
    assert result.summary["data"]  # which files or sheets they were: a report shows it


def test_there_are_experiments() -> None:
    assert embedded()
    assert len(FILES) > len(embedded())


@pytest.mark.parametrize("script", sorted(ROOT.rglob("*.py")), ids=label)
def test_scripts_use_names_that_exist(script: Path) -> None:
    """They run for hours and are not run here; a name that was moved must not be found out by whoever starts one."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedveil"):
            module = importlib.import_module(node.module or "")
            assert {alias.name for alias in node.names if not hasattr(module, alias.name)} == set()


def test_fedceo_rows_are_those_of_its_generator() -> None:
    rows = experiment_script("fedceo/generate.py").rows()
    expected = {ROOT / "fedceo" / path: text for path, text in rows}
    assert set((ROOT / "fedceo").glob("table-*/*.toml")) == set(expected)
    for path, text in expected.items():
        assert path.read_text() == text
