"""The shipped rows of FedLAP-DP are those of its generator, and say what the paper's tables say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from fedveil.config import load_config

ROOT = Path(__file__).parents[2] / "experiments" / "fedlap_dp"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fedlap_{name}", ROOT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_are_those_of_the_generator() -> None:
    expected = {ROOT / path: text for path, text in script("generate").rows()}
    assert {path for path in ROOT.rglob("*.toml") if path.parent != ROOT} == set(expected)
    for path, text in expected.items():
        assert path.read_text() == text


def test_private_rows_charge_the_published_number_of_batches() -> None:
    from fedveil.privacy.releases import Plan

    plan = Plan(5, 5, "all", 1, 10_000, 10_000)
    for path in sorted((ROOT / "table-2").glob("cifar10-*.toml")):
        release = load_config(path).build_method().releases(plan)[0]
        if "psg" not in path.stem:
            assert release.accesses == 200
            assert abs(release.rate - 0.0256) < 0.001


@pytest.mark.parametrize("dataset", ["mnist", "fashion-mnist", "cifar10"])
def test_reduced_methods_differ_from_the_paper_in_size_and_not_in_price(dataset: str) -> None:
    from fedveil.privacy.releases import Plan

    reduced = script("reduced")
    plan = Plan(5, 5, "all", 1, 400, 440)
    for method, changes in reduced.METHODS.items():
        config = load_config(ROOT / f"reduced-{dataset}.toml", changes)
        assert config.build_method().name in method or method.startswith("dp-fedavg")
        if method in reduced.TABLE_2 | reduced.TABLE_4:
            release = config.build_method().releases(plan)[0]
            rounds = 15 if method == "psg" else 1  # which spends all at once
            assert release.accesses in (10 * rounds, 11 * rounds)
            assert abs(release.rate - 0.1) < 0.011
