"""Runs taken together over seeds, and what their numbers amount to."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from fedveil.experiment.config import WITHOUT_EFFECT, Config, distinguishing
from fedveil.experiment.sections import Metric, PaperSection
from fedveil.report.groups import Spread, best_of, group, mixed
from fedveil.report.reading import read_runs
from fedveil.report.run import Paper, Run
from fedveil.report.verdict import against_paper, headline, lines, percent, small
from fedveil.validation import known_keys
from tests.unit.report.makers import proof, write_everything, write_run


def test_seeds_of_one_setting_are_one_group_and_names_tell_settings_apart(tmp_path: Path) -> None:
    settings = group(read_runs([write_everything(tmp_path)]))
    assert [setting.name for setting in settings] == [
        "fedavg",
        "udp-fedavg (noise multiplier 1)",
        "udp-fedavg (noise multiplier 2)",
    ]
    assert [len(setting.runs) for setting in settings] == [2, 2, 2]
    spread = settings[0].accuracy
    assert spread is not None
    assert spread.mean == pytest.approx(0.91)
    assert spread.deviation == pytest.approx(statistics.stdev([0.9, 0.92]))


def test_names_hold_as_few_settings_as_tell_them_apart() -> None:
    """The model first, then the noise; what follows from what is named already is left out."""
    first: dict[str, Any] = {
        "task": {"model": "logistic"},
        "method": {"name": "m", "batch_size": 1000, "clip": 1.0, "noise_multiplier": 4.0},
    }
    second: dict[str, Any] = {
        "task": {"model": "mlp-2"},
        "method": {"name": "m", "batch_size": 8, "clip": 0.5, "noise_multiplier": 5.0},
    }
    third: dict[str, Any] = {
        "task": {"model": "mlp-2"},
        "method": second["method"] | {"noise_multiplier": 6.0},
    }
    assert _names([first, second]) == ["m (logistic)", "m (mlp-2)"]
    assert _names([first, second, third]) == [
        "m (noise multiplier 4)",
        "m (noise multiplier 5)",
        "m (noise multiplier 6)",
    ]
    grid = [{"method": {"name": "m", "clip": clip, "lr": rate}} for clip in (1.0, 2.0) for rate in (0.1, 0.2)]
    assert len(set(_names(grid))) == 4
    assert all("clip" in name and "lr" in name for name in _names(grid))


def _names(configs: Sequence[dict[str, Any]]) -> list[str]:
    runs = [Run(f"{place}", True, method="m", config=config) for place, config in enumerate(configs)]
    return [setting.name for setting in group(runs)]


def test_a_warning_of_seeded_noise_follows_the_recommendation_of_another_model(tmp_path: Path) -> None:
    def private(epsilon: float, *, removable: bool) -> dict[str, Any]:
        rows = [proof("server", epsilon), proof("observer", epsilon)]
        return {"paper_claim": "none", "proven": rows, "removable": removable}

    write_run(tmp_path, "udp-fedavg", accuracy=0.95, privacy=private(2.0, removable=False))
    write_run(tmp_path, "dp-fedavg", accuracy=0.9, privacy=private(2.0, removable=True))
    text = headline(group(read_runs([tmp_path]))).text
    assert text.startswith("udp-fedavg reaches 95.00 %")
    assert text.endswith(
        "Do not publish the model of dp-fedavg: its privacy noise comes from a seed, and whoever knows the seed can "
        "remove it."
    )
    write_run(tmp_path, "centaur", accuracy=0.99, privacy=private(2.0, removable=True))
    text = headline(group(read_runs([tmp_path]))).text
    assert text.startswith("Do not publish the models of centaur and dp-fedavg: their privacy noise")


@pytest.mark.parametrize("key", sorted(known_keys(Config)))
def test_every_configuration_key_distinguishes_settings_or_has_no_effect(key: str) -> None:
    """Runs of two values of the key are one setting exactly where the key changes no result."""
    plain = Config().resolved()
    section, _, name = key.rpartition(".")
    other = plain | ({section: {**(plain.get(section) or {}), name: "other"}} if section else {name: "other"})
    runs = [Run(f"seed-{seed}", True, config=config) for seed, config in enumerate((plain, other))]
    without_effect = key in WITHOUT_EFFECT or section in WITHOUT_EFFECT
    for_federations = key in ("task.input_shape", "task.classes", "run.deadline", "run.max_message")
    assert (len(group(runs)) == 1) == (without_effect or for_federations)
    assert (distinguishing(plain) == distinguishing(other)) == (len(group(runs)) == 1)


def test_keys_without_effect_are_keys_of_a_configuration() -> None:
    assert set(known_keys(Config)) >= WITHOUT_EFFECT


def test_a_newer_key_at_its_default_does_not_split_a_setting() -> None:
    """Results from before the key existed are runs of the same setting as results from after."""
    old, new = ({"method": {"name": "fedceo", **more}} for more in ({}, {"block": 1}))
    assert len(group([Run("seed-0", True, config=old), Run("seed-1", True, config=new)])) == 1


def test_what_a_paper_measures_is_measured() -> None:
    fields = {field.name for field in dataclasses.fields(Run)}
    assert set(get_args(Metric)) <= fields
    read = {field.name for field in dataclasses.fields(Paper)} | {"table", "row", "attack"}
    assert set(PaperSection.model_fields) <= read


def test_a_mean_needs_no_second_seed_but_a_deviation_does() -> None:
    assert Spread.of([None, None]) is None
    assert Spread.of([0.5, None]) == Spread(0.5, None, 1)
    assert percent(Spread(0.5, None, 1)) == "50.00 %"
    assert percent(Spread(0.5, 0.01, 3)) == "50.00 ± 1.00 %"


def test_an_unfinished_run_does_not_enter_the_mean(tmp_path: Path) -> None:
    write_run(tmp_path, seed=0, accuracy=0.8)
    write_run(tmp_path, seed=1, accuracy=0.2, finished=False)
    (setting,) = group(read_runs([tmp_path]))
    assert setting.accuracy == Spread(0.8, None, 1)


def test_the_weakest_seed_is_what_is_proven(tmp_path: Path) -> None:
    write_run(tmp_path, seed=0, proven=[proof("server", 3.0), proof("observer", 1.0)])
    write_run(tmp_path, seed=1, proven=[proof("server", 5.0), proof("observer", None)])
    (setting,) = group(read_runs([tmp_path]))
    server = setting.proof("server")
    assert server is not None
    assert server.epsilon == 5.0
    assert setting.proof("observer") is None


def test_curves_span_the_seeds_at_common_rounds(tmp_path: Path) -> None:
    write_run(tmp_path, seed=0, accuracy=0.8)
    write_run(tmp_path, seed=1, accuracy=0.4, finished=False)
    (setting,) = group(read_runs([tmp_path]))
    x, mean, low, high = setting.curve("round", "accuracy")
    assert x == [1, 2]
    assert mean == pytest.approx([0.15, 0.3])
    assert low == pytest.approx([0.1, 0.2])
    assert high == pytest.approx([0.2, 0.4])


def test_other_data_is_called_hard_to_compare(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg")
    write_run(tmp_path, "scaffold", dataset="mnist")
    notes = mixed(group(read_runs([tmp_path])))
    assert len(notes) == 1
    assert "digits, mnist" in notes[0]


def test_the_headline_picks_the_best_run_with_a_meaningful_proof(tmp_path: Path) -> None:
    said = headline(group(read_runs([write_everything(tmp_path)])))
    assert said.level == "weak"
    assert "udp-fedavg (noise multiplier 1) reaches 80.50" in said.text
    assert (
        "epsilon 4 proven for one client's whole data against those who see only what is published"
        in said.text
    )
    assert "Against the server: epsilon 20, too large to be called protection." in said.text
    assert "fedavg reaches 91.00 ± 1.41 % accuracy without any proof" in said.text


def test_the_headline_prefers_a_useful_model_that_is_protected_against_the_server(tmp_path: Path) -> None:
    public = [proof("observer", 1.0), proof("server", 50.0)]
    write_run(tmp_path, "udp-fedavg", accuracy=0.95, proven=public)
    write_run(tmp_path, "dp-fedavg", accuracy=0.9, proven=[proof("observer", 4.0), proof("server", 4.0)])
    said = headline(group(read_runs([tmp_path])))
    assert said.text.startswith(
        "dp-fedavg reaches 90.00 % accuracy with epsilon 4 proven for one client's whole data"
    )
    assert (
        "against the server: limited protection. udp-fedavg reaches 95.00 % accuracy with epsilon 1."
        in said.text
    )
    (tmp_path / "b").mkdir()
    rows = [proof("observer", 4.0), proof("server", 4.0)]
    write_run(tmp_path / "b", accuracy=0.34, proven=rows, majority=majority(0.34, 500))
    assert "most frequent class" in headline(group(read_runs([tmp_path / "b"]))).text


def test_a_delta_that_exposes_one_unit_is_no_protection(tmp_path: Path) -> None:
    row = proof("observer", 0.5)
    write_run(tmp_path / "small", "udp-fedavg", proven=[row | {"delta": 0.2}])
    assert headline(group(read_runs([tmp_path / "small"]))).level == "good"  # of four clients
    write_run(tmp_path / "large", "udp-fedavg", proven=[row | {"delta": 0.25}])
    settings = group(read_runs([tmp_path / "large"]))
    assert headline(settings).level == "bad"
    assert "delta is too large for this to be called protection" in headline(settings).text
    assert lines(settings[0])[0].level == "bad"


def test_the_headline_never_calls_a_large_epsilon_or_no_proof_private(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "udp-fedavg", proven=[proof("observer", 97.0)])
    assert headline(group(read_runs([tmp_path / "a"]))).level == "bad"
    write_run(tmp_path / "b", "fedavg")
    said = headline(group(read_runs([tmp_path / "b"])))
    assert said.level == "bad"
    assert "proves no privacy at all" in said.text
    write_run(tmp_path / "c", finished=False)
    assert "No run here is finished" in headline(group(read_runs([tmp_path / "c"]))).text


def test_guarantees_for_another_unit_are_reported_as_not_proven(tmp_path: Path) -> None:
    rows = [proof("observer", 4.0), proof("server", 2.0, "record")]
    write_run(tmp_path / "a", "udp-fedavg", proven=rows)
    (setting,) = group(read_runs([tmp_path / "a"]))
    assert (
        "Against the server: epsilon 2 for a single record, moderate protection." in headline([setting]).text
    )
    assert "epsilon 2 for a single record against the server" in lines(setting)[0].text
    write_run(tmp_path / "b", "udp-fedavg", proven=[proof("observer", 4.0), proof("server", None)])
    assert "Against the server nothing is proven." in headline(group(read_runs([tmp_path / "b"]))).text


def test_a_finished_run_without_test_data_is_not_called_unfinished(tmp_path: Path) -> None:
    write_run(
        tmp_path / "a", "udp-fedavg", accuracy=None, proven=[proof("observer", 4.0), proof("server", 20.0)]
    )
    (setting,) = group(read_runs([tmp_path / "a"]))
    said = headline([setting])
    assert said.level == "weak"
    assert said.text.startswith("No score was measured. udp-fedavg proves epsilon 4 for one client's whole")
    assert "Against the server: epsilon 20, too large to be called protection." in said.text
    assert lines(setting)[0].text.startswith("No score was measured. Proven for one client's whole data")
    write_run(tmp_path / "b", "fedavg", accuracy=None)
    assert headline(group(read_runs([tmp_path / "b"]))).level == "bad"


def test_a_model_without_skill_is_reported_as_such(tmp_path: Path) -> None:
    write_run(
        tmp_path, "udp-fedavg", accuracy=0.35, proven=[proof("observer", 0.5)], majority=majority(0.34, 500)
    )
    assert "no better than always answering" in headline(group(read_runs([tmp_path]))).text


@pytest.mark.parametrize(
    ("accuracy", "rate", "labels", "useless"),
    [
        (0.90, 0.50, 400, False),  # two classes: far better than a coin
        (0.90, 0.88, 100, True),  # not better than the most frequent class for sure
        (0.90, 0.88, 10_000, False),
        (0.60, 0.65, 10_000, True),
    ],
)
def test_a_model_is_held_against_the_most_frequent_class(
    tmp_path: Path, accuracy: float, rate: float, labels: int, useless: bool
) -> None:
    rows, known = [proof("observer", 0.5)], majority(rate, labels)
    write_run(tmp_path, "udp-fedavg", accuracy=accuracy, proven=rows, classes=["no", "yes"], majority=known)
    said = headline(group(read_runs([tmp_path]))).text
    assert ("most frequent class" in said) is useless


@pytest.mark.parametrize(
    ("key", "low", "high", "useless"),
    [
        ("r2", 0.92, 0.96, False),
        ("r2", -0.1, 0.2, True),  # not better than the mean for sure
        ("concordance", 0.55, 0.7, False),
        ("concordance", 0.4, 0.6, True),
    ],
)
def test_models_of_numbers_and_times_have_their_own_score_and_guess(
    tmp_path: Path, key: str, low: float, high: float, useless: bool
) -> None:
    value = (low + high) / 2
    scores: dict[str, Any] = {
        key: value,
        "metrics": {"all": {key: {"value": value, "low": low, "high": high}}},
    }
    write_run(tmp_path, "udp-fedavg", accuracy=None, proven=[proof("observer", 0.5)], **scores)
    (setting,) = group(read_runs([tmp_path]))
    assert setting.measure.key == key
    assert setting.interval == (low, high)
    said = headline([setting]).text
    assert f"of {value:.3f}" in said
    assert ("no better than" in said) is useless


def test_of_perplexities_the_least_is_best(tmp_path: Path) -> None:
    for name, values in {"fedavg": (30.0, 30.1), "udp-fedavg": (80.0, 81.0)}.items():
        for seed, value in enumerate(values):
            write_run(tmp_path, name, seed=seed, accuracy=None, perplexity=value, identity=f"{name}{seed}")
    settings = group(read_runs([tmp_path]))
    best = best_of(settings)
    assert best is not None
    assert best.method == "fedavg"
    assert "perplexity of 30.05" in headline(settings).text


def test_settings_with_other_measures_are_called_hard_to_compare(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", accuracy=0.9)
    write_run(tmp_path, "udp-fedavg", accuracy=None, r2=0.5)
    settings = group(read_runs([tmp_path]))
    assert any("measures (R², accuracy)" in note for note in mixed(settings))
    assert headline(settings).text.startswith("fedavg reaches 90.00 % accuracy")


def majority(rate: float, labels: int) -> dict[str, float]:
    return {"rate": rate, "labels": labels}


def test_an_audit_above_the_proof_is_broken(tmp_path: Path) -> None:
    audit = {"lower_bound": 6.0, "confidence": 0.95, "samples": 10}
    privacy = {"paper_claim": "none", "proven": [proof("observer", 4.0)], "audit": audit}
    write_run(tmp_path / "a", privacy=privacy)
    settings = group(read_runs([tmp_path / "a"]))
    assert headline(settings).level == "bad"
    assert any("BROKEN" in line.text for line in lines(settings[0]))
    undeclared = audit | {"lower_bound": 1.0, "p_value": 1e-9}
    write_run(tmp_path / "b", privacy=privacy | {"audit": undeclared})
    assert headline(group(read_runs([tmp_path / "b"]))).level == "bad"
    write_run(tmp_path / "c", privacy=privacy | {"audit": audit | {"lower_bound": 1.0}})
    assert headline(group(read_runs([tmp_path / "c"]))).level == "weak"


@pytest.mark.parametrize(
    ("expected", "tolerance", "level", "part"),
    [
        (91.0, 2.0, "good", "met within 2 points (-1.00)"),
        (95.0, 2.0, "weak", "missed by -5.00"),
        (0.91, 0.02, "good", "met"),
    ],
)
def test_a_paper_number_is_met_or_missed(
    tmp_path: Path, expected: float, tolerance: float, level: str, part: str
) -> None:
    paper = {"source": "A paper", "table": "Table 1", "expected": expected, "tolerance": tolerance}
    write_run(tmp_path, paper=paper)
    said = against_paper(group(read_runs([tmp_path]))[0])
    assert said is not None
    assert said.level == level
    assert part in said.text


@pytest.mark.parametrize(
    ("metric", "tolerance", "level"),
    [("mcc", None, "fair"), ("mcc", 0.02, "good"), ("perplexity", 1.0, "weak")],
)
def test_a_paper_number_of_texts_is_compared_as_it_is(
    tmp_path: Path, metric: str, tolerance: float | None, level: str
) -> None:
    paper = {"source": "A paper", "table": "3", "metric": metric, "expected": 0.557, "tolerance": tolerance}
    write_run(tmp_path, paper=paper, mcc=0.55, perplexity=40.0)
    said = against_paper(group(read_runs([tmp_path]))[0])
    assert said is not None
    assert said.level == level
    assert f"{metric} 0.557; this is {'0.55' if metric == 'mcc' else '40'}" in said.text


def test_a_paper_number_of_personal_models_is_compared_with_theirs(tmp_path: Path) -> None:
    paper = {"source": "A paper", "metric": "personal", "expected": 0.7726}
    write_run(tmp_path, "centaur", accuracy=0.08, paper=paper, personal={"clients": 3, "test_accuracy": 0.7})
    said = against_paper(group(read_runs([tmp_path]))[0])
    assert said is not None
    assert said.text.endswith(
        "states 77.26 %; the clients' own models reach 70.00 %; this is -7.26 points from it."
    )


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        ("full", "from it."),
        ("full; the model is our choice", "from it. Its scale: full; the model is our choice."),
        ("full; no model is named", "from it. Its scale: full; no model is named."),
        ("rounds 2 of 300", "from it. The run is reduced: rounds 2 of 300."),
    ],
)
def test_a_papers_value_is_shown_with_the_scale_of_the_run(scale: str, told: str, tmp_path: Path) -> None:
    write_run(tmp_path, paper={"source": "A paper", "expected": 0.5, "scale": scale})
    said = against_paper(group(read_runs([tmp_path]))[0])
    assert said is not None
    assert said.text.endswith(told)


def test_small_numbers_are_not_cut_in_two() -> None:
    assert small(1e-5) == "10⁻⁵"
    assert small(2e-6) == "2e-06"
    assert small(0.01) == "0.01"


def test_an_audit_file_contains_every_audit_and_its_verdict(tmp_path: Path) -> None:
    row = {
        "lower_bound": 1.0,
        "proven": 2.0,
        "broken": False,
        "adversary": "server",
        "scope": "one participation",
    }
    folder = write_run(tmp_path, proven=[proof("observer", 0.5)])
    (folder / "audits").mkdir()
    path = folder / "audits" / "audit.json"
    path.write_text(json.dumps({"proven": [], "audit": row | {"all": [row, row | {"lower_bound": 0.1}]}}))
    (setting,) = group(read_runs([tmp_path]))
    assert [audit["lower_bound"] for audit in setting.audited()] == [1.0, 0.1]
    assert headline([setting]).level == "good"
    path.write_text(json.dumps({"audit": row | {"broken": True}}))
    (setting,) = group(read_runs([tmp_path]))
    assert "refutes what is proven against the server" in " ".join(line.text for line in lines(setting))
    path.write_text(json.dumps({"audit": None}))
    assert group(read_runs([tmp_path]))[0].audited() == []


def test_a_method_keeps_its_look_from_report_to_report() -> None:
    def looks(*methods: str) -> dict[str, int]:
        runs = [Run(name, True, method=name, config={"method": {"name": name}}) for name in methods]
        return {setting.method: setting.look for setting in group(runs)}

    alone, together = looks("fedceo"), looks("udp-fedavg", "my-own", "fedceo", "fedavg")
    assert alone["fedceo"] == together["fedceo"]
    assert looks("my-own", "fedavg")["my-own"] == together["my-own"]
    assert len(set(together.values())) == 4
