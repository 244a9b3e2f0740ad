"""docs/best.md says what the records say, and the records are of the settings that are shipped."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from fedveil.experiment.config import build_method
from fedveil.privacy.accounting import epsilon_of
from fedveil.privacy.releases import Plan
from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def best() -> ModuleType:
    return load_script("docs/figures/make_best_page.py")


def test_the_page_agrees_with_the_records(best: ModuleType) -> None:
    tuned, attacks = best.read_baseline_records(), best.read_attack_records()
    assert best.PAGE.read_text() == best.page(best.read_rows(), best.read_records(), tuned, attacks)


def test_the_readmes_sentence_follows_from_the_records(best: ModuleType) -> None:
    compared = best.comparison(best.read_records(), best.read_baseline_records())
    text = best.README.read_text()
    assert text == best.readme(text, compared)
    assert best.lead(compared) in " ".join(text.split())


def test_the_page_says_what_the_server_would_know_without_secure_sums(best: ModuleType) -> None:
    """The epsilon of the note is that of a hundredth of the sum's noise on every upload."""
    row = next(row for group in best.read_rows() for row in group.rows if row.id == "server-mnist-3")
    sigma, config = best.read_records()[row.id]["noise_multiplier"], row.config()
    plain = build_method(config.method | {"noise_multiplier": sigma})
    plan = Plan(100, 100, "all", config.run.rounds)
    against = epsilon_of(plain.releases(plan), plan, config.privacy.delta, "server", "client")
    note = next(group.note for group in best.read_rows() if group.key == "server")
    assert against is not None
    assert f"epsilon would be {against:.1f}" in note


def test_every_record_is_of_a_row_and_of_its_present_configuration(best: ModuleType) -> None:
    rows = {row.id: row for group in best.read_rows() for row in group.rows}
    records = best.read_records()
    assert records
    for name, record in records.items():
        assert record["row"] == name
        assert record["config"] == rows[name].config().identity()
        assert record["command"] == rows[name].command()
        assert 0 < record["epsilon"] <= rows[name].config().privacy.target_epsilon


def test_every_row_is_a_configuration_that_can_run(best: ModuleType) -> None:
    names = [row.id for group in best.read_rows() for row in group.rows]
    assert len(names) == len(set(names))
    for group in best.read_rows():
        for row in group.rows:
            row.config().build_method()
            assert row.config().privacy.target_epsilon is not None


def test_commands_survive_a_shell(best: ModuleType) -> None:
    for group in best.read_rows():
        for row in group.rows:
            words = shlex.split(row.command())
            assert [words[i + 1] for i, word in enumerate(words) if word == "--set"] == list(row.changes)


def test_seeds_and_tuned_methods_without_a_record_are_listed(best: ModuleType) -> None:
    row = best.read_rows()[0].rows[0]
    runs = [{"seed": 0, "accuracy": 0.96}, {"seed": 2, "accuracy": 0.97}]
    record = {"epsilon": 1.0, "runs": runs}
    groups = [best.Group("g", "G", "n", (row,))]
    text = best.page(groups, {row.id: record}, {})
    assert "| 2 of 3 |" in text
    assert f"- Seeds of the rows above: 1, {row.minutes:g} minutes." in text
    runs.append({"seed": 1, "accuracy": 0.96})
    assert "Seeds of the rows above" not in best.page(groups, {row.id: record}, {})
    one, *others = best.baselines.read_baselines()
    text = best.page(groups, {row.id: record}, {one.key: {"trials": [], "chosen": {}, "tests": []}})
    absent = text.split("## Not run yet")[1]
    assert f"`{one.key}`" not in absent
    assert all(f"`{other.key}`" in absent for other in others)


def test_every_row_has_its_command_and_every_section_its_line_in_the_overview(best: ModuleType) -> None:
    groups = best.read_rows()
    text = best.page(groups, {})
    typed = text.replace(" \\\n  ", " ")
    assert all(f"\n{row.command()}\n" in typed for group in groups for row in group.rows)
    main = [group for group in groups if group.key in best.MAIN]
    assert len(main) == len(best.MAIN)
    assert all(f"| [{group.title}](#" in text for group in main)


def test_a_missed_target_is_reported_as_missed(best: ModuleType) -> None:
    row = replace(best.read_rows()[0].rows[0], target=97.0, stretch=98.0)
    record = {"epsilon": 1.0, "runs": [{"seed": 0, "accuracy": 0.96}, {"seed": 1, "accuracy": 0.97}]}
    assert best.reached(row, record) == "**missed** by 0.50"
    assert best.reached(replace(row, target=96.5), record) == "target"
    assert best.reached(replace(row, stretch=96.4), record) == "stretch"
    text = best.page([best.Group("g", "G", "n", (row,))], {row.id: record})
    assert "**missed** by 0.50" in text
    assert "not run" in best.page([best.Group("g", "G", "n", (row,))], {})


def test_the_verdict_counts_targets_that_are_met_missed_and_not_run(best: ModuleType) -> None:
    row = replace(best.read_rows()[0].rows[0], target=97.0, stretch=98.0)
    rows = [replace(row, id=name, what=f"epsilon {name}") for name in ("low", "met", "far", "none")]
    records = {
        name: {"epsilon": 1.0, "runs": [{"seed": 0, "accuracy": accuracy}]}
        for name, accuracy in (("low", 0.9), ("met", 0.975), ("far", 0.99))
    }
    text = best.verdict([best.Group("g", "G", "n", tuple(rows))], records)
    assert "2 of 4 targets are met, 1 of them with the stretch" in text
    assert "Missed: MNIST, record, epsilon low." in text
    assert "Not run: MNIST, record, epsilon none." in text


def test_collecting_keeps_the_seeds_of_the_same_setting(best: ModuleType) -> None:
    def record(*runs: tuple[int, float], **other: object) -> dict[str, object]:
        found = [{"seed": seed, "accuracy": accuracy} for seed, accuracy in runs]
        return {"row": "a", "config": "c", "numerics": 2, "command": "now", "runs": found} | other

    both = best.merged(record((0, 0.1), (1, 0.2), command="before"), record((1, 0.3), (2, 0.4)))
    assert both == record((0, 0.1), (1, 0.3), (2, 0.4))
    for key, value in (("config", "d"), ("numerics", 1), ("row", "b")):
        assert best.merged(record((0, 0.1), **{key: value}), record((2, 0.4))) == record((2, 0.4))
    assert best.merged({}, record((2, 0.4))) == record((2, 0.4))


def test_the_lead_is_over_the_best_method_and_only_where_all_were_run(best: ModuleType) -> None:
    def record(accuracy: float) -> dict[str, object]:
        return {"runs": [{"seed": 0, "accuracy": accuracy}]}

    others = {"dp-fedavg": record(0.7), "udp-fedavg": record(0.8), "fedceo": record(0.75)}
    whole = best.Compared("Clients", "mnist", 3.0, record(0.9), others)
    part = replace(whole, others=others | {"fedceo": None})
    behind = replace(whole, recommended=record(0.78))
    assert whole.ahead() == pytest.approx(10.0)
    assert behind.ahead() == pytest.approx(-2.0), "a method that is ahead of the recommended one is shown so"
    assert part.ahead() is None
    assert best.lead([part]) == ""
    assert "by -2.0 to 10.0 points (2 comparisons, median 4.0)" in best.lead([whole, behind, part])


def test_every_federation_is_compared_with_the_row_of_its_epsilon(best: ModuleType) -> None:
    lines = best.comparison({"user-mnist-4.18": {"runs": []}}, {})
    assert [line.recommended for line in lines if line.recommended is not None] == [{"runs": []}]
    assert all(set(line.others) == set(best.METHODS) for line in lines)
