from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal, localcontext
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedveil.errors import DivergedError, InputError
from fedveil.privacy.clipping import hidden_divergence
from fedveil.privacy.mechanisms import (
    Binomial,
    DiscreteGaussian,
    Gaussian,
    GumbelTopK,
    Laplace,
    SparseVector,
    TopKGaussian,
    clip_rows,
    clip_rows_l1,
    gaussian,
)
from fedveil.privacy.noise.integers import (
    bernoulli_exp,
    centred_binomial,
    discrete_gaussian,
    discrete_laplace,
    rational_variance,
    uniform_below,
)
from fedveil.privacy.releases import (
    ApproximateDP,
    GaussianNoise,
    LaplaceNoise,
    PureDP,
    Unprotected,
    ZeroConcentratedDP,
)
from fedveil.streams import ClientStreams, EntropyStream, Stream, named_stream
from fedveil.tree import flatten
from tests.refusals import refuses

MILLION = 1_000_000


def _streams(count: int, seed: int = 0, round_: int = 1) -> Sequence[Stream]:
    return ClientStreams(seed, round_, tuple(range(count))).noise()


def _norm(rows: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(rows.double(), dim=-1)
    return norm


# --- clipping -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e30, 3e38, 1.0, 1e-30])
def test_clipping_never_leaves_the_ball(dtype: torch.dtype, size: float) -> None:
    rows = torch.from_numpy(named_stream(1).standard_normal(4000).reshape(4, 1000)).clamp(-1, 1)
    params = {"a": (rows[:, :600] * size).to(dtype), "b": (rows[:, 600:] * size).to(dtype)}
    out = flatten(clip_rows(params, 0.7))
    assert out.dtype == dtype
    assert (_norm(out) <= 0.7).all()
    if size >= 1:
        torch.testing.assert_close(_norm(out), torch.full((4,), 0.7, dtype=torch.float64), rtol=1e-6, atol=0)


def test_clipping_keeps_the_direction_and_what_is_inside() -> None:
    params = {"w": torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])}
    out = clip_rows(params, 1.0)["w"]
    torch.testing.assert_close(out[0], torch.tensor([0.6, 0.8]), rtol=1e-6, atol=0)
    assert torch.equal(out[1:], params["w"][1:])
    assert torch.equal(params["w"][0], torch.tensor([3.0, 4.0]))


def test_clipping_huge_doubles_and_denormals() -> None:
    huge = clip_rows({"w": torch.full((1, 4), 1e300, dtype=torch.float64)}, 2.0)["w"]
    torch.testing.assert_close(huge, torch.ones(1, 4, dtype=torch.float64), rtol=1e-6, atol=0)
    denormal = torch.full((1, 3), 1e-42)
    assert torch.equal(clip_rows({"w": denormal}, 1.0)["w"], denormal)
    tiny = torch.full((1, 4), 1e-310, dtype=torch.float64)
    assert torch.equal(clip_rows({"w": tiny}, 1.0)["w"], tiny)
    overflow = torch.full((2, 50_000), 3e38)  # the norm is beyond float32
    assert (_norm(clip_rows({"w": overflow}, 1.0)["w"]) <= 1.0).all()
    assert (_norm(clip_rows({"w": overflow}, 1.0)["w"]) > 1 - 1e-5).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_not_released(bad: float) -> None:
    for clip in (clip_rows, clip_rows_l1):
        with pytest.raises(DivergedError):
            clip({"w": torch.tensor([[1.0, bad]])}, 1.0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite_count_as_zero_where_an_error_would_disclose_them(bad: float) -> None:
    rows = {"w": torch.tensor([[1.0, bad], [0.3, 0.4]]), "b": torch.tensor([0.1, 0.2])}
    with hidden_divergence() as happened:
        for clip in (clip_rows, clip_rows_l1):
            clipped = clip({"w": rows["w"]}, 10.0)
            assert torch.equal(clipped["w"], torch.tensor([[0.0, 0.0], [0.3, 0.4]]))
        assert torch.equal(clip_rows(rows, 10.0)["b"], torch.tensor([0.0, 0.2]))
    assert happened == [1] * 3
    with pytest.raises(DivergedError):
        clip_rows(rows, 10.0)


@pytest.mark.parametrize("clip", [0.0, -1.0, math.inf, math.nan])
def test_a_clip_is_positive_and_finite(clip: float) -> None:
    with pytest.raises(InputError):
        clip_rows({"w": torch.ones(1, 2)}, clip)
    with pytest.raises(InputError):
        Gaussian(clip, 1.0)


# --- continuous noise ---------------------------------------------------------------------------------------


def test_noise_derives_from_the_clip() -> None:
    assert Gaussian(clip=0.5, multiplier=2.0).std == 1.0
    assert Laplace(clip=0.5, epsilon=0.1).scale == 5.0


def test_gaussian_moments_and_independence() -> None:
    mechanism = Gaussian(2.0, 1.5)
    zero = {"w": torch.zeros(2, MILLION // 2, dtype=torch.float64)}
    first, second = (mechanism(zero, _streams(2, round_=r))["w"].numpy() for r in (1, 2))
    noise = first.ravel() / 3.0
    error = 5 / math.sqrt(MILLION)
    assert abs(noise.mean()) < error
    assert abs(noise.var() - 1) < error * math.sqrt(2)
    assert abs(stats.skew(noise)) < error * math.sqrt(6)
    assert abs(stats.kurtosis(noise)) < error * math.sqrt(24)
    assert stats.kstest(noise[:100_000], "norm").pvalue > 1e-4
    half = 5 / math.sqrt(MILLION / 2)
    for a, b in ((first[0], first[1]), (first[0], second[0]), (first[0][:-1], first[0][1:])):
        assert abs(np.corrcoef(a, b)[0, 1]) < half  # clients, rounds, neighbours


def test_entropy_noise_has_the_moments_and_is_never_repeated() -> None:
    streams = [EntropyStream()]
    zero = {"w": torch.zeros(1, 200_000, dtype=torch.float64)}
    first, second = (Gaussian(1.0, 1.0)(zero, streams)["w"] for _ in range(2))
    assert not torch.equal(first, second)
    assert abs(float(first.var()) - 1) < 5 * math.sqrt(2 / 200_000)


def test_laplace_moments_and_l1_clip() -> None:
    mechanism = Laplace(2.0, 0.5)
    noise = mechanism({"w": torch.zeros(1, MILLION, dtype=torch.float64)}, _streams(1))["w"].numpy().ravel()
    assert abs(noise.mean()) < 5 * 4 * math.sqrt(2 / MILLION)
    assert noise.var() == pytest.approx(2 * 4**2, rel=0.02)
    assert stats.kstest(noise[:100_000], stats.laplace(scale=4).cdf).pvalue > 1e-4
    clipped = clip_rows_l1({"w": torch.tensor([[3.0, -5.0], [0.5, 0.5]])}, 2.0)["w"]
    torch.testing.assert_close(clipped.abs().sum(1), torch.tensor([2.0, 1.0]))


def test_parameters_of_one_number_a_client_count_like_any_other() -> None:
    """A scale or a temperature is a leaf `[K]`."""
    params = {"scale": torch.tensor([3.0, -0.5]), "w": torch.tensor([[4.0], [0.5]])}
    flat = {"all": flatten(params)}
    for clip in (clip_rows, clip_rows_l1):
        clipped = clip(params, 2.0)
        assert clipped["scale"].shape == (2,)
        assert torch.equal(flatten(clipped), clip(flat, 2.0)["all"])
    noisy = Laplace(1.0, 1.0)(params, _streams(2))
    assert {name: leaf.shape for name, leaf in noisy.items()} == {"scale": (2,), "w": (2, 1)}


def test_a_clients_noise_does_not_depend_on_the_cohort() -> None:
    mechanism = Gaussian(1.0, 1.0)
    together = mechanism({"w": torch.zeros(3, 5)}, ClientStreams(0, 1, (7, 8, 9)).noise())["w"]
    alone = mechanism({"w": torch.zeros(1, 5)}, ClientStreams(0, 1, (8,)).noise())["w"]
    assert torch.equal(together[1], alone[0])
    with pytest.raises(InputError):
        mechanism({"w": torch.zeros(3, 5)}, _streams(2))


# --- exact integer noise ------------------------------------------------------------------------------------


def test_uniform_integers() -> None:
    draws = uniform_below(np.full(60_000, 6, dtype=np.int64), named_stream(1))
    assert stats.chisquare(np.bincount(draws, minlength=6)).pvalue > 1e-4


@pytest.mark.parametrize(("numerator", "denominator"), [(0, 5), (1, 3), (1, 1), (7, 3), (25, 4)])
def test_exact_coins(numerator: int, denominator: int) -> None:
    hits = int(bernoulli_exp(np.full(100_000, numerator), denominator, named_stream(2)).sum())
    chance = math.exp(-numerator / denominator)
    assert abs(hits - 100_000 * chance) <= 5 * math.sqrt(100_000 * chance * (1 - chance)) + 1e-9


@pytest.mark.parametrize("scale", [1, 3])
def test_discrete_laplace_distribution(scale: int) -> None:
    draws = discrete_laplace(scale, 100_000, named_stream(3))
    support = np.arange(-8 * scale, 8 * scale + 1)
    weights = np.exp(-np.abs(support) / scale)
    _compare(draws, support, weights)


@pytest.mark.parametrize("std", [0.6, 2.5, 20.0])
def test_discrete_gaussian_distribution(std: float) -> None:
    draws = discrete_gaussian(std, 200_000, named_stream(4))
    variance = float(rational_variance(std))
    support = np.arange(-math.ceil(3 * std), math.ceil(3 * std) + 1)
    _compare(draws, support, np.exp(-(support**2) / (2 * variance)))


def _compare(draws: np.ndarray, support: np.ndarray, weights: np.ndarray) -> None:
    """Frequencies inside the support against the weights, relative to each other."""
    counts = np.array([(draws == value).sum() for value in support])
    expected = weights / weights.sum() * counts.sum()
    assert stats.chisquare(counts, expected).pvalue > 1e-4


def test_discrete_gaussian_moments_over_a_million_draws() -> None:
    draws = discrete_gaussian(50.0, MILLION, named_stream(5))
    assert abs(draws.mean()) < 5 * 50 / 1000
    assert draws.var() == pytest.approx(2500, rel=0.01)
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.005


def test_the_variance_is_never_rounded_down() -> None:
    for std in (0.3, 1.0, 3.3, 17.7, 123.4, 4096.0):
        assert rational_variance(std) >= std * std
    with pytest.raises(InputError):
        rational_variance(5000.0)


def test_discrete_gaussian_mechanism_sends_multiples_of_the_grid() -> None:
    mechanism = DiscreteGaussian(clip=1.0, multiplier=1.0, spacing=0.01, dimension=500)
    value = {"w": torch.ones(4, 500, dtype=torch.float64)}
    steps = mechanism(value, _streams(4))["w"] / 0.01
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-6)
    assert float(steps.std()) * 0.01 == pytest.approx(mechanism.std, rel=0.1)
    assert mechanism.std >= 1.0
    assert mechanism.protection().rho == 0.5


def test_rounding_stays_within_the_stated_sensitivity_and_is_unbiased() -> None:
    grid = DiscreteGaussian(1.0, 1.0, 0.05, 200).grid
    rng = named_stream(6)
    row = rng.standard_normal(200)
    row /= np.linalg.norm(row)
    rounded = np.stack([grid.round(row, rng) for _ in range(4000)])
    assert (np.linalg.norm(rounded, axis=1) <= grid.l2).all()
    assert np.abs(rounded).sum(1).max() <= grid.l1
    assert np.abs(rounded).max() <= grid.linf
    np.testing.assert_allclose(rounded.mean(0) * 0.05, row, atol=6 * 0.025 / math.sqrt(4000))
    assert not grid.round(np.zeros(200), rng).any()


def test_binomial_noise_moments() -> None:
    draws = centred_binomial(64, MILLION, named_stream(7))
    assert abs(draws.mean()) < 5 * 4 / 1000
    assert draws.var() == pytest.approx(16, rel=0.01)
    support = np.arange(-12, 13)
    _compare(draws[:100_000], support, stats.binom.pmf(support + 32, 64, 0.5))


@pytest.mark.parametrize("trials", [8, 24, 40, 64, 72, 2088, 8000])
@pytest.mark.parametrize("before", [0, 1, 4])  # after an odd number of half words the generator keeps one
def test_binomial_noise_counts_the_bits_that_the_stream_gives(trials: int, before: int) -> None:
    counted, drawn = named_stream(8), named_stream(8)
    counted.bytes(before)
    drawn.bytes(before)
    bits = np.unpackbits(np.frombuffer(counted.bytes(304 * trials // 8), dtype=np.uint8)).reshape(304, -1)
    expected = bits.sum(1, dtype=np.int64) - trials // 2
    np.testing.assert_array_equal(centred_binomial(trials, 304, drawn), expected)
    assert counted.bytes(4) == drawn.bytes(4)


class _Fixed:
    """A stream whose next draw is this number of [0, 1), to as many digits as it is asked for."""

    def __init__(self, value: Decimal) -> None:
        self._left = value

    def bytes(self, length: int) -> bytes:
        scaled = self._left * 2 ** (8 * length)
        self._left = scaled - int(scaled)
        return int(scaled).to_bytes(length, "little")

    def random(self, size: int) -> Any:
        return np.full(size, float(self._left))


def test_many_trials_are_drawn_as_exactly_as_few() -> None:
    """At the edges of its steps the distribution function is right to far more digits than double precision has."""
    trials = 26_260_816
    with localcontext() as context:
        context.prec = 60
        n, pi = Decimal(trials), Decimal("3.14159265358979323846264338327950288419716939937510")
        mass = (2 / (pi * n)).sqrt() * (-1 / (4 * n) + 1 / (24 * n**3)).exp()  # of 0, by Stirling's series
        below = (1 - mass) / 2
        for value in range(0, -2500, -1):
            if value % 100 == 0:
                for shift, expected in ((Decimal("-1e-22"), value - 1), (Decimal("1e-22"), value)):
                    drawn = centred_binomial(trials, 1, cast(Stream, _Fixed(below + shift)))
                    assert drawn[0] == expected
            mass *= (n / 2 + value) / (n / 2 - value + 1)  # of the value below this one
            below -= mass


@pytest.mark.parametrize("delta", [1e-4, 1e-6])
@pytest.mark.parametrize(("trials", "spacing"), [(4096, 1.0), (4096, 0.2), (2**16, 1.0), (2**16, 0.05)])
def test_the_binomial_theorem_bounds_the_exact_divergence_in_one_dimension(
    trials: int, spacing: float, delta: float
) -> None:
    mechanism = Binomial(clip=1.0, trials=trials, spacing=spacing, dimension=1, delta=delta)
    shift = math.ceil(mechanism.grid.l2 - 1e-9)
    k = np.arange(-shift, trials + 1 + shift)
    moved, still = (stats.binom.pmf(k - s, trials, 0.5) for s in (shift, 0))
    for p, q in ((moved, still), (still, moved)):
        assert np.maximum(p - math.exp(mechanism.epsilon) * q, 0).sum() <= delta


@pytest.mark.parametrize("shift", [(1, 0), (1, 1)])
def test_the_binomial_theorem_bounds_the_exact_divergence_in_two_dimensions(shift: tuple[int, int]) -> None:
    trials, delta = 2048, 1e-3
    mechanism = Binomial(clip=1.0, trials=trials, spacing=1.0, dimension=2, delta=delta)
    assert np.linalg.norm(shift) <= mechanism.grid.l2 + 1e-9
    k = np.arange(trials + 3)
    moved = np.multiply.outer(*(stats.binom.pmf(k - s, trials, 0.5) for s in shift))
    still = np.multiply.outer(*(stats.binom.pmf(k, trials, 0.5) for _ in shift))
    assert np.maximum(moved - math.exp(mechanism.epsilon) * still, 0).sum() <= delta


def test_the_binomial_theorem_in_numbers() -> None:
    """Written out for one dimension and a shift of 2: b = 1/3, c = 7 sqrt(2) / 4, d = 2/3 at p = 1/2."""
    mechanism = Binomial(clip=1.0, trials=4096, spacing=1.0, dimension=1, delta=1e-6)
    l2, v, log = mechanism.grid.l2, 1024.0, math.log
    first = l2 * math.sqrt(2 * log(1.25e6)) / math.sqrt(v)
    second = (l2 * 7 * math.sqrt(2) / 4 * math.sqrt(log(1e7)) + mechanism.grid.l1 / 3) / (v * (1 - 1e-7))
    third = mechanism.grid.linf * (2 / 3 * log(1.25e6) + 2 / 3 * log(2e7) * log(1e7)) / v
    assert mechanism.epsilon == pytest.approx(first + second + third, rel=1e-12)
    with refuses("trials"):
        Binomial(1.0, 64, 1.0, 1000, 1e-6)


def test_binomial_mechanism_is_centred_on_the_clipped_value() -> None:
    mechanism = Binomial(clip=1.0, trials=4096, spacing=0.5, dimension=2, delta=1e-6)
    value = {"w": torch.tensor([[0.6, 0.8]], dtype=torch.float64).expand(20_000, 2) * 5}
    out = mechanism(value, [named_stream(8)] * 20_000)["w"]
    error = 5 * mechanism.std / math.sqrt(20_000)
    torch.testing.assert_close(out.mean(0), torch.tensor([0.6, 0.8]).double(), rtol=0, atol=error)


# --- selection ----------------------------------------------------------------------------------------------


def test_gumbel_selection_is_the_exponential_mechanism() -> None:
    value = torch.tensor([[0.9, 0.3, -0.1]], dtype=torch.float64)
    count = 20_000
    mechanism = GumbelTopK(clip=1.0, count=1, epsilon=2.0)
    chosen = mechanism.chosen({"w": value.expand(count, 3)}, [named_stream(9)] * count)
    weights = np.exp(2.0 * np.array([0.9, 0.3, 0.1]) / 2)
    assert stats.chisquare(chosen.sum(0).numpy(), weights / weights.sum() * count).pvalue > 1e-4
    assert mechanism.protection().rho == 0.5
    assert (GumbelTopK(1.0, 2, 1.0).chosen({"w": value}, _streams(1)).sum(1) == 2).all()


def test_top_k_noises_what_it_chose_and_sends_zero_elsewhere() -> None:
    mechanism = TopKGaussian(clip=1.0, count=3, selection_epsilon=1e6, multiplier=0.5)
    value = torch.zeros(500, 10, dtype=torch.float64)
    value[:, 2:5] = 0.4
    out = mechanism({"w": value}, _streams(500))["w"]
    assert not out[:, :2].any()
    assert not out[:, 5:].any()
    noise = out[:, 2:5] - 0.4
    assert float(noise.std()) == pytest.approx(0.5, rel=0.1)
    assert mechanism.protection().rho == pytest.approx(3 * 1e12 / 8 + 2.0)


def test_sparse_vector_releases_at_most_what_it_charges_for() -> None:
    mechanism = SparseVector(1.0, 0.05, 3, 1e5, 1e6, 1e6)
    value = torch.zeros(50, 20, dtype=torch.float64)
    value[:, [1, 4, 9, 16]] = 0.3
    out = mechanism({"w": value}, _streams(50))["w"]
    assert ((out != 0).sum(1) == 3).all()
    assert not out[:, [0, 2, 3]].any()
    torch.testing.assert_close(out[out != 0], torch.full((150,), 0.3).double(), rtol=0, atol=1e-3)
    assert {tuple(row.nonzero().ravel().tolist()) for row in out} != {(1, 4, 9)}  # the order is random
    assert mechanism.protection().epsilon == 1e5 + 2e6


def test_sparse_vector_noise_scales() -> None:
    """Of answers by their variance; of threshold and questions by how often zero passes a bar at that scale."""
    nothing, streams = {"w": torch.zeros(20_000, 1, dtype=torch.float64)}, [named_stream(10)] * 20_000
    answers = SparseVector(0.5, -1e9, 3, 1.0, 1.0, 0.5)(nothing, streams)["w"]
    assert float(answers.var()) == pytest.approx(2 * (3 * 0.5 / 0.5) ** 2, rel=0.1)  # Lap(c clip / e3)
    reached = math.exp(-1) / 2  # by Laplace noise, its own scale
    asked = SparseVector(0.5, 2 * 3 * 0.5 / 0.25, 3, 1e9, 0.25, 1.0)(nothing, streams)["w"]
    assert float((asked != 0).double().mean()) == pytest.approx(reached, abs=0.01)  # Lap(2 c clip / e2)
    barred = SparseVector(0.5, 0.5 / 0.25, 3, 0.25, 1e9, 1.0)(nothing, streams)["w"]
    assert float((barred != 0).double().mean()) == pytest.approx(reached, abs=0.01)  # Lap(clip / e1)


# --- guarantees ---------------------------------------------------------------------------------------------


def test_the_guarantee_is_that_of_the_noise() -> None:
    assert Gaussian(2.0, 1.5).protection() == GaussianNoise(1.5)
    assert Laplace(2.0, 0.5).protection() == LaplaceNoise(0.5)
    assert GumbelTopK(1.0, 4, 1.0).protection() == ZeroConcentratedDP(0.5)
    assert DiscreteGaussian(1.0, 2.0, 0.1, 10).protection() == ZeroConcentratedDP(0.125)
    assert SparseVector(1.0, 0.1, 1, 1.0, 0.5, 0.25).protection() == PureDP(1.75)
    assert TopKGaussian(1.0, 4, 1.0, 2.0).protection() == ZeroConcentratedDP(0.5 + 0.125)
    binomial = Binomial(1.0, 4096, 0.5, 2, 1e-6)
    assert binomial.protection() == ApproximateDP(binomial.epsilon, 1e-6)


@pytest.mark.parametrize(("clip", "multiplier"), [(math.inf, 1.0), (2.0, 0.0), (math.inf, 0.0)])
def test_without_clip_or_noise_nothing_is_guaranteed_and_nothing_added(
    clip: float, multiplier: float
) -> None:
    mechanism = gaussian(clip, multiplier)
    value = {"w": torch.ones(2, 3)}
    assert mechanism.std == 0
    assert isinstance(mechanism.protection(), Unprotected)
    assert torch.equal(mechanism(value, _streams(2))["w"], value["w"])
    assert torch.equal(mechanism.perturb(value, _streams(2))["w"], value["w"])
