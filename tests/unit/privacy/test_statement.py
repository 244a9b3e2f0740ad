from __future__ import annotations

import json

import pytest

from fedveil.methods.method import unprotected
from fedveil.methods.secure import securely_aggregated
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.privacy.accounting import Guarantee, account
from fedveil.privacy.releases import Adversary, GaussianNoise, Plan, Release
from fedveil.privacy.statement import PrivacyStatement, needs_trust, show
from fedveil.secure_sum.settings import SecureSum
from tests.unit.privacy import declarations as declared

PLAN = Plan(100, 10, "poisson", 300)


def _statement(
    releases: list[Release], claim: str = "none", audit: dict[str, float] | None = None
) -> PrivacyStatement:
    return PrivacyStatement(claim, account(releases, PLAN, 1e-5), audit, tuple(releases), PLAN)


def test_json_has_the_three_fields_and_where_the_noise_comes_from() -> None:
    data = json.loads(json.dumps(_statement(declared.udp_fedavg(1.0)).to_json()))
    assert list(data) == ["paper_claim", "proven", "audit", "noise", "removable"]
    assert data["audit"] is None
    assert data["paper_claim"] == "none"
    assert [set(row) for row in data["proven"]] == [
        {"unit", "adversary", "adjacency", "sampler", "epsilon", "delta", "theorem", "assumptions"}
    ] * 3
    reasons = json.loads(json.dumps(_statement(declared.fedem()).to_json()))["proven"]
    assert all(row["epsilon"] is None and row["reason"] for row in reasons)


def test_the_words_state_what_is_visible_and_its_epsilon() -> None:
    text = _statement(declared.udp_fedavg(1.0)).in_words()
    assert (
        "The server sees each upload with Gaussian noise of 0.316 times the clip, and who took part" in text
    )
    assert "against the server epsilon is 300.8 at delta 1e-05" in text
    assert "epsilon is 12.4 at delta 1e-05" in text
    assert "too large to be called protection" in text
    assert "No audit has tested this run." in text
    assert "trusted not to share" in text
    assert "the model's shape and its initial weights" in text, (
        "of a model that was trained before nothing is said"
    )


def test_a_trusted_server_is_needed_only_where_the_row_against_it_proves_less() -> None:
    def row(adversary: Adversary, epsilon: float | None) -> Guarantee:
        return Guarantee("client", adversary, "zero-out", "fixed", epsilon, 1e-5, "composition")

    assert needs_trust([row("server", 20.0), row("observer", 4.0)])
    assert needs_trust([row("server", None), row("observer", 4.0)])
    assert not needs_trust([row("server", 4.0), row("observer", 4.0), row("client", 4.0)])
    assert not needs_trust([row("server", None), row("observer", None)])
    alike = PrivacyStatement("none", (row("server", 4.0), row("observer", 4.0))).in_words()
    assert "trusted" not in alike

    swapped = Guarantee("client", "observer", "replace-one", "fixed", 9.0, 1e-5, "composition")
    assert needs_trust([row("server", 4.0), swapped]), "the row against the server says nothing of exchanges"


@pytest.mark.parametrize(("cohort", "trusts"), [(10, True), (1000, False)])
def test_a_secure_sum_over_a_drawn_cohort_trusts_the_server_not_to_tell_who_took_part(
    cohort: int, trusts: bool
) -> None:
    method = securely_aggregated(UDPFedAvg(noise_multiplier=2.0), SecureSum())
    plan = Plan(1000, cohort, "fixed", 100)
    statement = PrivacyStatement("none", account(method.releases(plan), plan, 1e-5))
    rows = {row.adversary: row.epsilon or 0.0 for row in statement.proven}
    assert (rows["observer"] < rows["server"] / 3) is trusts, "it hides who took part from an observer"
    assert ("trusted not to share" in statement.in_words()) is trusts


def test_words_name_what_of_a_run_is_not_covered_by_its_epsilon() -> None:
    assert "scores of single clients" in _statement(declared.udp_fedavg(1.0)).in_words()
    assert "scores of single clients" not in _statement(declared.fedem()).in_words(), "there is no epsilon"


def test_releases_declared_for_records_and_clients_are_stated_once() -> None:
    lines = _statement([*unprotected("the trained model", "no noise is added")]).in_words().splitlines()
    assert lines.count("  The server sees the trained model with no protection.") == 1
    assert sum("Nothing is proven for" in line for line in lines) == 2 * 3


def test_words_name_what_is_not_proven() -> None:
    text = _statement(declared.dp_fedags_as_printed(), "epsilon 0.1 for each upload").in_words()
    assert "Nothing is proven for one client's whole data" in text
    assert "leave without noise" in text
    assert "The paper states: epsilon 0.1 for each upload. That is the paper's claim" in text


def test_the_words_separate_uploads_and_publications_and_state_each_once() -> None:
    releases = unprotected("each client's gradient", "it is bare")
    lines = _statement(list(releases)).in_words().splitlines()
    assert lines.count("  The server sees each client's gradient with no protection.") == 1
    published = (
        "  What is visible to an observer of the published results is computed from each client's gradient"
    )
    assert lines.count(f"{published} with no protection.") == 1


def test_words_for_records_and_repeated_access() -> None:
    text = _statement(declared.fedlap_dp()).in_words()
    assert "200 times in a participation" in text
    assert "Only single records are protected" in text


def test_words_name_what_counts_as_public() -> None:
    records, clients = (
        _statement(releases).in_words() for releases in (declared.fedlap_dp(), declared.udp_fedavg(1.0))
    )
    assert "How many records each client holds counts as public" in records
    assert "How many records each client holds" not in clients
    assert "standardised" in clients


@pytest.mark.parametrize(
    ("delta", "praise"), [(1e-5, True), (0.009, True), (0.01, False), (0.5, False), (0.999, False)]
)
def test_no_epsilon_is_called_protection_at_a_delta_that_exposes_one_unit(delta: float, praise: bool) -> None:
    """100 clients: at delta 0.01 one of them, drawn at random, might be published whole."""
    releases = declared.udp_fedavg(10.0)
    text = PrivacyStatement("none", account(releases, PLAN, delta), None, tuple(releases), PLAN).in_words()
    assert ("strong protection" in text) is praise
    assert ("with 100 clients it would permit publishing one of them completely" in text) is not praise


def test_an_audit_is_reported_as_what_it_is() -> None:
    audit = {"lower_bound": 1.54, "confidence": 0.95, "samples": 1000}
    statement = _statement(declared.udp_fedavg(1.0), audit=audit)
    assert statement.to_json()["audit"] == audit
    assert "95% confidence that epsilon is at least 1.54" in statement.in_words()


@pytest.mark.parametrize(("value", "text"), [(300.827, "300.8"), (12.3979, "12.4"), (0.4329, "0.4329")])
def test_numbers_are_shown_to_four_digits(value: float, text: str) -> None:
    assert show(value) == text


def test_the_records_of_the_largest_client_count_where_delta_is_judged() -> None:
    """Ten clients of whom one holds a million records: at delta 1e-5 ten of them might be published whole."""
    releases = [
        Release("gradients", "record", ("server",), GaussianNoise(20.0), participation="charged", rate=0.01)
    ]
    for largest, praise in ((100, True), (10**6, False)):
        plan = Plan(10, 10, "all", 1, 100, largest)
        text = PrivacyStatement("none", account(releases, plan, 1e-5), None, tuple(releases), plan).in_words()
        assert ("protection. Whoever" in text) is praise
        assert ("Delta is too large" in text) is not praise


def test_a_random_split_is_not_said_to_be_covered() -> None:
    assert "counts as settled beforehand" in _statement(declared.fedlap_dp()).in_words()
    assert "counts as settled beforehand" not in _statement(declared.udp_fedavg(1.0)).in_words()
