"""The shipped rows of FedLAP-DP are those of its generator, and say what the paper's tables say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from fedveil.config import load_config

ROOT = Path(__file__).parents[2] / "experiments" / "fedlap_dp"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fedlap_rows", ROOT / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_are_those_of_the_generator() -> None:
    expected = {ROOT / path: text for path, text in generator().rows()}
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
