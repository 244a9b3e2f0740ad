"""Every branch of the accountant against the exact divergence of a small mechanism in one dimension."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from fedveil.privacy import loss
from fedveil.privacy.accounting import (
    Accountant,
    account,
    account_participation,
    account_rounds,
    epsilon_by_round,
    rounds_of,
)
from fedveil.privacy.loss import Bundle, Step
from fedveil.privacy.releases import (
    ApproximateDP,
    GaussianNoise,
    LaplaceNoise,
    Plan,
    RandomGaussianNoise,
    RenyiCurve,
    ZeroConcentratedDP,
)
from tests.unit.privacy.brute_force import at, gaussian, laplacian
from tests.unit.privacy.divergence_cases import CASES, POISSON, Case, again, beside_known_records, release

DELTAS = (1e-1, 1e-2, 1e-3, 1e-5)


def _stated(case: Case, delta: float, accountant: Accountant = "best") -> float:
    (row,) = [
        r for r in account(case.releases, case.plan, delta, accountant) if r.adversary == case.adversary
    ]
    assert row.epsilon is not None, row.reason
    return row.epsilon


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stated_epsilon_bounds_the_exact_divergence(case: Case) -> None:
    pairs = case.pairs()
    kinds = (ZeroConcentratedDP, RenyiCurve)
    only_bound = case.tight is None or any(isinstance(r.protection, kinds) for r in case.releases)
    for delta in DELTAS:
        stated = {"best": _stated(case, delta)}
        if case.renyi:
            stated["rdp"] = _stated(case, delta, "rdp")
        for accountant, epsilon in stated.items():
            assert max(pair.delta(epsilon) for pair in pairs) <= delta * (1 + 1e-6), (accountant, delta)
        if case.tight is not None and not only_bound:
            factor, more = case.tight
            assert stated["best"] <= factor * max(pair.epsilon(delta) for pair in pairs) + more, delta
    # Below the smallest delta of loss distributions the accountant changes over to Renyi divergences.
    fails = any(isinstance(r.protection, (ApproximateDP, RandomGaussianNoise)) for r in case.releases)
    if case.renyi and not fails:
        tiny = loss.SMALLEST_PLD_DELTA / 10
        assert max(pair.delta(_stated(case, tiny)) for pair in pairs) <= 1.01 * tiny


def test_clients_and_records_are_not_sampled_together_at_the_product_of_their_rates() -> None:
    """The attack on the rate p * q: known records of the client show its participation, so only q is left."""
    plan, rate, sigma, delta = Plan(100, 10, "poisson", 1), 0.1, 1.0, 1e-5
    together = Step(Bundle.of([(GaussianNoise(sigma), plan.rate * rate, 1)], "add-remove"))
    claimed = loss.epsilon(Counter([together]), delta, renyi=False)
    truth = beside_known_records(plan, rate, sigma, known=10.0)
    assert truth.delta(claimed) > 50 * delta
    hidden = release(GaussianNoise(sigma), "record", "hidden", rate=rate)
    assert truth.delta(_stated(Case("", (hidden,), plan, list), delta)) <= delta


def test_one_participation_bounds_the_exact_divergence() -> None:
    releases = (release(GaussianNoise(1.5), participation="hidden"),)
    pair = gaussian(at(1.0), at(0.0), 1.5)
    for delta in DELTAS:
        server = next(r for r in account_participation(releases, POISSON, delta) if r.adversary == "server")
        assert server.epsilon is not None
        assert pair.delta(server.epsilon) <= delta * (1 + 1e-6)


def test_rounds_of_several_runs_bound_the_exact_divergence() -> None:
    other = Plan(4, 2, "fixed", 1)
    first = rounds_of([release(GaussianNoise(1.5))], POISSON)
    second = rounds_of([release(LaplaceNoise(0.7))], other)
    pair = gaussian(at(1.0), at(0.0), 1.5).sometimes(POISSON.rate)
    pair = pair.then(laplacian(at(1.0), at(0.0), 1 / 0.7).sometimes(other.rate))
    for delta in DELTAS:
        server = next(r for r in account_rounds(first + second, delta) if r.adversary == "server")
        assert server.epsilon is not None
        assert pair.delta(server.epsilon) <= delta * (1 + 1e-6)
        assert server.epsilon <= 1.02 * pair.epsilon(delta) + 0.01


def test_the_curve_over_rounds_bounds_the_exact_divergence() -> None:
    pair = gaussian(at(1.0), at(0.0), 1.5).sometimes(POISSON.rate)
    curve = epsilon_by_round([release(GaussianNoise(1.5))], replace(POISSON, rounds=3), 1e-3)
    for rounds, epsilon in curve["client", "server"]:
        assert epsilon is not None
        assert again(pair, rounds).delta(epsilon) <= 1e-3
