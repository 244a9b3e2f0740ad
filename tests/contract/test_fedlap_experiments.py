"""The shipped rows of FedLAP-DP are those of its generator, and say what the paper's tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.experiment.config import load_config
from fedveil.privacy.accounting import account
from tests.contract.scripts import experiment_script

ROOT = Path(__file__).parents[2] / "experiments" / "fedlap_dp"


def test_rows_are_those_of_the_generator() -> None:
    expected = {ROOT / path: text for path, text in experiment_script("fedlap_dp/generate.py").rows()}
    assert {path for path in ROOT.rglob("*.toml") if path.parent != ROOT} == set(expected)
    for path, text in expected.items():
        assert path.read_text() == text


def test_private_rows_have_the_published_batches_and_epsilons() -> None:
    from fedveil.privacy.releases import Plan

    for path in sorted((ROOT / "table-2").glob("cifar10-*.toml")):
        config = load_config(path)
        plan = Plan(5, 5, "all", config.run.rounds, 10_000, 10_000)
        releases = config.build_method().releases(plan)
        assert releases[0].accesses == (10_000 if "psg" in path.stem else 200)
        assert abs(releases[0].rate - 0.0256) < 0.001
        if "dp-fed" in path.stem:  # batches of 1/40 of the data, a little smaller than the paper's
            continue
        for row in account(releases, plan, 1e-5, "rdp"):
            assert row.epsilon == pytest.approx(float(path.stem.split("-")[-1]), abs=0.05)


@pytest.mark.parametrize("dataset", ["mnist", "fashion-mnist", "cifar10"])
def test_reduced_methods_differ_from_the_paper_in_size_and_not_in_price(dataset: str) -> None:
    from fedveil.privacy.releases import Plan

    reduced = experiment_script("fedlap_dp/reduced.py")
    plan = Plan(5, 5, "all", 1, 400, 440)
    for method, changes in reduced.METHODS.items():
        config = load_config(ROOT / f"reduced-{dataset}.toml", changes)
        assert config.build_method().name in method or method.startswith("dp-fedavg")
        if method in reduced.TABLE_2 | reduced.TABLE_4:
            release = config.build_method().releases(plan)[0]
            rounds = 15 if method == "psg" else 1  # which spends all at once
            assert release.accesses in (10 * rounds, 11 * rounds)
            assert abs(release.rate - 0.1) < 0.011
