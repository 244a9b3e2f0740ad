"""The noise of a secure sum: its law by brute force, its bounds, and what it guarantees."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import integrate, stats

from fedveil.errors import InputError
from fedveil.privacy.accounting import account
from fedveil.privacy.mechanisms import Unnoised, gaussian
from fedveil.privacy.releases import ADVERSARIES, GaussianNoise, Plan
from fedveil.privacy.secure_noise import SecureNoise, group_of, modular_sum
from fedveil.secure_sum.settings import Group, SecureSum
from fedveil.streams import Stream, named_stream

Floats = npt.NDArray[np.float64]
FIVE = Group(5, 4, 1)


def streams(count: int, seed: int = 0) -> list[Stream]:
    return [named_stream(seed, "test", row) for row in range(count)]


def share_law(value: float, tau: float, reach: int) -> Floats:
    """The probabilities of round(value + N(0, tau^2)) at -reach..reach."""
    edges = np.arange(-reach, reach + 2) - 0.5
    found: Floats = np.diff(stats.norm.cdf((edges - value) / tau))
    return found


def sum_law(values: list[float], tau: float, reach: int) -> Floats:
    """The exact law of the sum of shares, by convolution; its middle is at len(values) * reach."""
    law = share_law(values[0], tau, reach)
    for value in values[1:]:
        law = np.convolve(law, share_law(value, tau, reach))
    return law


def post_processed(values: list[float], tau: float, places: npt.NDArray[np.int64]) -> Floats:
    """The law of round(N(sum, m tau^2) + m - 1 uniform numbers): the density of the sum with m of them, at integers."""
    m, total = len(values), sum(values)

    def density(k: float) -> float:
        def transform(t: float) -> float:
            return (
                math.cos(t * (k - total)) * math.exp(-m * (tau * t) ** 2 / 2) * np.sinc(t / (2 * np.pi)) ** m
            )

        area, _ = integrate.quad(transform, 0, 12 / tau, limit=400)
        return float(area) / np.pi

    return np.array([density(float(k)) for k in places])


@pytest.mark.parametrize("values", [[0.0, 0.0], [0.3, 0.45], [0.1, -2.7, 5.25], [0.5, 0.5, 0.5, 0.5]])
@pytest.mark.parametrize("tau", [0.4, 0.6, 0.9, 1.5])
def test_a_sum_of_shares_is_post_processing_of_one_gaussian(values: list[float], tau: float) -> None:
    """Up to the error that Poisson's summation formula leaves; at tau 2^8 it is below 2^-900000."""
    m, reach = len(values), 40
    law = sum_law(values, tau, reach)
    places = np.arange(-12, 13)
    error = np.abs(law[m * reach + places] - post_processed(values, tau, places)).max()
    bound = 4 * m * math.exp(-2 * math.pi**2 * tau**2 * (1 - 1 / m))
    assert error <= bound + 1e-10
    if tau == 0.4 and values != [0.0, 0.0]:
        assert error > 1e-6  # the bound is about something


@pytest.mark.parametrize("m", [1, 2, 3, 5])
@pytest.mark.parametrize("tau", [3.0, 6.0])
def test_the_divergence_of_a_sum_of_shares_is_at_most_the_gaussians(m: int, tau: float) -> None:
    """One client of clip C = 5 takes part or not, at the worst of several positions on the grid."""
    clip, reach = 5.0, 120
    sigma = math.sqrt(m) * tau / clip
    for epsilon in (0.0, 0.5, 1.0, 3.0):
        limit = stats.norm.cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * stats.norm.cdf(
            -0.5 / sigma - epsilon * sigma
        )
        for rest in (0.0, 0.25, 0.5, 0.9):
            others = [rest] * (m - 1)
            for value in (clip, -clip):
                with_it, without = (sum_law([own, *others], tau, reach) for own in (value, 0.0))
                for one, other in ((with_it, without), (without, with_it)):
                    assert np.maximum(one - math.exp(epsilon) * other, 0).sum() <= limit + 1e-12


def test_what_clients_send_has_the_law_of_shares() -> None:
    """Many coordinates of equal value: their sums over three clients against the normal law and its variance."""
    noise = SecureNoise(gaussian(1.0, 0.7), Group(3, 3, 1))
    value = torch.full((3, 60_000), 1e-4)
    total = noise.decode(modular_sum(noise.encode({"w": value}, streams(3))))["w"][0].numpy()
    std = 0.7 * math.sqrt(3 / 2)
    assert stats.kstest((total - 3e-4) / std, "norm").pvalue > 1e-3
    alone = noise.decode(modular_sum(noise.encode({"w": value[:1]}, streams(1))))["w"][0].numpy()
    assert alone.std() == pytest.approx(0.7 / math.sqrt(2), rel=0.02)


@pytest.mark.parametrize(("n", "t", "c"), [(5, 4, 1), (10, 8, 2), (100, 95, 5), (3, 3, 1)])
def test_a_sum_of_shares_has_the_declared_noise(n: int, t: int, c: int) -> None:
    """t - c shares are worth the noise of the sum, whoever of the n is in it; a client knows one of them."""
    noise = SecureNoise(gaussian(2.0, 1.5), Group(n, t, c))
    assert math.sqrt(t - c) * noise.share.std == pytest.approx(3.0)
    assert noise.worth(n).std == pytest.approx(3.0 * math.sqrt(n / (t - c)))
    server, observer, client = noise.releases("the sum", Plan(n, n, "all", 1))
    assert server.protection == observer.protection == GaussianNoise(1.5)
    assert isinstance(client.insider, GaussianNoise)
    assert client.insider.multiplier == pytest.approx(1.5 * math.sqrt((t - c - 1) / (t - c)))
    assert 2**8 <= noise.share.std / noise.step <= 2**9
    assert math.log2(noise.step) == int(math.log2(noise.step))


def test_clipped_updates_and_integers() -> None:
    """Without noise a sum is that of the clipped updates to within half a step each, negative numbers too."""
    noise = SecureNoise(Unnoised(1.0), FIVE)
    value = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    sent = noise.encode({"w": value}, streams(5))["w"]
    assert sent.dtype == torch.int32
    clipped = value / value.norm(dim=1, keepdim=True)
    total = noise.decode(modular_sum({"w": sent}))["w"][0]
    assert (total - clipped.double().sum(0)).abs().max() < 5 * (noise.step / 2 + 1e-6)
    assert noise.step < 1e-8


def test_a_sum_wraps_modulo_2_to_the_32() -> None:
    values = torch.tensor([[2**31 - 1], [2**31 - 1], [5]], dtype=torch.int32)
    assert modular_sum({"w": values})["w"].tolist() == [[3]]
    assert modular_sum({"w": torch.full((2, 1), -(2**31), dtype=torch.int32)})["w"].tolist() == [[0]]


def test_a_grid_whose_sum_could_wrap_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        SecureNoise(gaussian(1.0, 1e-6), Group(100, 95, 5))
    assert caught.value.field == "method.noise_multiplier"
    largest = SecureNoise(gaussian(1.0, 1e-3), Group(100, 95, 5))
    reached = 100 * (largest.clip / largest.step + 1) + 8 * math.sqrt(100) * largest.share.std / largest.step
    assert reached < 2**31


def test_without_a_clip_updates_are_bounded_all_the_same() -> None:
    noise = SecureNoise(gaussian(math.inf, 0.0), FIVE)
    huge = torch.full((5, 4), 1e6)
    total = noise.decode(modular_sum(noise.encode({"w": huge}, streams(5))))["w"]
    assert float(total.norm()) == pytest.approx(5 * 64.0, rel=1e-4)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    for plan, field in (
        (Plan(20, 5, "poisson", 1), "run.sampler"),
        (Plan(20, 2, "fixed", 1), "run.cohort"),
        (Plan(2, 2, "all", 1), "partition.clients"),
    ):
        with pytest.raises(InputError) as caught:
            group_of(SecureSum(), plan)
        assert caught.value.field == field
    assert group_of(SecureSum(), Plan(20, 5, "fixed", 1)) == Group(5, 4, 1)
    assert group_of(SecureSum(18, 3), Plan(20, 20, "all", 1)) == Group(20, 18, 3)


@pytest.mark.parametrize(
    ("rounds", "epsilon", "multiplier"),
    [(100, 1, 37.3), (100, 3, 13.9), (100, 8, 6.0), (20, 1, 16.7), (20, 3, 6.22), (20, 8, 2.68)],
)
def test_epsilon_against_the_server_is_that_of_the_whole_noise(
    rounds: int, epsilon: float, multiplier: float
) -> None:
    plan = Plan(100, 100, "all", rounds)
    noise = SecureNoise(gaussian(1.0, multiplier), Group(100, 95, 5))
    rows = {row.adversary: row for row in account(noise.releases("the sum", plan), plan, 1e-5)}
    assert rows["server"].epsilon == pytest.approx(epsilon, rel=0.01)
    assert rows["observer"].epsilon == rows["server"].epsilon
    assert rows["client"].epsilon is not None
    assert rows["server"].epsilon is not None
    assert rows["client"].epsilon > rows["server"].epsilon
    for row in rows.values():
        assert any("95 of 100" in text for text in row.assumptions)
        assert any("5" in text and "collude" in text for text in row.assumptions)


def test_in_cohorts_only_an_observer_gains_by_sampling() -> None:
    """The server sees who takes part, and so may a client's accomplices."""
    plan = Plan(100, 10, "fixed", 50)
    noise = SecureNoise(gaussian(1.0, 2.0), group_of(SecureSum(), plan))
    rows = {row.adversary: row for row in account(noise.releases("the sum", plan), plan, 1e-5)}
    assert [rows[who].adjacency for who in ADVERSARIES] == ["zero-out", "replace-one", "zero-out"]
    assert "seen participation" in rows["server"].theorem
    assert "subsampled" in rows["observer"].theorem
    assert (rows["server"].epsilon or 0) < (rows["client"].epsilon or 0)
    epsilons = [rows["server"].epsilon or 0]
    for sigma in (3.0, 4.0):
        louder = SecureNoise(gaussian(1.0, sigma), noise.group)
        epsilons.append(account(louder.releases("the sum", plan), plan, 1e-5)[0].epsilon or 0)
    assert all(less < more for more, less in pairwise(epsilons))


def test_without_noise_nothing_is_proven() -> None:
    plan = Plan(5, 5, "all", 3)
    rows = account(SecureNoise(Unnoised(), FIVE).releases("the sum", plan), plan, 1e-5)
    assert {row.epsilon for row in rows} == {None}
    assert all(row.assumptions for row in rows)
