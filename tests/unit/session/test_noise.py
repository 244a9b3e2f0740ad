"""Where privacy noise comes from: a run that can be repeated, or one whose noise nobody can remove."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedveil import Plan, Result, run
from fedveil.engines.engine import Answers
from fedveil.errors import ResultError
from fedveil.experiment.config import make_config
from fedveil.experiment.prepare import prepare
from fedveil.experiment.target import noise_source
from fedveil.methods.dp_fedavg import DPFedAvg
from fedveil.methods.dp_fedprox import DPFedProx
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.method import At
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.sampling import draw_cohort, draw_secret_cohort
from fedveil.privacy.statement import SEEDED
from fedveil.report.html import write_report
from fedveil.session.loop import Callback
from fedveil.streams import NoiseSource, ServerStreams
from fedveil.tree import flatten, sub, with_axis
from tests.contract.federation import StopsAfter, distance, make_clients, make_task

METHOD = DPFedAvg(batch_size=4, noise_multiplier=2.0, clip=0.5)


def go(folder: Path | None = None, method: Any = METHOD, **more: Any) -> Result:
    options: dict[str, Any] = {"rounds": 1, "sampler": "all", "workers": 1, "checkpoint_every": 1} | more
    return run(make_task(), make_clients(), method, results=folder, **options)


class _Uploads(Callback):
    """What the server got; it is trusted here, the model is what is published."""

    def __init__(self) -> None:
        self.answers = Answers((), None)

    def exchange_ends(self, at: At, cohort: Any, down: Any, up: Any) -> None:
        self.answers = Answers(tuple(cohort), up.map(lambda _, leaf: leaf.clone()))


def vector(params: Any) -> Tensor:
    return flatten(with_axis(params))[0].double()


@pytest.mark.parametrize("noise", ["seeded", "entropy"])
def test_from_model_configuration_and_seed_the_noise_is_removed_from_a_seeded_run_only(
    noise: NoiseSource,
) -> None:
    """The attacker knows everything but the data: it runs the server once more on uploads that are all zero."""
    watch = _Uploads()
    published = go(noise=noise, seed=0, callbacks=[watch]).model
    task, plan = make_task(), Plan(5, 5, "all", 1, 3, 12)
    at, clients, up = At(plan, 1), watch.answers.clients, watch.answers.up
    assert up is not None
    server = METHOD.init_server(task.init(0), plan)
    streams = ServerStreams(0, 1, 0)
    silent = up.map(lambda _, leaf: torch.zeros_like(leaf))
    guess = METHOD.server_update(task, at, server, clients, silent, streams)  # type: ignore[arg-type]
    noiseless = vector(published) - vector(guess.params)
    truth = vector({name: leaf.mean(0) for name, leaf in up.update.items()})  # type: ignore[attr-defined]
    error = float((noiseless - truth).abs().max())
    std = METHOD.noise_multiplier * METHOD.clip / len(clients)
    if noise == "seeded":
        assert error < std / 500
    else:
        assert error > std


def test_own_data_gets_entropy_benchmarks_the_seed_and_methods_without_noise_the_seed(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,b,y\n" + "".join(f"{k}.5,{k * k % 7},{k % 2}\n" for k in range(60)))
    own = {"dataset": "table", "data_options": {"path": str(table), "label": "y"}, "model": "mlp-2"}
    for task, method, asked, expected in (
        (own, "dp-fedavg", None, "entropy"),
        (own, "dp-fedavg", "seeded", "seeded"),
        (own, "fedavg", None, "seeded"),
        (own, "fedavg", "entropy", "seeded"),
        ({}, "dp-fedavg", None, "seeded"),
        ({}, "dp-fedavg", "entropy", "entropy"),
    ):
        section = {"rounds": 1} | ({} if asked is None else {"noise": asked})
        raw = {"task": task, "method": {"name": method}, "partition": {"clients": 3}, "run": section}
        prepared = prepare(make_config(raw), 0)
        assert prepared.noise == expected
    deployed = {"partition": {"clients": 3}, "run": {"engine": "flower"}, "method": {"name": "dp-fedavg"}}
    assert noise_source(make_config(deployed), METHOD, Plan(3, 3, "all", 1)) == "entropy"
    seeded = make_config(deployed | {"run": {"engine": "flower", "noise": "seeded"}})
    assert noise_source(seeded, METHOD, Plan(3, 3, "all", 1)) == "entropy", (
        "nodes ignore it, and the run says so"
    )
    assert [line.split()[0] for line in seeded.unused()] == ["run.noise"]
    assert go().privacy["noise"] == "entropy", "arrays from Python are the user's own"
    assert go(method=FedAvg()).privacy["noise"] == "seeded"


def test_the_statement_of_a_seeded_run_starts_with_its_removable_noise(tmp_path: Path) -> None:
    go(tmp_path / "seeded", noise="seeded")
    go(tmp_path / "entropy", noise="entropy")
    go(tmp_path / "plain", method=FedAvg())
    for name, noise in (("seeded", "seeded"), ("entropy", "entropy"), ("plain", "seeded")):
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["privacy"]["noise"] == noise
        assert summary["privacy_in_words"].startswith(SEEDED) == (name == "seeded")
        page = write_report([tmp_path / name], tmp_path / "page.html").read_text()
        verdict = page.partition('<p class="verdict')[2].partition("</p>")[0]
        first = verdict.partition(">")[2].partition(".")[0]
        assert ("whoever knows the seed can remove it" in first) == (name == "seeded")


@pytest.mark.parametrize("method", [METHOD, DPFedProx(batch_size=4, clip=0.5)], ids=["clients", "records"])
def test_entropy_noise_differs_from_run_to_run_and_the_start_does_not(method: Any) -> None:
    fields: dict[str, Any] = {"method": method, "noise": "entropy"}
    assert distance(go(**fields).model, go(**fields).model) > 0
    assert distance(go(**fields | {"noise": "seeded"}).model, go(**fields | {"noise": "seeded"}).model) == 0
    workers = go(**fields, workers=2)  # processes do not share a source of noise
    assert distance(workers.model, go(**fields, workers=2).model) > 0


def test_a_resumed_entropy_run_charges_the_started_round_again_and_its_statement_counts_both(
    tmp_path: Path,
) -> None:
    class DiesIn(Callback):
        def round_starts(self, at: At, cohort: Any) -> None:
            if at.round == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "cut", rounds=4, callbacks=[DiesIn()])
    resumed = go(tmp_path / "cut", rounds=4)
    whole = go(tmp_path / "whole", rounds=4)
    assert len(resumed.history) == 4
    ledger = Ledger(tmp_path / "cut" / "ledger.jsonl")
    (run_name,) = {json.loads(line)["run"] for line in ledger.path.read_text().splitlines()}
    assert sum(ledger.rounds(run_name).values()) > sum(
        Ledger(tmp_path / "whole" / "ledger.jsonl")
        .rounds(json.loads((tmp_path / "whole" / "ledger.jsonl").read_text().splitlines()[0])["run"])
        .values()
    )
    five = go(tmp_path / "five", rounds=5)
    observed = [
        next(row["epsilon"] for row in result.privacy["proven"] if row["adversary"] == "observer")
        for result in (whole, resumed, five)
    ]
    assert observed[0] < observed[1] == pytest.approx(observed[2])


def test_a_folder_is_not_resumed_with_another_source_of_noise(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "r", rounds=4, noise="seeded", callbacks=[StopsAfter(2)])
    with pytest.raises(ResultError):
        go(tmp_path / "r", rounds=4, noise="entropy")


def test_the_folder_does_not_allow_reproducing_the_noise(tmp_path: Path) -> None:
    """The key is the operating system's: two runs of the same folder content differ in what they released only."""
    go(tmp_path / "a" / "r", noise="entropy", transcript=True)
    go(tmp_path / "b" / "r", noise="entropy", transcript=True)
    files = [sorted(p.relative_to(tmp_path / n) for p in (tmp_path / n).rglob("*")) for n in "ab"]
    assert files[0] == files[1]
    same = {".identity", "config.toml", ".data"}
    assert all(
        (tmp_path / "a" / "r" / n).read_bytes() == (tmp_path / "b" / "r" / n).read_bytes() for n in same
    )


@pytest.mark.parametrize("sampler", ["poisson", "fixed", "all"])
def test_a_secret_cohort_has_the_distribution_of_the_sampler(sampler: Any) -> None:
    plan = Plan(8, 8 if sampler == "all" else 3, sampler, 1)
    drawn = [draw_secret_cohort(plan) for _ in range(4000)]
    assert all(list(cohort) == sorted(set(cohort)) for cohort in drawn)
    seeded = [draw_cohort(plan, 0, number) for number in range(4000)]
    for cohorts in (drawn, seeded):
        sizes, counts = Counter(map(len, cohorts)), Counter(c for cohort in cohorts for c in cohort)
        assert (len(sizes) > 1) == (sampler == "poisson")
        for client in range(8):
            assert counts[client] / 4000 == pytest.approx(plan.cohort / 8, abs=0.04)


def test_records_are_sampled_from_entropy() -> None:
    """Poisson batches of DP-SGD: with seeded batches the gradients of two runs differ by noise of the same records."""
    method = DPFedProx(batch_size=2, clip=0.5, noise_multiplier=1e-9)
    models = [vector(sub(go(method=method, noise="entropy").model, make_task().init(0))) for _ in range(2)]
    assert float((models[0] - models[1]).abs().max()) > 1e-6
