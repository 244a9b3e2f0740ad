"""The page to sign says what is proven and by whom, and the public report holds nothing without noise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fedveil
from fedveil.report.html import render
from fedveil.report.reading import read_runs
from tests.unit.report.makers import proof, write_everything, write_run


def section_of(page: str, anchor: str) -> str:
    found = re.search(rf'<section id="{anchor}".*?</section>', page, re.DOTALL)
    return "" if found is None else found[0]


def test_the_first_page_has_odds_grade_duties_and_lines_to_sign(tmp_path: Path) -> None:
    rows = [proof("server", 20.0), proof("observer", 3.0), proof("client", None)]
    write_run(tmp_path, "udp-fedavg", proven=rows)
    first = section_of(render(read_runs([tmp_path])), "statement")
    assert "can raise a 50 % chance of guessing right whether a given client contributed its data" in first
    assert "to at most 95.3 %." in first
    assert "moderate protection" in first
    assert "too large to be called protection" in first
    assert "Nothing is proven: no noise is added" in first
    assert "Trust the server" in first
    for word in ("GDPR", "28/2024", "17 December 2024", "800-226", "March 2025", "signature", "date"):
        assert word in first


def test_the_first_page_states_data_time_and_version(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "udp-fedavg", client_names=["Basel", "Bern", "Genf", "<b>"])
    statement = {"made": "2026-01-02T03:04:05+00:00", "version": "9.9", "run": "r"}
    (folder / "statement.json").write_text(json.dumps(statement))
    runs = read_runs([tmp_path])
    first = section_of(render(runs), "statement")
    for text in (
        "digits, held by 4 clients (Basel, Bern, Genf, &lt;b&gt;)",
        "2026-01-02 03:04 UTC",
        "fedveil 9.9",
        "mlp-2 by udp-fedavg, 4 rounds",
    ):
        assert text in first, text
    assert "Basel" not in render(runs, public=True)


@pytest.mark.parametrize(("method", "secure"), [("udp-fedavg", False), ("udp-fedavg+secure", True)])
def test_the_first_page_states_whether_aggregation_is_secure(
    tmp_path: Path, method: str, secure: bool
) -> None:
    write_run(tmp_path, method)
    first = section_of(render(read_runs([tmp_path])), "statement")
    assert ("the server receives the update of every client" in first) != secure
    assert ("compare their public keys" in first) == secure


def test_links_of_the_first_page_lead_to_places_on_the_page(tmp_path: Path) -> None:
    """The report is one file: what it links to is in it."""
    write_run(tmp_path, "udp-fedavg", proven=[proof("observer", 3.0)])
    page = render(read_runs([tmp_path]))
    links = re.findall(r'<a [^>]*href="([^"]*)"', page)
    assert {"#odds", "#privacy"} <= set(links)
    for link in links:
        assert link.startswith("#")
        assert f'id="{link[1:]}"' in page, link
    assert "(e^ε + δ) / (1 + e^ε)" in section_of(page, "odds")


def test_the_noise_of_a_seed_is_a_duty_and_a_warning(tmp_path: Path) -> None:
    privacy = {
        "paper_claim": "none",
        "proven": [proof("observer", 3.0)],
        "removable": True,
        "noise": "seeded",
    }
    write_run(tmp_path, "udp-fedavg", privacy=privacy)
    first = section_of(render(read_runs([tmp_path])), "statement")
    assert "Do not publish this model" in first
    assert "publish no more than the model" not in first
    assert "Only if the seed stays secret: whoever sees the published model can raise" in first


@pytest.mark.parametrize(("epsilon", "publish"), [(None, False), (20.0, False), (3.0, True)])
def test_a_model_is_to_be_published_only_if_something_is_proven_of_it(
    tmp_path: Path, epsilon: float | None, publish: bool
) -> None:
    write_run(tmp_path, "udp-fedavg", proven=[proof("server", epsilon), proof("observer", epsilon)])
    first = section_of(render(read_runs([tmp_path])), "statement")
    assert ("Do not publish this model" in first) is not publish
    assert ("publish no more than the model" in first) is publish
    nothing = epsilon is None
    assert ("nothing bounds what that tells" in first) is nothing
    assert ("No row depends on a trusted server" in first) is not nothing
    assert ("Keep the ledger" in first) is not nothing


def test_a_trivial_bound_is_reported_as_such(tmp_path: Path) -> None:
    write_run(tmp_path, "udp-fedavg", proven=[proof("observer", 25.0)])
    first = section_of(render(read_runs([tmp_path])), "statement")
    assert "may become certain whether a given client contributed its data" in first
    assert "at most more" not in first


def test_the_first_page_names_a_run_stopped_by_its_budget(tmp_path: Path) -> None:
    write_run(tmp_path, "udp-fedavg", stopped="the privacy budget does not allow round 3")
    first = section_of(render(read_runs([tmp_path])), "statement")
    assert "the privacy budget does not allow round 3" in first


def test_the_data_of_a_federation_is_not_that_of_the_server(tmp_path: Path) -> None:
    write_run(tmp_path, "udp-fedavg", deployed=True, client_names=["Basel", "Bern"])
    page = render(read_runs([tmp_path]))
    first = section_of(page, "statement")
    assert "the own data of 4 nodes (Basel, Bern)" in first
    assert "on the server&#x27;s test set (digits)" in first
    assert "digits, held by" not in page
    assert "the nodes&#x27; own, tested on digits" in page


def test_the_first_page_of_a_federation_names_its_dropouts_ledgers_and_noise(tmp_path: Path) -> None:
    privacy = {
        "paper_claim": "none",
        "proven": [proof("server", 3.0)],
        "removable": False,
        "noise": "entropy",
    }
    folder = write_run(tmp_path, "udp-fedavg", deployed=True, privacy=privacy)
    (folder / "statement.json").write_text(json.dumps({"run": "r"}))
    rounds = [{"round": 1, "cohort": 3, "answered": 2}, {"round": 2, "cohort": 3, "answered": 0}]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rounds))
    runs = read_runs([tmp_path])
    first = section_of(render(runs), "statement")
    assert "4 of 6 uploads in 2 rounds" in first
    assert "1 of the rounds had too few" in first
    assert "each node charged this run to its own ledger" in first
    assert "from the operating system" in first
    assert "none: the nodes keep their data" in first
    assert "uploads in" not in section_of(render(runs, public=True), "statement")


@pytest.mark.parametrize(("sampler", "drawn"), [("all", False), ("fixed", True)])
def test_a_node_is_said_to_charge_more_only_where_cohorts_are_drawn(
    tmp_path: Path, sampler: str, drawn: bool
) -> None:
    plan = {"clients": 4, "cohort": 2, "sampler": sampler, "rounds": 4}
    write_run(tmp_path, "udp-fedavg", deployed=True, proven=[proof("server", 3.0)], plan=plan)
    first = section_of(render(read_runs([tmp_path])), "statement")
    assert ("more than this page says" in first) == drawn


def test_the_first_page_has_threshold_and_colluders_of_a_secure_sum(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "udp-fedavg+secure", proven=[proof("server", 3.0)])
    with (folder / "config.toml").open("a") as file:
        file.write("[aggregation]\nkind = 'secure'\nthreshold = 3\ncolluders = 1\n")
    first = section_of(render(read_runs([tmp_path])), "statement")
    assert "fewer than 3 answer" in first
    assert "at most 1 may collude" in first


def test_the_first_page_of_a_simulation_has_no_dropouts(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "udp-fedavg", proven=[proof("server", 3.0)])
    (folder / "rounds.jsonl").write_text(json.dumps({"round": 1, "cohort": 3, "answered": 2}) + "\n")
    first = section_of(render(read_runs([tmp_path])), "statement")
    assert "uploads in" not in first
    assert "its own ledger" not in first


def test_the_first_page_has_the_score_of_numbers_with_its_interval(tmp_path: Path) -> None:
    scores: dict[str, Any] = {
        "r2": 0.9,
        "metrics": {"all": {"r2": {"value": 0.9, "low": 0.85, "high": 0.93}}},
    }
    write_run(tmp_path, "udp-fedavg", accuracy=None, **scores)
    first = section_of(render(read_runs([tmp_path])), "statement")
    assert "R² of 0.900 on the test set (95 % interval: 0.850 to 0.930)" in first


def test_how_the_data_was_prepared_and_what_that_means_for_a_person_is_on_the_first_page(
    tmp_path: Path,
) -> None:
    privacy = {
        "paper_claim": "none",
        "proven": [proof("observer", 1.0, "record")],
        "data": ["Scales were computed without protection."],
        "persons": [{"adversary": "observer", "epsilon": 3.0, "delta": 1e-4}, {"adversary": "server"}],
    }
    write_run(tmp_path, "dp-fedprox", privacy=privacy)
    first = section_of(render(read_runs([tmp_path])), "statement")
    assert "Scales were computed without protection." in first
    assert "(group privacy): epsilon 3 at delta 10⁻⁴ against published results." in first
    assert "how data is prepared: public" not in first


def test_scores_of_clients_are_not_in_the_public_report(tmp_path: Path) -> None:
    known = {"value": 0.5, "low": 0.4, "high": 0.6}
    metrics = {"all": {"auc": known | {"value": 0.77}}, "clients": {"Basel": {"examples": 12, "auc": known}}}
    write_run(tmp_path, "udp-fedavg", metrics=metrics)
    runs = read_runs([tmp_path])
    full, public = (section_of(render(runs, public=hidden), "scores") for hidden in (False, True))
    assert "Basel" in full
    assert "Basel" not in public
    assert "0.77" in public


def test_a_repeated_round_differs_with_entropy_noise(tmp_path: Path) -> None:
    for noise in ("seeded", "entropy"):
        write_run(tmp_path / noise, privacy={"paper_claim": "none", "proven": [], "noise": noise})
        again = section_of(render(read_runs([tmp_path / noise])), "reproduce")
        assert ("drawn anew each time" in again) == (noise == "entropy")


def test_a_run_on_disk_has_its_identity_on_the_first_page(tmp_path: Path) -> None:
    data = [(torch.randn(15, 5), torch.randint(0, 2, (15,))) for _ in range(4)]
    task = fedveil.Task(lambda: torch.nn.Linear(5, 2))
    method = fedveil.METHODS["udp-fedavg"]()
    result = fedveil.run(task, data, method, rounds=1, test=data[0], results=tmp_path / "run")
    assert result.folder is not None
    first = section_of(render(read_runs([result.folder])), "statement")
    assert "ledger head" in first
    assert "data, commitment" in first
    assert (result.folder / ".run").read_text() in first


def test_a_trusted_server_is_no_duty_where_it_learns_no_more(tmp_path: Path) -> None:
    write_run(
        tmp_path, "dp-fedprox", proven=[proof("server", 3.0, "record"), proof("observer", 3.0, "record")]
    )
    assert "No row depends on a trusted server" in section_of(render(read_runs([tmp_path])), "statement")


def test_several_settings_have_no_page_to_sign(tmp_path: Path) -> None:
    assert section_of(render(read_runs([write_everything(tmp_path)])), "statement") == ""


def test_the_full_report_is_called_internal(tmp_path: Path) -> None:
    runs = read_runs([write_everything(tmp_path)])
    assert "INTERNAL" in render(runs)
    assert "INTERNAL" not in render(runs, public=True)


def test_the_public_report_holds_nothing_without_noise(tmp_path: Path) -> None:
    runs = read_runs([write_everything(tmp_path)])
    full, public = render(runs), render(runs, public=True)
    for anchor in ("clients", "partition", "attacks", "synthetic", "figures"):
        assert section_of(full, anchor), anchor
        assert section_of(public, anchor) == "", anchor
    assert "<img" in full
    assert "<img" not in public
    assert "sent up" in full
    assert "sent up" not in public
    assert "configuration and command" not in public
    assert "seconds" not in re.sub(
        r"<style.*?</style>|<script.*?</script>", "", public, flags=re.DOTALL
    ).replace("traffic and seconds", "")


def test_the_public_report_does_not_count_what_was_left_out(tmp_path: Path) -> None:
    """A row with a missing value takes no part in training, so no epsilon covers a count that it is in."""
    folder = write_everything(tmp_path)
    for path in folder.rglob("summary.json"):
        summary = json.loads(path.read_text())
        summary["data"] = "wards.csv: 480 training rows, 12 features, 57 rows with missing values left out"
        path.write_text(json.dumps(summary))
    runs = read_runs([folder])
    assert "57 rows" in render(runs)
    assert "57 rows" not in render(runs, public=True)


def test_an_audit_is_shown_beside_what_is_proven_for_the_same(tmp_path: Path) -> None:
    results = section_of(render(read_runs([write_everything(tmp_path)])), "results")
    assert "audit, one participation" in results
    assert "≥ 0.7 <small>of 20 proven</small>" in results
