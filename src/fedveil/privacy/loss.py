"""Numerical accounting: privacy loss distributions and Renyi divergences of steps, composed and cached.

Privacy loss distributions are those of dp-accounting with the connect-the-dots discretisation, which never
underestimates delta; a finer grid only tightens the result.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedveil.errors import InputError
from fedveil.privacy.releases import (
    LEAST_LEVEL,
    Adjacency,
    ApproximateDP,
    GaussianNoise,
    LaplaceNoise,
    Protection,
    PureDP,
    RandomGaussianNoise,
    RenyiCurve,
    ZeroConcentratedDP,
)

Part = tuple[Protection, float, int]
Floats = np.ndarray[Any, np.dtype[np.float64]]

# Below this delta rounding errors of the Fourier transforms may matter; Renyi divergences have no such limit.
SMALLEST_PLD_DELTA = 1e-10
_COARSEST = 10.0  # with a coarser spacing of losses, distributions are not useful
_SPACINGS = ((1e-2, 1.0), (2e-3, 0.09), (1e-3, 0.03), (1e-4, 1e-3))  # spacing, smallest loss it is used for
_MOST_POINTS = 2e6
_MOST_COMPOSED = (
    2_000_000  # distributions; more would add up the grid's own spacing, and Renyi divergences are used
)
_TAIL = 2e-22
_MOST_DEVIATIONS = 1e5  # standard deviations of the noise, up to the highest order
_MOST_LOSS = 1e9  # privacy loss of one access; above it no finite epsilon is stated
_MOST_PURE = (
    500.0  # epsilon of one access above which exponentials overflow, so that Renyi divergences are used
)
_ROUNDING = 1e-14  # rounding error of a logarithm of moments
_ORDERS: tuple[float, ...] = (  # the orders commonly used
    *(1 + i / 10 for i in range(1, 100)),
    *map(float, range(11, 64)),
    *map(float, (72, 80, 96, 128, 256, 512, 1024)),
)
_RELATION = {  # the names of dp-accounting
    "add-remove": "ADD_OR_REMOVE_ONE",
    "zero-out": "REPLACE_SPECIAL",
    "replace-one": "REPLACE_ONE",
}


@dataclass(frozen=True)
class Bundle:
    """All releases of one participation, as parts (protection, Poisson rate of a record, number of accesses)."""

    parts: tuple[Part, ...]
    adjacency: Adjacency

    @classmethod
    def of(cls, parts: Iterable[Part], adjacency: Adjacency) -> Bundle:
        """Count equal parts and merge unsampled Gaussians into one equivalent Gaussian."""
        counts: Counter[tuple[Protection, float]] = Counter()
        precision = 0.0
        drawn: list[tuple[RandomGaussianNoise, int]] = []
        for protection, rate, count in parts:
            if isinstance(protection, GaussianNoise) and rate == 1:
                precision += count / protection.multiplier**2
            elif isinstance(protection, RandomGaussianNoise) and rate == 1:
                drawn.append((protection, count))
            else:
                counts[protection, rate] += count
        merged: list[Part] = [(protection, rate, n) for (protection, rate), n in counts.items()]
        if drawn:
            merged.append((_of_one_draw(drawn, precision), 1.0, 1))
        elif precision:
            # Below the smallest level the noise is negligible and no epsilon is stated.
            merged.append((GaussianNoise(max(1 / math.sqrt(precision), LEAST_LEVEL)), 1.0, 1))
        return cls(tuple(merged), adjacency)

    @property
    def repeats_itself(self) -> bool:
        """Whether n rounds equal one round with n times as many parts; false if each round draws its noise level."""
        return not any(isinstance(protection, RandomGaussianNoise) for protection, _, _ in self.parts)

    def times(self, count: int) -> Bundle:
        return Bundle.of([(p, rate, n * count) for p, rate, n in self.parts], self.adjacency)


def _of_one_draw(parts: list[tuple[RandomGaussianNoise, int]], precision: float) -> RandomGaussianNoise:
    """Merge Gaussians of one participation whose multipliers depend on the same draw, and constant ones."""
    weights = parts[0][0].weights
    if any(part.weights != weights for part, _ in parts):
        raise InputError(
            "weights",
            weights,
            "differ within a round, whose noise depends on one draw",
            "Give all of them the same weights.",
        )
    rows = zip(*(part.multipliers for part, _ in parts), strict=True)
    counts = [count for _, count in parts]
    totals = [precision + sum(n / m**2 for n, m in zip(counts, row, strict=True)) for row in rows]
    return RandomGaussianNoise(tuple(max(1 / math.sqrt(total), LEAST_LEVEL) for total in totals), weights)


@dataclass(frozen=True)
class Step:
    """One round: a bundle in which a client participates always, or visibly with probability `seen_rate`, or as a
    member of a hidden cohort drawn without replacement (`fixed_cohort` = clients, cohort).

    With probability 1 - `weight` it is the step `otherwise` (None: no release), and the adversary knows which.
    """

    bundle: Bundle
    seen_rate: float = 1.0
    fixed_cohort: tuple[int, int] | None = None
    weight: float = 1.0
    otherwise: Step | None = None

    def branches(self) -> list[Step]:
        """This step and its alternatives."""
        return [self, *(self.otherwise.branches() if self.otherwise else ())]


Steps = Counter[Step]


def epsilon(steps: Steps, delta: float, renyi: bool) -> float:
    """Epsilon at `delta` of all steps composed; infinite where delta is too small or the noise negligible."""
    branches = [branch for step in steps for branch in step.branches()]
    if any(_largest_loss(p) > _MOST_LOSS for branch in branches for p, _, _ in branch.bundle.parts):
        return math.inf
    key = tuple(sorted(steps.items(), key=lambda item: (repr(item[0]), item[1])))
    if renyi or delta < SMALLEST_PLD_DELTA:
        return _epsilon_by_renyi(key, delta)
    return _epsilon_by_pld(key, delta)


@functools.lru_cache(maxsize=4096)
def _epsilon_by_pld(steps: tuple[tuple[Step, int], ...], delta: float) -> float:
    grid = _grid(steps)
    if grid > _COARSEST:  # negligible noise: exponentials of such losses overflow
        return _epsilon_by_renyi(steps, delta)
    total = None
    for step, count in steps:
        part = _composed(step, count, grid)
        total = part if total is None else total.compose(part)
    return 0.0 if total is None else float(total.get_epsilon_for_delta(delta))


def _grid(steps: tuple[tuple[Step, int], ...]) -> float:
    """The spacing of losses: fine for small losses, coarse for large ones, where a fine grid has no benefit."""
    smallest, span, reach = math.inf, 0.0, 0.0
    branches = [(branch, count) for step, count in steps for branch in step.branches()]
    for branch, count in branches:
        hidden = 2 * branch.fixed_cohort[1] / branch.fixed_cohort[0] if branch.fixed_cohort else 1.0
        for protection, rate, n in branch.bundle.parts:
            pure = isinstance(protection, (LaplaceNoise, PureDP, ApproximateDP))
            idle = pure and _largest_loss(protection) > _MOST_PURE
            always = branch.fixed_cohort is None and branch.seen_rate * branch.weight == 1
            unsampled = isinstance(protection, GaussianNoise) and rate == 1 and always
            if idle or (count * n > _MOST_COMPOSED and not unsampled):
                return math.inf
            scale = hidden * _loss_scale(protection, rate)
            smallest = min(smallest, scale)
            size = _largest_loss(protection)
            widest = _widest_loss(protection, rate)
            span += count * n * branch.seen_rate * widest**2 + 20 * math.sqrt(count * n) * widest
            reach = max(reach, size if pure else size**2 / 2 + 10 * size)
    spacing = next((h for h, above in _SPACINGS if smallest >= above), 1e-5)
    while max(span, reach) / spacing > _MOST_POINTS:
        spacing *= 10
    return spacing


def _loss_scale(protection: Protection, rate: float) -> float:
    """The order of magnitude of one access's privacy loss."""
    match protection:
        case GaussianNoise(multiplier=multiplier):
            return rate / multiplier
        case RandomGaussianNoise(multipliers=multipliers):
            return rate / max(multipliers)
        case LaplaceNoise(epsilon=eps) | PureDP(epsilon=eps) | ApproximateDP(epsilon=eps):
            return rate * eps / 4
    return 1.0


def _widest_loss(protection: Protection, rate: float) -> float:
    """`_loss_scale` of the draw with the least noise; for a large epsilon, of a batch that contains the record."""
    match protection:
        case RandomGaussianNoise(multipliers=multipliers):
            return rate / min(multipliers)
        case LaplaceNoise(epsilon=eps) | PureDP(epsilon=eps) | ApproximateDP(epsilon=eps) if eps > 4:
            return _amplified(PureDP(eps), rate)[0]
    return _loss_scale(protection, rate)


def _largest_loss(protection: Protection) -> float:
    """The magnitude of one access's privacy loss without sampling; for Gaussian noise, in standard deviations."""
    match protection:
        case GaussianNoise(multiplier=multiplier):
            return 1 / multiplier
        case RandomGaussianNoise(multipliers=multipliers):
            return 1 / min(multipliers)
        case LaplaceNoise(epsilon=eps) | PureDP(epsilon=eps) | ApproximateDP(epsilon=eps):
            return eps
        case ZeroConcentratedDP(rho=rho):
            return math.sqrt(2 * rho)
        case RenyiCurve(values=values):
            return math.sqrt(2 * min(values))
    return math.inf


@functools.lru_cache(maxsize=512)
def _composed(step: Step, count: int, grid: float) -> Any:
    if step.fixed_cohort is None and step.seen_rate * step.weight == 1 and step.bundle.repeats_itself:
        return _bundle_pld(step.bundle.times(count), grid)
    single = _step_pld(step, grid)
    return single if count == 1 else single.self_compose(count)


def _relation(adjacency: Adjacency) -> Any:
    from fedveil.privacy.dp_library import NeighboringRelation

    return NeighboringRelation[_RELATION[adjacency]]


@functools.lru_cache(maxsize=128)
def _step_pld(step: Step, grid: float) -> Any:
    from fedveil.privacy.dp_library import pld

    if step.weight < 1:
        instead = pld.identity(grid) if step.otherwise is None else _step_pld(step.otherwise, grid)
        return _step_pld(replace(step, weight=1.0, otherwise=None), grid).compute_mixture(
            instead, step.weight
        )
    if step.fixed_cohort is not None:
        ((protection, _, _),) = step.bundle.parts
        assert isinstance(protection, GaussianNoise)
        clients, cohort = step.fixed_cohort
        # Equals from_truncated_subsampled_gaussian_mechanism for cohorts that are always full.
        return pld.from_gaussian_mechanism(
            protection.multiplier / 2,
            value_discretization_interval=grid,
            sampling_prob=cohort / clients,
            neighboring_relation=_relation("replace-one"),
        )
    together = _bundle_pld(step.bundle, grid)
    return together if step.seen_rate == 1 else together.compute_mixture(pld.identity(grid), step.seen_rate)


@functools.lru_cache(maxsize=256)
def _bundle_pld(bundle: Bundle, grid: float) -> Any:
    total = None
    for protection, rate, count in bundle.parts:
        part = _part_pld(protection, rate, bundle.adjacency, grid)
        if count > 1:
            part = part.self_compose(count)
        total = part if total is None else total.compose(part)
    return total


@functools.lru_cache(maxsize=256)
def _part_pld(protection: Protection, rate: float, adjacency: Adjacency, grid: float) -> Any:
    from fedveil.privacy.dp_library import common, pld

    if isinstance(protection, RandomGaussianNoise) and rate == 1:
        return _gaussian_pld(protection, adjacency, grid)
    if isinstance(protection, GaussianNoise) and rate == 1:
        return _gaussian_pld(RandomGaussianNoise((protection.multiplier,), (1.0,)), adjacency, grid)
    if isinstance(protection, GaussianNoise):
        return pld.from_gaussian_mechanism(
            protection.multiplier,
            value_discretization_interval=grid,
            sampling_prob=rate,
            neighboring_relation=_relation(adjacency),
        )
    if adjacency == "replace-one":
        raise InputError(
            "adjacency",
            adjacency,
            f"has no accounting for {protection.in_words()}",
            "Use zero-out or add-remove, or leave adjacency out.",
        )
    if isinstance(protection, LaplaceNoise):
        return pld.from_laplace_mechanism(
            1 / protection.epsilon, value_discretization_interval=grid, sampling_prob=rate
        )
    if isinstance(protection, (PureDP, ApproximateDP)):
        eps, failure = _amplified(protection, rate)
        parameters = common.DifferentialPrivacyParameters(eps, failure)
        return pld.from_privacy_parameters(parameters, value_discretization_interval=grid)
    raise InputError("protection", protection.kind, "has no privacy loss distribution", 'Use "rdp".')


def _gaussian_pld(protection: RandomGaussianNoise, adjacency: Adjacency, grid: float) -> Any:
    """The Gaussian mechanism whose multiplier is drawn and visible: its divergence is the mean over the draws.

    The divergence of N(m, 1) from N(0, 1) is Phi(m/2 - e/m) - e^e Phi(-m/2 - e/m). The losses left out at either
    end have a probability below `_TAIL`; at the upper end they count as infinite.
    """
    from scipy.special import log_ndtr, ndtr, ndtri

    from fedveil.privacy.dp_library import pld, pld_pmf

    sensitivity = 2.0 if adjacency == "replace-one" else 1.0
    weights = np.asarray(protection.weights)
    mean = sensitivity / np.asarray(protection.multipliers)
    reach = -ndtri(np.minimum(0.5, _TAIL / weights)) * mean
    low = math.floor(float((mean**2 / 2 - reach).min()) / grid) - 1
    high = math.ceil(float((mean**2 / 2 + reach).max()) / grid) + 1
    losses = grid * np.arange(low, high + 1)
    deltas = np.full(len(losses), protection.failure)
    for weight, m in zip(weights, mean, strict=True):
        deltas += weight * (ndtr(m / 2 - losses / m) - np.exp(losses + log_ndtr(-m / 2 - losses / m)))
    deltas = np.minimum.accumulate(np.clip(deltas, 0, 1))
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, low, high, deltas)
    return pld.PrivacyLossDistribution(pmf)


def _amplified(protection: PureDP | ApproximateDP, rate: float) -> tuple[float, float]:
    """(epsilon, delta) of the mechanism on a Poisson sample: log(1 + q(e^eps - 1)), q delta."""
    failure = protection.delta if isinstance(protection, ApproximateDP) else 0.0
    eps = protection.epsilon
    if eps > _MOST_PURE:  # 1 + q(e^eps - 1) <= e^eps
        return eps, rate * failure
    return math.log1p(rate * math.expm1(eps)), rate * failure


@functools.lru_cache(maxsize=4096)
@np.errstate(over="ignore")  # an overflow is an infinite divergence
def _epsilon_by_renyi(steps: tuple[tuple[Step, int], ...], delta: float) -> float:
    from fedveil.privacy.dp_library import rdp

    orders, total, failure = renyi_curve(steps)
    if failure >= delta:  # an (eps, delta) mechanism is eps-DP up to a failure probability of delta
        return math.inf
    return float(rdp.compute_epsilon(orders, total, delta - failure)[0])


def renyi_curve(steps: Sequence[tuple[Step, int]]) -> tuple[tuple[float, ...], Floats, float]:
    """Orders, the divergences of all steps composed, and their total failure probability."""
    curves = {p.orders for step, _ in steps for p, _, _ in step.bundle.parts if isinstance(p, RenyiCurve)}
    if len(curves) > 1:
        raise InputError("orders", sorted(curves), "Renyi curves differ in orders", "Use the same orders.")
    orders = curves.pop() if curves else _ORDERS
    total = np.zeros(len(orders))
    failure = 0.0
    for step, count in steps:
        value, fails = _step_renyi(step, orders)
        total += count * value
        failure += count * fails
    return orders, total, failure


def _step_renyi(step: Step, orders: tuple[float, ...]) -> tuple[Floats, float]:
    """The divergence of a step, and its failure probability."""
    seen_rate = step.seen_rate
    if step.fixed_cohort is not None:
        # No Renyi bound exists for a hidden cohort: participation counts as visible, which gives a larger
        # epsilon. Replacing a contribution has sensitivity 2C.
        clients, cohort = step.fixed_cohort
        seen_rate = cohort / clients
    value = np.zeros(len(orders))
    fails = 0.0
    for protection, rate, n in step.bundle.parts:
        value += n * _part_renyi(protection, rate, step.bundle.adjacency, orders)
        if isinstance(protection, ApproximateDP):
            fails += n * _amplified(protection, rate)[1]
        if isinstance(protection, RandomGaussianNoise):
            fails += protection.failure
    value, fails = _seen_renyi(value, seen_rate, orders), seen_rate * fails
    if step.weight < 1:
        if step.otherwise is None:
            return _seen_renyi(value, step.weight, orders), step.weight * fails
        instead, also = _step_renyi(step.otherwise, orders)
        mixed = mixed_renyi([(step.weight, value), (1 - step.weight, instead)], orders)
        return mixed, step.weight * fails + (1 - step.weight) * also
    return value, fails


def mixed_renyi(branches: list[tuple[float, Floats]], orders: tuple[float, ...]) -> Floats:
    """The divergence of a mixture whose branch is known to the adversary: log E e^((a - 1) D) / (a - 1)."""
    above = np.asarray(orders) - 1
    terms = np.stack([math.log(weight) + above * value for weight, value in branches])
    mixed = np.logaddexp.reduce(terms, axis=0) / above
    return _not_rounded_away(mixed, np.max([value for _, value in branches], axis=0), orders)


def _not_rounded_away(values: Floats, bound: Any, orders: tuple[float, ...]) -> Floats:
    """The divergences; where rounding may have lost a tiny one, the rounding error or `bound`, a cruder bound."""
    kept: Floats = np.maximum(values, np.minimum(bound, _ROUNDING / (np.asarray(orders) - 1)))
    return kept


def _seen_renyi(value: Floats, rate: float, orders: tuple[float, ...]) -> Floats:
    """The divergence of the mixture rate * M + (1 - rate) * identity whose branch is known to the adversary."""
    return value if rate == 1 else mixed_renyi([(rate, value), (1 - rate, np.zeros(len(orders)))], orders)


@functools.lru_cache(maxsize=512)
def _part_renyi(
    protection: Protection, rate: float, adjacency: Adjacency, orders: tuple[float, ...]
) -> Floats:
    match protection:
        case GaussianNoise(multiplier=multiplier):
            if adjacency == "replace-one":
                if rate < 1:
                    raise InputError(
                        "adjacency", adjacency, "has no Renyi bound for sampled batches", "Use add-remove."
                    )
                multiplier /= 2
            if rate < 1:
                return _sampled_gaussian_renyi(rate, multiplier, orders)
            return np.asarray(orders) / (2 * multiplier**2)
        case RandomGaussianNoise(multipliers=multipliers, weights=weights) if rate == 1:
            total = math.fsum(weights)
            branches = [
                (weight / total, _part_renyi(GaussianNoise(m), rate, adjacency, orders))
                for weight, m in zip(weights, multipliers, strict=True)
            ]
            return mixed_renyi(branches, orders)
        case _ if adjacency == "replace-one":
            raise InputError("adjacency", adjacency, "has no accounting here", "Use zero-out or add-remove.")
        case LaplaceNoise(epsilon=eps) if rate == 1:
            from fedveil.privacy.dp_library import LaplaceDpEvent, rdp

            accountant = rdp.RdpAccountant(list(orders))
            accountant.compose(LaplaceDpEvent(1 / eps))
            return _not_rounded_away(np.asarray(accountant.rdp), np.asarray(orders) * eps**2 / 2, orders)
        case PureDP() | ApproximateDP() | LaplaceNoise():
            pure = PureDP(protection.epsilon) if isinstance(protection, LaplaceNoise) else protection
            return _pure_renyi(_amplified(pure, rate)[0], orders)
        case ZeroConcentratedDP(rho=rho) if rate == 1:
            return rho * np.asarray(orders)
        case RenyiCurve(values=values) if rate == 1:
            return np.asarray(values)
    raise InputError(
        "rate", rate, f"no theorem amplifies {protection.in_words()} by sampling", "Use rate = 1."
    )


def _sampled_gaussian_renyi(rate: float, multiplier: float, orders: tuple[float, ...]) -> Floats:
    """The divergence of the Poisson-subsampled Gaussian mechanism (Mironov, Talwar, Zhang 2019).

    At whole orders the finite sum of dp-accounting, between them (where it interpolates) the integral
    E_z[(1 - q + q e^((2z - 1) / 2s^2))^a], z ~ N(0, s^2), by the trapezoid rule, which for such integrands
    is exact to rounding. Negligible noise would need too many points: there the next whole order is the bound.
    """
    from fedveil.privacy.dp_library import GaussianDpEvent, PoissonSampledDpEvent, rdp

    alpha = np.asarray(orders)
    if alpha.max() / multiplier > _MOST_DEVIATIONS:
        alpha = np.ceil(alpha)
    whole = alpha == np.round(alpha)
    event = PoissonSampledDpEvent(rate, GaussianDpEvent(multiplier))
    accountant = rdp.RdpAccountant(list(alpha[whole]))
    accountant.compose(event)
    out = np.empty(len(alpha))
    out[whole] = accountant.rdp
    between = alpha[~whole]
    if len(between):
        step = multiplier / 50
        z = np.arange(-14 * multiplier, between.max() + 14 * multiplier, step)
        log_density = -(z**2) / (2 * multiplier**2) - math.log(multiplier * math.sqrt(2 * math.pi))
        log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * z - 1) / (2 * multiplier**2))
        exponent = between[:, None] * log_ratio + log_density
        out[~whole] = (np.logaddexp.reduce(exponent, axis=1) + math.log(step)) / (between - 1)
    return _not_rounded_away(out, alpha / (2 * multiplier**2), orders)


def _pure_renyi(eps: float, orders: tuple[float, ...]) -> Floats:
    """The largest Renyi divergence an eps-DP mechanism can have: that of randomised response."""
    alpha = np.asarray(orders)
    log_p = -math.log1p(math.exp(-eps))
    log_q = log_p - eps
    total = np.logaddexp(alpha * log_p + (1 - alpha) * log_q, alpha * log_q + (1 - alpha) * log_p)
    return _not_rounded_away(total / (alpha - 1), alpha * eps**2 / 2, orders)
