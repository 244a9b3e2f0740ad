"""Epsilon against published values, tables, closed forms and other libraries (Opacus, prv-accountant)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm
from tests.unit.privacy.declarations import (
    dp_fedags_all_or_masked,
    fedceo,
    fedlap_dp,
    record_dp_sgd,
    udp_fedavg,
    udp_fedavg_poisson,
)

from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.privacy.accounting import Guarantee, account, account_participation
from fedveil.privacy.releases import (
    ADVERSARIES,
    GaussianNoise,
    LaplaceNoise,
    Plan,
    RandomGaussianNoise,
    Release,
    ZeroConcentratedDP,
)
from fedveil.streams import named_stream

DELTA = 1e-5


def _row(rows: tuple[Guarantee, ...], adversary: str = "server") -> float:
    (row,) = [row for row in rows if row.adversary == adversary]
    assert row.epsilon is not None
    return row.epsilon


def _records(*steps: tuple[float, float, int], accountant: Any = "best") -> float:
    """Poisson-sampled Gaussians (rate, multiplier, how often), composed."""
    releases = [
        Release("g", "record", ("server",), GaussianNoise(s), "charged", accesses=n, rate=q)
        for q, s, n in steps
    ]
    return _row(account(releases, Plan(1, 1, "all", 1), DELTA, accountant))


def _opacus(*steps: tuple[float, float, int]) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.accountants.analysis import rdp

        orders = [1 + x / 10 for x in range(1, 100)] + list(range(11, 64))
        total = sum(rdp.compute_rdp(q=q, noise_multiplier=s, steps=n, orders=orders) for q, s, n in steps)
        return float(rdp.get_privacy_spent(orders=orders, rdp=total, delta=DELTA)[0])


def _prv(*steps: tuple[float, float, int]) -> tuple[float, float, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import prv_accountant
        from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism

        variables = [
            PoissonSubsampledGaussianMechanism(sampling_probability=q, noise_multiplier=s)
            for q, s, _ in steps
        ]
        counts = [n for _, _, n in steps]
        accountant = prv_accountant.PRVAccountant(
            prvs=variables, max_self_compositions=counts, eps_error=0.01, delta_error=1e-10
        )
        low, middle, high = accountant.compute_epsilon(delta=DELTA, num_self_compositions=counts)
        return float(low), float(middle), float(high)


GAUSSIAN_CASES = {
    "q .1 x300 sigma 1": ([(0.1, 1.0, 300)], 13.6047, 12.3979, 12.3999),
    "q .1 x300 sigma 1.5": ([(0.1, 1.5, 300)], 6.8714, 6.2906, 6.2906),
    "q .1 x300 sigma 2": ([(0.1, 2.0, 300)], 4.5643, 4.1833, 4.1833),
    "q .0256 x200": ([(0.0256, 1.0, 200)], 2.7866, 2.3840, 2.3839),
    "q .0256 x3000": ([(0.0256, 1.0, 3000)], 10.1830, 9.3759, 9.3751),
    "two rates": ([(0.0128, 1.0, 15), (0.0256, 1.0, 2985)], 10.1608, 9.3555, 9.3547),
}


@pytest.mark.parametrize("case", GAUSSIAN_CASES)
def test_sampled_gaussians_match_the_table_and_two_other_libraries(case: str) -> None:
    steps, renyi, pld, prv = GAUSSIAN_CASES[case]
    ours = _records(*steps)
    assert ours == pytest.approx(pld, abs=1e-3)
    opacus = _opacus(*steps)
    assert opacus == pytest.approx(renyi, abs=1e-3)
    assert _records(*steps, accountant="rdp") == pytest.approx(renyi, abs=1e-3)
    assert ours <= opacus + 1e-9
    low, middle, high = _prv(*steps)
    assert middle == pytest.approx(prv, abs=0.01)
    assert ours == pytest.approx(middle, abs=0.01)
    assert low - 1e-3 <= ours <= high + 1e-3


@pytest.mark.parametrize(
    ("times", "renyi", "pld", "prv"), [(200, 6.8516, 6.3816, 6.3807), (500, 11.9757, 11.1907, 11.1951)]
)
def test_laplace_composition(times: int, renyi: float, pld: float, prv: float) -> None:
    releases = [Release("x", "record", ("server",), LaplaceNoise(0.1), "charged", accesses=times)]
    plan = Plan(1, 1, "all", 1)
    assert _row(account(releases, plan, DELTA)) == pytest.approx(pld, abs=1e-3)
    assert _row(account(releases, plan, DELTA, "rdp")) == pytest.approx(renyi, abs=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import prv_accountant
        from prv_accountant.privacy_random_variables import LaplaceMechanism

        accountant = prv_accountant.PRVAccountant(
            prvs=[LaplaceMechanism(mu=0.1)], max_self_compositions=[times], eps_error=0.01, delta_error=1e-10
        )
        middle = accountant.compute_epsilon(delta=DELTA, num_self_compositions=[times])[1]
    assert middle == pytest.approx(prv, abs=0.01)
    assert _row(account(releases, plan, DELTA)) == pytest.approx(middle, abs=0.01)


@pytest.mark.parametrize(
    ("rounds", "published", "exact"),
    [
        (1, 2.79, 2.787),
        (7, 6.72, 6.725),
        (15, 10.18, 10.183),
        (17, 10.93, 10.931),
        (27, 14.30, 14.306),
    ],
)
def test_the_published_epsilons_of_fedlap_dp(rounds: int, published: float, exact: float) -> None:
    rows = account(fedlap_dp(), Plan(5, 5, "all", rounds), DELTA, "rdp")
    for adversary in ADVERSARIES:
        assert _row(rows, adversary) == pytest.approx(published, abs=0.01)
        assert _row(rows, adversary) == pytest.approx(exact, abs=1e-3)


def test_fedlap_dp_by_privacy_loss_distribution() -> None:
    assert _row(account(fedlap_dp(), Plan(5, 5, "all", 1), DELTA)) == pytest.approx(2.384, abs=1e-3)
    assert _row(account(fedlap_dp(), Plan(5, 5, "all", 15), DELTA)) == pytest.approx(9.376, abs=1e-3)
    twenty = fedlap_dp(accesses=20)
    assert _row(account(twenty, Plan(5, 5, "all", 1), DELTA, "rdp")) == pytest.approx(1.618, abs=1e-3)
    assert _row(account(twenty, Plan(5, 5, "all", 15), DELTA, "rdp")) == pytest.approx(3.255, abs=1e-3)


SIGMAS = (1.0, 1.5, 2.0)


def _for_sigmas(*table: float) -> list[tuple[float, float]]:
    return list(zip(SIGMAS, table, strict=True))


@pytest.mark.parametrize(("sigma", "table"), _for_sigmas(12.40, 6.29, 4.18))
def test_udp_fedavg_observer_poisson(sigma: float, table: float) -> None:
    plan = Plan(100, 10, "poisson", 300)
    rows = account(udp_fedavg_poisson(sigma), plan, DELTA)
    assert _row(rows, "observer") == pytest.approx(table, abs=5e-3)
    assert [r.adjacency for r in rows] == ["zero-out", "add-remove", "zero-out"]
    ours = account(UDPFedAvg(noise_multiplier=sigma).releases(plan), plan, DELTA)
    for declared, by_method in zip(rows, ours, strict=True):
        assert declared.epsilon == pytest.approx(by_method.epsilon, abs=1e-6)


def _gaussian_delta(eps: float, mu: Any) -> Any:
    return norm.cdf(mu / 2 - eps / mu) - np.exp(eps + norm.logcdf(-mu / 2 - eps / mu))


@pytest.mark.parametrize(("sigma", "table"), _for_sigmas(349.96, 168.34, 102.86))
def test_udp_fedavg_server_poisson_exactly(sigma: float, table: float) -> None:
    """The uploads of all rounds are one Gaussian of m^2 = S / sigma^2, S the sum of max(K, pN) where it took part."""
    one = np.zeros(101)
    one[0] = 0.9
    for k in range(100):
        one[max(k + 1, 10)] += 0.1 * binom.pmf(k, 99, 0.1)
    length = 2**15
    total = np.fft.irfft(np.fft.rfft(one, length) ** 300, length)
    sums = np.arange(1, 3000)
    weights = np.maximum(total[sums], 0)
    exact = brentq(lambda e: weights @ _gaussian_delta(e, np.sqrt(sums) / sigma) - DELTA, 1, 2000)
    plan = Plan(100, 10, "poisson", 300)
    ours = _row(account(UDPFedAvg(noise_multiplier=sigma).releases(plan), plan, DELTA))
    assert ours == pytest.approx(exact, abs=2e-3)
    assert ours == pytest.approx(table, abs=1e-2)
    assert ours >= exact - 1e-4


@pytest.mark.parametrize(
    ("sigma", "poisson", "fixed"), [(1.0, 18.46, 72.98), (1.5, 10.14, 32.67), (2.0, 6.91, 20.64)]
)
def test_udp_fedavg_other_clients(sigma: float, poisson: float, fixed: float) -> None:
    for sampler, table in (("poisson", poisson), ("fixed", fixed)):
        plan = Plan(100, 10, sampler, 300)  # type: ignore[arg-type]
        rows = account(UDPFedAvg(noise_multiplier=sigma).releases(plan), plan, DELTA)
        assert _row(rows, "client") == pytest.approx(table, abs=1e-2)
        assert _row(rows, "observer") < _row(rows, "client") < _row(rows, "server")


@pytest.mark.parametrize(
    ("sigma", "server", "observer"), [(1.0, 43.72, 8.42), (1.5, 24.28, 5.15), (2.0, 16.40, 3.67)]
)
def test_udp_fedavg_local_noise_poisson(sigma: float, server: float, observer: float) -> None:
    plan = Plan(100, 10, "poisson", 300)
    rows = account(UDPFedAvg(noise_multiplier=sigma, noise_scope="local").releases(plan), plan, DELTA)
    assert _row(rows) == pytest.approx(server, abs=1e-2)
    assert _row(rows, "observer") == pytest.approx(observer, abs=1e-2)
    assert rows[1].adjacency == "zero-out"  # the size of the noise shows how many participated


def test_a_drawn_multiplier_has_the_mean_of_its_divergences() -> None:
    """Closed form and simulated privacy losses of one release, by both accountants."""
    noise = RandomGaussianNoise((0.8, 1.3, 2.5), (0.2, 0.5, 0.3))
    releases, plan = [Release("x", "client", ("server",), noise, "charged")], Plan(10, 10, "all", 1)
    mu, weights = 1 / np.array(noise.multipliers), np.array(noise.weights)
    stream = named_stream(1)
    drawn = mu[stream.choice(3, size=400_000, p=weights)]
    losses = drawn * stream.standard_normal(len(drawn)) + drawn**2 / 2
    for delta in (0.1, 0.01):
        ours = _row(account(releases, plan, delta))
        assert weights @ _gaussian_delta(ours, mu) == pytest.approx(delta, rel=2e-3)
        simulated = np.maximum(0, -np.expm1(ours - losses))
        assert simulated.mean() == pytest.approx(delta, abs=5 * simulated.std() / math.sqrt(len(losses)))
        assert ours <= _row(account(releases, plan, delta, "rdp"))
        worst = _row(account([Release("x", "client", ("server",), GaussianNoise(0.8))], plan, delta))
        assert ours < worst


def test_losses_left_out_of_a_draw_count_as_failures() -> None:
    plan = Plan(10, 10, "all", 4)
    whole = [Release("x", "client", ("server",), RandomGaussianNoise((1.0,), (1.0,)))]
    part = [Release("x", "client", ("server",), RandomGaussianNoise((1.0,), (1 - 9e-10,)))]
    for accountant in ("best", "rdp"):
        values = [_row(account(r, plan, 1e-8, accountant)) for r in (whole, part)]
        assert values[0] < values[1] < values[0] + 0.5
    assert account(part, plan, 3e-9)[0].epsilon is None  # 4 * 9e-10 is more than delta


@pytest.mark.parametrize(("sigma", "table"), _for_sigmas(72.15, 32.38, 20.48))
def test_udp_fedavg_observer_without_replacement(sigma: float, table: float) -> None:
    rows = account(udp_fedavg(sigma), Plan(100, 10, "fixed", 300), DELTA)
    assert _row(rows, "observer") == pytest.approx(table, abs=5e-3)
    assert [r.adjacency for r in rows] == ["zero-out", "replace-one", "replace-one"]


@pytest.mark.parametrize(("sigma", "table"), _for_sigmas(17.86, 10.67, 7.51))
def test_udp_fedavg_one_upload(sigma: float, table: float) -> None:
    rows = account_participation(udp_fedavg(sigma), Plan(100, 10, "fixed", 300), DELTA)
    assert _row(rows) == pytest.approx(table, abs=5e-3)


@pytest.mark.parametrize(("sigma", "table"), _for_sigmas(4.38, 2.75, 1.99))
def test_one_upload_with_the_full_noise(sigma: float, table: float) -> None:
    rows = account_participation(fedceo(sigma, 15, scope="local"), Plan(100, 10, "fixed", 300), DELTA)
    assert _row(rows) == pytest.approx(table, abs=5e-3)


def _seen_exactly(mu: float, rate: float, rounds: int) -> float:
    """With participation observed, n participations are one Gaussian of mu sqrt(n), and n is binomial."""
    n = np.arange(1, rounds + 1)
    weights = binom.pmf(n, rounds, rate)
    return float(brentq(lambda e: weights @ _gaussian_delta(e, mu * np.sqrt(n)) - DELTA, 1e-3, 2000))


@pytest.mark.parametrize(("sigma", "table"), _for_sigmas(300.8, 146.1, 89.9))
def test_udp_fedavg_server_over_all_rounds(sigma: float, table: float) -> None:
    ours = _row(account(udp_fedavg(sigma), Plan(100, 10, "fixed", 300), DELTA))
    exact = _seen_exactly(math.sqrt(10) / sigma, 0.1, 300)
    assert ours == pytest.approx(exact, abs=1e-3)
    assert ours == pytest.approx(table, abs=0.06)  # 146.05 is printed as 146.1
    assert ours >= exact - 1e-6


@pytest.mark.parametrize(
    ("sigma", "interval", "table", "ours"),
    [(1.0, 15, 63.7, 63.596), (1.5, 10, 39.6, 39.562), (2.0, 10, 25.5, 25.479)],
)
def test_fedceo_exposes_more_to_others_and_the_same_to_the_server(
    sigma: float, interval: int, table: float, ours: float
) -> None:
    """The composition of observed stacks and mostly hidden means is the table's row to its last digit."""
    plan = Plan(100, 10, "poisson", 300)
    smoothed, plain = account(fedceo(sigma, interval), plan, DELTA), account(udp_fedavg(sigma), plan, DELTA)
    assert _row(smoothed) == _row(plain)
    for adversary in ("observer", "client"):  # with uploads whose noise does not depend on the cohort's size
        assert _row(smoothed, adversary) == pytest.approx(ours, abs=2e-3)
        assert 0.998 * table < _row(smoothed, adversary) <= table
        assert _row(smoothed, adversary) > _row(plain, adversary)
    fixed = account(fedceo(sigma, interval), Plan(100, 10, "fixed", 300), DELTA)
    assert _row(fixed, "observer") == pytest.approx({1.0: 79.01, 1.5: 46.78, 2.0: 30.14}[sigma], abs=0.01)


@pytest.mark.parametrize(("sigma", "once", "thirty"), [(1.0, 15.2, 151), (1.5, 7.8, 69), (2.0, 5.2, 43)])
def test_record_level_training_inside_clients(sigma: float, once: float, thirty: float) -> None:
    releases = record_dp_sgd(sigma, batch=64, records=400, epochs=30)
    assert _row(account(releases, Plan(100, 10, "all", 1), DELTA)) == pytest.approx(once, abs=0.06)
    assert _row(account(releases, Plan(100, 10, "all", 30), DELTA)) == pytest.approx(thirty, abs=0.6)


@pytest.mark.parametrize(
    ("epsilon", "once", "server"), [(0.1, 0.43, 2.43), (0.2, 0.80, 4.64), (0.5, 1.62, 10.27)]
)
def test_dp_fedags_with_noise_everywhere(epsilon: float, once: float, server: float) -> None:
    sigma = math.sqrt(2 * (math.log(1.25) + epsilon)) / epsilon  # the paper's, with zeta = e^-epsilon
    releases, plan = dp_fedags_all_or_masked(sigma), Plan(100, 10, "fixed", 200)
    assert _row(account_participation(releases, plan, DELTA)) == pytest.approx(once, abs=6e-3)
    assert _row(account(releases, plan, DELTA)) == pytest.approx(server, abs=6e-3)


@pytest.mark.parametrize(("sigma", "table"), _for_sigmas(231.56, 43.68, 26.01))
def test_the_renyi_bound_without_replacement_is_looser(sigma: float, table: float) -> None:
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE,
    )
    event = dp_accounting.SampledWithoutReplacementDpEvent(100, 10, dp_accounting.GaussianDpEvent(sigma / 2))
    accountant.compose(event, 300)
    assert accountant.get_epsilon(DELTA) == pytest.approx(table, abs=1e-2)
    ours = account(udp_fedavg(sigma), Plan(100, 10, "fixed", 300), DELTA)
    assert _row(ours, "observer") < table


def test_one_direction_alone_would_understate_the_fixed_cohort() -> None:
    assert _row(account(udp_fedavg(1.0), Plan(100, 10, "fixed", 300), DELTA), "observer") > 57.44


def test_zcdp_agrees_with_the_gaussian_it_describes() -> None:
    plan = Plan(10, 10, "all", 20)
    gaussian = [Release("g", "client", ("server",), GaussianNoise(3.0))]
    concentrated = [Release("g", "client", ("server",), ZeroConcentratedDP(1 / 18))]
    renyi = _row(account(gaussian, plan, DELTA, "rdp"))
    assert _row(account(concentrated, plan, DELTA)) == pytest.approx(renyi, rel=1e-9)
    assert renyi > _row(account(gaussian, plan, DELTA))


@pytest.mark.parametrize(("sigma", "worse"), _for_sigmas(27.19, 15.29, 10.46))
def test_noise_that_grows_with_the_cohort_would_cost_more_than_the_hidden_row(
    sigma: float, worse: float
) -> None:
    """Why the sum's noise must not depend on who participated.

    If the clients' noise exceeds sigma C in large cohorts, its size discloses one more participant, and those
    rounds can only be charged as observed.
    """
    from dp_accounting.pld import privacy_loss_distribution as pld

    grid = 1e-3
    others = np.arange(0, 40)
    weights = binom.pmf(others, 99, 0.1)
    total = pld.from_gaussian_mechanism(sigma, sampling_prob=0.1, value_discretization_interval=grid)
    weight = weights[others < 10].sum()
    for k in others[others >= 10]:
        seen = pld.from_gaussian_mechanism(
            sigma * math.sqrt((k + 1) / 10), value_discretization_interval=grid
        )
        mixed = seen.compute_mixture(pld.identity(grid), 0.1)
        total = total.compute_mixture(mixed, weight / (weight + weights[k]))
        weight += weights[k]
    epsilon = total.self_compose(300).get_epsilon_for_delta(DELTA)
    assert epsilon == pytest.approx(worse, abs=1e-2)
    rows = account(udp_fedavg(sigma), Plan(100, 10, "poisson", 300), DELTA)
    assert epsilon > 2 * _row(rows, "observer")
