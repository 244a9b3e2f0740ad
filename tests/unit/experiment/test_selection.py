"""Private selection: what it charges, when, and that nothing but the winner is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil.errors import DivergedError, InputError
from fedveil.experiment import selection
from fedveil.experiment.compare import compositions, plan_cells, run_cells
from fedveil.experiment.selection import Selection, SelectionSettings, plan_selection, run_selection
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.releases import Plan
from fedveil.privacy.selection import NegativeBinomialTrials, PoissonTrials
from fedveil.privacy.statement import show
from fedveil.session.results import ResultFolder
from fedveil.session.statement_file import verify

CONFIG = """
[partition]
clients = 6
[method]
name = "udp-fedavg"
batch_size = 16
noise_multiplier = 4.0
[run]
rounds = 2
cohort = 3
sampler = "poisson"
"""
ENTROPY = 'noise = "entropy"\n'
PUBLIC = SelectionSettings("public")


def _plan(tmp_path: Path, settings: SelectionSettings = PUBLIC, *changes: str, **more: Any) -> Selection:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    cells = plan_cells([path], changes=changes, grid=more.pop("grid", ["method.clip=0.5,1.0"]), **more)
    return plan_selection(cells, settings, None)


def _ledger(results: Path) -> Ledger:
    (path,) = results.rglob("ledger.jsonl")
    return Ledger(path)


def _draws(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(selection, "draw", lambda _: count)


def test_only_the_winner_is_written_with_the_guarantee_of_the_selection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _draws(monkeypatch, 3)
    planned = _plan(tmp_path)
    folder = run_selection(planned, tmp_path / "results")
    assert folder is not None
    assert all(check.passed for check in verify(folder))
    files = sorted(path.name for path in (tmp_path / "results").rglob("*") if path.is_file())
    marks = [".data", ".lock", ".run", ".salt", "ledger.jsonl", "ledger.jsonl.head", "statement.json"]
    assert files == sorted([*marks, "config.toml", "model.safetensors", "rounds.jsonl", "summary.json"])
    summary = ResultFolder(folder).read().summary
    rows = {row["adversary"]: row["epsilon"] for row in summary["privacy"]["proven"]}
    assert rows["server"] is None
    assert rows["client"] is None
    assert rows["observer"] > 0
    assert summary["privacy"]["selection"]["candidates"] == 2
    assert "Selection" in summary["privacy_in_words"]
    assert "number_of_trials" not in json.dumps(summary)
    assert all("epsilon" not in line for line in ResultFolder(folder).rounds())


def test_the_seed_of_the_noise_is_neither_stored_nor_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _draws(monkeypatch, 2)
    seeds: list[int] = []
    trial = selection._trial

    def watched(*arguments: Any) -> Any:
        result = trial(*arguments)
        seeds.append(result.summary["seed"])
        return result

    monkeypatch.setattr(selection, "_trial", watched)
    folder = run_selection(_plan(tmp_path), tmp_path / "results")
    assert folder is not None
    assert len(set(seeds)) == 2
    for path in (tmp_path / "results").rglob("*"):
        if path.is_file():
            assert not any(str(seed).encode() in path.read_bytes() for seed in seeds)


def test_an_interrupted_selection_stays_charged_and_is_charged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    with monkeypatch.context() as during:

        def interrupted(*_: Any) -> Any:
            assert len(_ledger(results)) == 1  # before the first trial starts
            raise KeyboardInterrupt

        _draws(during, 1)
        during.setattr(selection, "_trial", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_selection(_plan(tmp_path), results)
    _draws(monkeypatch, 1)
    folder = run_selection(_plan(tmp_path), results)
    assert folder is not None
    assert len(_ledger(results)) == 2
    (twice,) = [r for r in ResultFolder(folder).read().privacy["proven"] if r["adversary"] == "observer"]
    other = run_selection(_plan(tmp_path), tmp_path / "other")
    assert other is not None
    (once,) = [r for r in ResultFolder(other).read().privacy["proven"] if r["adversary"] == "observer"]
    assert twice["epsilon"] > once["epsilon"]


def test_a_finished_selection_is_loaded_and_not_charged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _draws(monkeypatch, 1)
    folder = run_selection(_plan(tmp_path), tmp_path / "results")
    monkeypatch.setattr(selection, "_trial", None)
    assert run_selection(_plan(tmp_path), tmp_path / "results") == folder
    assert len(_ledger(tmp_path / "results")) == 1


def test_no_trial_or_only_diverged_ones_have_no_winner_and_stay_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverged(*_: Any) -> Any:
        raise DivergedError("not finite")

    planned = _plan(tmp_path, SelectionSettings("public", trials=PoissonTrials(3.0)))
    _draws(monkeypatch, 0)
    assert run_selection(planned, tmp_path / "results") is None
    _draws(monkeypatch, 2)
    monkeypatch.setattr(selection, "_trial", diverged)
    assert run_selection(planned, tmp_path / "results") is None
    assert len(_ledger(tmp_path / "results")) == 2
    assert not list((tmp_path / "results").rglob("summary.json"))


def test_a_selection_beyond_the_budget_is_refused_before_it_is_charged(tmp_path: Path) -> None:
    planned = _plan(tmp_path, PUBLIC, "privacy.budget=0.1")
    with pytest.raises(InputError) as refused:
        run_selection(planned, tmp_path / "results")
    assert refused.value.field == "privacy.budget"
    assert not _ledger(tmp_path / "results").entries


def test_a_noisy_score_is_charged_and_exact_scores_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _draws(monkeypatch, 2)
    path = tmp_path / "small.toml"
    path.write_text(CONFIG.replace("udp-fedavg", "dp-fedprox"))
    cells = plan_cells([path], grid=["method.clip=0.5,1.0"])
    noisy = plan_selection(cells, SelectionSettings("noisy", 0.1), None)
    public = plan_selection(cells, PUBLIC, None)
    dearer = zip(noisy.release.protection.values, public.release.protection.values, strict=True)  # type: ignore[attr-defined]
    assert all(one > other for one, other in dearer)
    folder = run_selection(noisy, tmp_path / "results")
    assert folder is not None
    result = ResultFolder(folder).read()
    assert result.summary["loss"] is None
    assert all("accuracy" not in line for line in result.history)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("score", {}),
        ("score", {"score": "exact"}),
        ("score_epsilon", {"score": "noisy"}),
        ("score_epsilon", {"score": "public", "score_epsilon": 0.1}),
        ("score_epsilon", {"score": "noisy", "score_epsilon": 50}),
        ("score_epsilon", {"score": "noisy", "score_epsilon": "much"}),
        ("trials", {"score": "public", "trials": "uniform"}),
        ("gamma", {"score": "public", "gamma": 0}),
        ("gamma", {"score": "public", "gamma": True}),
        ("eta", {"score": "public", "eta": -1}),
        ("mean", {"score": "public", "trials": "poisson", "mean": 0}),
        ("--selection-set", {"score": "public", "trials": "poisson", "gamma": 0.1}),
        ("--selection-set", {"score": "public", "colour": 1}),
    ],
)
def test_impossible_settings_are_refused_by_name(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(InputError) as refused:
        SelectionSettings.of(given)
    assert refused.value.field == field


def test_settings_are_read_from_words() -> None:
    assert SelectionSettings.of({"score": "public", "eta": 0, "gamma": 0.2}).trials == NegativeBinomialTrials(
        0.0, 0.2
    )
    assert SelectionSettings.of({"score": "public", "trials": "poisson", "mean": 5}).trials == PoissonTrials(
        5.0
    )


@pytest.mark.parametrize(
    ("field", "changes", "settings"),
    [
        ("run.transcript", ["run.transcript=true"], PUBLIC),
        ("run.early_stopping", ['run.early_stopping={ dataset = "digits" }'], PUBLIC),
        ("privacy.budget_adversary", ["privacy.budget=50.0", 'privacy.budget_adversary="server"'], PUBLIC),
        ("method", ["method.noise_multiplier=0.0"], PUBLIC),
        ("score", [], SelectionSettings("noisy", 0.1)),
    ],
)
def test_what_a_selection_cannot_protect_is_refused(
    tmp_path: Path, field: str, changes: list[str], settings: SelectionSettings
) -> None:
    with pytest.raises(InputError) as refused:
        _plan(tmp_path, settings, *changes)
    assert refused.value.field == field


def test_candidates_on_other_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        _plan(tmp_path, grid=["partition.clients=5,6"])


def test_all_runs_of_a_comparison_compose(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG + ENTROPY)
    cells = plan_cells([path], methods=["udp-fedavg", "fedavg"], grid=["method.clip=0.5,1.0"], seeds=[0])
    assert not run_cells(cells, tmp_path / "results", jobs=1)
    folders = [cell.folder(tmp_path / "results") for cell in cells]
    (together,) = compositions(folders)
    assert together.runs == 2  # fedavg has no privacy to spend
    single = ResultFolder(folders[0]).read().privacy["proven"]
    for row, alone in zip(together.proven, single, strict=True):
        assert (row.unit, row.adversary) == (alone["unit"], alone["adversary"])
        assert row.epsilon is not None
        assert row.epsilon > alone["epsilon"]
        assert f"epsilon {show(row.epsilon)} for a {row.unit} against" in together.in_words()
    assert compositions(folders[:1]) == []


def test_runs_with_other_deltas_compose_too(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG + ENTROPY)
    cells = plan_cells([path], grid=["privacy.delta=1e-5,1e-6"], seeds=[0])
    assert not run_cells(cells, tmp_path / "results", jobs=1)
    (together,) = compositions([cell.folder(tmp_path / "results") for cell in cells])
    assert together.runs == 2
    assert {row.delta for row in together.proven} == {1e-5}


def test_what_all_runs_prove_together_is_that_of_the_noise_that_a_target_chose(tmp_path: Path) -> None:
    """The multiplier is not in the configuration: the default would say that two runs cost less than one."""
    path = tmp_path / "small.toml"
    path.write_text(CONFIG.replace("noise_multiplier = 4.0\n", "") + ENTROPY)
    changes = ["privacy.target_epsilon=40", 'privacy.target_adversary="observer"']
    cells = plan_cells([path], changes=changes, grid=["method.clip=0.5,1.0"], seeds=[0])
    assert not run_cells(cells, tmp_path / "results", jobs=1)
    folders = [cell.folder(tmp_path / "results") for cell in cells]
    (together,) = compositions(folders)
    for row, alone in zip(together.proven, ResultFolder(folders[0]).read().privacy["proven"], strict=True):
        assert row.epsilon is not None
        assert row.epsilon > 1.5 * alone["epsilon"]
    for folder in folders:  # without the ledgers the noise is chosen again
        (folder / "ledger.jsonl").unlink()
        (folder / "ledger.jsonl.head").unlink()
    (again,) = compositions(folders)
    assert [row.epsilon for row in again.proven] == pytest.approx([row.epsilon for row in together.proven])


def test_runs_of_one_seed_prove_nothing_together_since_their_noise_cancels(tmp_path: Path) -> None:
    """Two clips with noise of one standard deviation: the difference of both models has no noise at all."""
    path = tmp_path / "small.toml"
    path.write_text(CONFIG.replace("rounds = 2", "rounds = 1").replace("poisson", "fixed"))
    models = []
    for noise in (4.0, 0.0):
        found = []
        for clip in (1.0, 2.0):
            changes = [f"method.clip={clip}", f"method.noise_multiplier={noise / clip}"]
            (cell,) = plan_cells([path], changes=changes, seeds=[0])
            assert not run_cells([cell], tmp_path / "results", jobs=1)
            found.append(cell.folder(tmp_path / "results"))
        first, second = (ResultFolder(folder).read().model for folder in found)
        models.append({name: second[name] - leaf for name, leaf in first.items()})
        if noise:
            (together,) = compositions(found)
            assert all(row.epsilon is None for row in together.proven)
            assert all(row["epsilon"] is None for row in together.to_json()["proven"])
    noisy, exact = models
    error = torch.cat([(noisy[name] - leaf).flatten() for name, leaf in exact.items()])
    assert (
        float(error.abs().max()) < 0.1
    )  # two steps of the grid; noise of their own would have 4 / 3 * sqrt(2)


def test_what_all_runs_prove_together_counts_repeated_rounds(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG + ENTROPY)
    cells = plan_cells([path], grid=["method.clip=0.5,1.0"], seeds=[0])
    folders = [cell.folder(tmp_path / "results") for cell in cells]
    assert not run_cells(cells, tmp_path / "results", jobs=1)
    (once,) = compositions(folders)
    ledger = Ledger(folders[0] / "ledger.jsonl")
    plan = Plan(6, 3, "poisson", 2)
    for _ in range(3):  # as if a round had been interrupted three times
        releases = [entry.release for entry in ledger.entries if (entry.round, entry.attempt) == (1, 0)]
        ledger.charge(ledger.entries[0].run, 1, releases, plan, replay_safe=False)
    (more,) = compositions(folders)
    for row, fewer in zip(more.proven, once.proven, strict=True):
        assert row.epsilon is not None
        assert fewer.epsilon is not None
        assert row.epsilon > fewer.epsilon


def test_who_knows_the_seed_of_a_trial_cannot_remove_its_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _draws(monkeypatch, 1)
    monkeypatch.setattr("fedveil.experiment.selection.secrets.randbelow", lambda _: 7)
    models = []
    for name in ("a", "b"):
        folder = run_selection(_plan(tmp_path, grid=["method.clip=0.5"]), tmp_path / name)
        assert folder is not None
        models.append(ResultFolder(folder).read().model)
    assert all(bool((leaf != models[1][name]).any()) for name, leaf in models[0].items())


def test_the_statement_of_a_selection_says_how_the_table_was_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _draws(monkeypatch, 1)
    table = tmp_path / "t.csv"
    table.write_text("who,a,y\n" + "".join(f"p{k % 30},{k % 7}.5,{k % 2}\n" for k in range(90)))
    config = tmp_path / "table.toml"
    config.write_text(f"""
        [task]
        dataset = "table"
        model = "logistic"
        data_options = {{path = "{table}", label = "y", person = "who", rows_per_person = 2}}
        [partition]
        clients = 3
        [method]
        name = "dp-fedsgd"
        [run]
        rounds = 2
        """)
    planned = plan_selection(plan_cells([config], changes=[], grid=["method.clip=0.5,1.0"]), PUBLIC, None)
    folder = run_selection(planned, tmp_path / "results")
    assert folder is not None
    privacy = ResultFolder(folder).read().summary["privacy"]
    assert privacy["data"] == list(planned.candidates[0][1].dataset.notes)
    (row,) = [row for row in privacy["proven"] if row["adversary"] == "observer"]
    assert [person["epsilon"] for person in privacy["persons"]] == [2 * row["epsilon"]]
