"""Small mechanisms in one dimension, one for each branch of the accountant, with their exact output distributions.

Each case runs a mechanism on two neighbouring data sets, computes the probabilities of all its outputs (cohorts are
enumerated, noise is integrated over cells) for comparison with the stated epsilon. Cells only hide
information, so what is found here is a lower bound of the truth: a smaller stated epsilon is wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fedveil.privacy.releases import (
    Adjacency,
    Adversary,
    ApproximateDP,
    GaussianNoise,
    LaplaceNoise,
    Participation,
    Plan,
    Protection,
    PureDP,
    RandomGaussianNoise,
    Release,
    RenyiCurve,
    Sampler,
    Unit,
    ZeroConcentratedDP,
)
from tests.unit.privacy.brute_force import (
    Density,
    Pair,
    at,
    either,
    gaussian,
    laplacian,
    mixed,
    randomised_response,
)

ORDERS = (1.5, 2.0, 3.0, 5.0, 8.0, 16.0, 32.0, 64.0)


@dataclass(frozen=True)
class Case:
    """What the accountant is told, and the outputs of the mechanism on neighbouring data sets.

    `tight`: the factor and the amount by which the stated epsilon may exceed the truth; None: it is only a bound.
    """

    name: str
    releases: tuple[Release, ...]
    plan: Plan
    pairs: Callable[[], Sequence[Pair]]
    adversary: Adversary = "server"
    tight: tuple[float, float] | None = (1.02, 0.01)
    renyi: bool = True


def release(
    protection: Protection,
    unit: Unit = "client",
    participation: Participation = "seen",
    adversary: Adversary = "server",
    **more: Any,
) -> Release:
    return Release("x", unit, (adversary,), protection, participation, **more)


def _worst(pairs: Sequence[Pair]) -> Pair:
    return max(pairs, key=lambda pair: pair.delta(0.5))


def again(pair: Pair, rounds: int) -> Pair:
    return pair.then(*[pair] * (rounds - 1)) if rounds > 1 else pair


def _only(pair: Pair, times: int = 1, chance: float = 1.0) -> list[Pair]:
    """The one pair of a case: so many outputs of it, with this probability."""
    return [again(pair, times).sometimes(chance)]


# --- cohorts, enumerated ------------------------------------------------------------------------------------


def _cohorts(clients: int, cohort: int, sampler: Sampler) -> list[tuple[float, frozenset[int]]]:
    """Every possible cohort with its probability."""
    everyone = range(clients)
    if sampler == "all":
        return [(1.0, frozenset(everyone))]
    if sampler == "fixed":
        possible = [frozenset(chosen) for chosen in itertools.combinations(everyone, cohort)]
        return [(1 / len(possible), chosen) for chosen in possible]
    rate = cohort / clients
    subsets = (frozenset(c) for size in range(clients + 1) for c in itertools.combinations(everyone, size))
    return [(rate ** len(c) * (1 - rate) ** (clients - len(c)), c) for c in subsets]


View = tuple[Any, ...]


def _sums(values: Sequence[float], plan: Plan, view: Callable[[frozenset[int]], View]) -> dict[View, Density]:
    """The sum of the cohort's values, for each thing that the adversary knows of the cohort."""
    found: dict[View, dict[float, float]] = {}
    for weight, chosen in _cohorts(plan.clients, plan.cohort, plan.sampler):
        sums, total = found.setdefault(view(chosen), {}), sum(values[i] for i in chosen)
        sums[total] = sums.get(total, 0.0) + weight
    return {seen: tuple((weight, value) for value, weight in sums.items()) for seen, sums in found.items()}


def _hidden_sum(
    plan: Plan,
    values: Sequence[float],
    neighbour: Sequence[float],
    noise: Callable[[Density, Density, View], Pair],
    view: Callable[[frozenset[int]], View] = lambda _: (),
) -> Pair:
    """A noisy sum of the cohort on two data sets, with what the adversary knows of the cohort beside it."""
    one, other = _sums(values, plan, view), _sums(neighbour, plan, view)
    return either(*((1.0, noise(one[seen], other[seen], seen)) for seen in one))


def _neighbours(plan: Plan, adjacency: Adjacency) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Values in [-1, 1] of all clients and of the neighbouring data set: client 0 changes, others are extreme."""
    changed = (-1.0, 0.0) if adjacency == "replace-one" else (0.0,)
    others = [(value,) * (plan.clients - 1) for value in (-1.0, 0.0, 1.0)]
    return [((1.0, *rest), (value, *rest)) for rest in others for value in changed]


def _all_hidden_sums(plan: Plan, adjacency: Adjacency, sigma: float, rounds: int = 1) -> list[Pair]:
    pairs = [
        _hidden_sum(plan, *pair, lambda p, q, _: gaussian(p, q, sigma, 2000))
        for pair in _neighbours(plan, adjacency)
    ]
    return pairs if rounds == 1 else [again(_worst(pairs), rounds)]


POISSON = Plan(4, 1, "poisson", 1)
FIXED = Plan(4, 1, "fixed", 1)
PAIR_OF_FOUR = Plan(4, 2, "fixed", 1)
ALL = Plan(4, 4, "all", 1)


# --- clients ------------------------------------------------------------------------------------------------


def _seen(plan: Plan, pair: Pair) -> Pair:
    return pair.sometimes(plan.rate) if plan.rate < 1 else pair


def _gaussian_clients() -> list[Case]:
    cases = []
    for sampler, plan in (("poisson", POISSON), ("fixed", FIXED), ("all", ALL)):
        for rounds in (1, 3):
            for adjacency, other in (("zero-out", 0.0), ("replace-one", -1.0)):
                for participation in ("seen", "charged"):
                    upload = gaussian(at(1.0), at(other), 1.5)
                    true = upload if participation == "charged" else _seen(plan, upload)
                    cases.append(
                        Case(
                            f"{participation} {sampler} Gaussian {adjacency} x{rounds}",
                            (release(GaussianNoise(1.5), participation=participation, adjacency=adjacency),),
                            replace(plan, rounds=rounds),
                            partial(_only, true, rounds),
                        )
                    )
    return cases


def _hidden_gaussian_clients() -> list[Case]:
    cases = []
    # Fixed cohorts: dp-accounting's bound takes both data sets 2C away from a cohort without the client.
    poisson: tuple[Adjacency, ...] = ("add-remove", "zero-out", "replace-one")
    fixed: tuple[Adjacency, ...] = ("zero-out", "replace-one")
    for plan, adjacencies, tight in (
        (POISSON, poisson, (1.02, 0.01)),
        (FIXED, fixed, (4.0, 0.1)),
        (PAIR_OF_FOUR, fixed, (4.0, 0.1)),
        (ALL, fixed, (1.02, 0.01)),
    ):
        for adjacency in adjacencies:
            for rounds in (1, 3):
                made = release(GaussianNoise(1.5), participation="hidden", adjacency=adjacency)
                cases.append(
                    Case(
                        f"hidden {plan.sampler} {plan.cohort} of {plan.clients} {adjacency} x{rounds}",
                        (made,),
                        replace(plan, rounds=rounds),
                        partial(_all_hidden_sums, plan, adjacency, 1.5, rounds),
                        tight=tight,
                        renyi=not (plan.sampler == "poisson" and adjacency == "replace-one"),
                    )
                )
    return cases


def _two_dimensions(plan: Plan, sigmas: tuple[float, float]) -> Pair:
    """Two noisy sums of one hidden cohort: the joint distribution over a grid of cells."""
    rate = plan.rate
    first, second = (gaussian(at(1.0), at(0.0), sigma, 600) for sigma in sigmas)
    present, absent = np.outer(first.p, second.p).ravel(), np.outer(first.q, second.q).ravel()
    return Pair(rate * present + (1 - rate) * absent, absent)


def _several_releases() -> list[Case]:
    hidden = release(GaussianNoise(1.5), participation="hidden")
    more = release(GaussianNoise(2.0), participation="hidden")
    seen = release(GaussianNoise(2.0))
    return [
        Case(
            "two hidden Gaussians of one cohort",
            (hidden, more),
            POISSON,
            lambda: [_two_dimensions(POISSON, (1.5, 2.0))],
        ),
        Case(
            "one hidden Gaussian, twice in a round",
            (replace(hidden, accesses=2),),
            POISSON,
            lambda: [_two_dimensions(POISSON, (1.5, 1.5))],
        ),
        Case(
            "a seen release beside a hidden one",
            (hidden, seen),
            POISSON,
            lambda: [
                gaussian(at(1.0), at(0.0), 1.5).then(gaussian(at(1.0), at(0.0), 2.0)).sometimes(POISSON.rate)
            ],
        ),
        Case(
            "releases of different rounds",
            (replace(seen, every=3), replace(hidden, participation="seen", except_every=3)),
            replace(POISSON, rounds=3),
            lambda: [
                again(gaussian(at(1.0), at(0.0), 1.5).sometimes(POISSON.rate), 2).then(
                    gaussian(at(1.0), at(0.0), 2.0).sometimes(POISSON.rate)
                )
            ],
        ),
        Case(
            "Gaussian and Laplace noise in one participation",
            (seen, release(LaplaceNoise(0.5))),
            FIXED,
            lambda: [
                gaussian(at(1.0), at(0.0), 2.0).then(laplacian(at(1.0), at(0.0), 2.0)).sometimes(FIXED.rate)
            ],
        ),
    ]


def _random_gaussian(multipliers: Sequence[float], weights: Sequence[float]) -> Pair:
    """Noise whose size is drawn and disclosed; with the probability missing to 1 everything is disclosed."""
    branches = [(w, gaussian(at(1.0), at(0.0), m, 2000)) for w, m in zip(weights, multipliers, strict=True)]
    missing = 1 - math.fsum(weights)
    return either(*branches, (missing, Pair(np.array([1.0, 0.0]), np.array([0.0, 1.0]))))


def _other_clients() -> list[Case]:
    """Every other protection, with observed and with hidden cohorts; hidden ones are a mixture."""
    drawn = (1.0, 2.0, 4.0), (0.25, 0.5, 0.25)
    curve = RenyiCurve(ORDERS, tuple(order / (2 * 1.5**2) for order in ORDERS))
    kinds: list[tuple[str, Protection, Callable[[float], Pair], bool]] = [
        ("Laplace", LaplaceNoise(0.7), lambda r: laplacian(mixed(r, 1.0), at(0.0), 1 / 0.7), True),
        ("pure", PureDP(0.7), lambda r: randomised_response(0.7, rate=r), True),
        ("approximate", ApproximateDP(0.7, 1e-6), lambda r: randomised_response(0.7, 1e-6, r), True),
        (
            "zCDP",
            ZeroConcentratedDP(1 / (2 * 1.5**2)),
            lambda r: gaussian(mixed(r, 1.0), at(0.0), 1.5),
            False,
        ),
        ("Renyi curve", curve, lambda r: gaussian(mixed(r, 1.0), at(0.0), 1.5), False),
    ]
    cases = []
    for name, protection, pair, exact in kinds:
        for plan in (POISSON, FIXED):
            for rounds in (1, 3):
                ways: list[tuple[Participation, Pair]] = [
                    ("seen", pair(1.0).sometimes(plan.rate)),
                    ("hidden", pair(plan.rate)),
                    ("charged", pair(1.0)),
                ]
                for participation, true in ways:
                    amplified = name == "Laplace" and plan.sampler == "poisson"
                    cases.append(
                        Case(
                            f"{participation} {plan.sampler} {name} x{rounds}",
                            (release(protection, participation=participation),),
                            replace(plan, rounds=rounds),
                            partial(_only, true, rounds),
                            tight=(1.02, 0.01)
                            if exact and (participation != "hidden" or amplified)
                            else None,
                        )
                    )
    for rounds in (1, 3):
        noise = RandomGaussianNoise(*drawn)
        true = _random_gaussian(*drawn).sometimes(POISSON.rate)
        cases.append(
            Case(
                f"seen poisson random Gaussian x{rounds}",
                (release(noise),),
                replace(POISSON, rounds=rounds),
                partial(_only, true, rounds),
            )
        )
    short = (1.0, 2.0), (0.5, 0.5 - 9e-10)
    cases.append(
        Case(
            "random Gaussian that may fail",
            (release(RandomGaussianNoise(*short), participation="charged"),),
            POISSON,
            lambda: [_random_gaussian(*short)],
        )
    )
    return cases


# --- what another client knows ------------------------------------------------------------------------------


ME = 1


def _insider_pair(plan: Plan, values: Sequence[float], neighbour: Sequence[float]) -> Pair:
    """The sum to client 1, which knows whether it is in the cohort, there its share of the noise and the size."""

    def view(chosen: frozenset[int]) -> View:
        return (True, len(chosen)) if ME in chosen else (False,)

    def noise(p: Density, q: Density, seen: View) -> Pair:
        return gaussian(p, q, 1.2 if seen[0] else 1.5, 2000)

    return _hidden_sum(plan, values, neighbour, noise, view)


def _all_insider_pairs(plan: Plan, adjacency: Adjacency, rounds: int) -> list[Pair]:
    pairs = [_insider_pair(plan, *pair) for pair in _neighbours(plan, adjacency)]
    return pairs if rounds == 1 else [again(_worst(pairs), rounds)]


def _without_share(plan: Plan, adjacency: Adjacency) -> list[Pair]:
    """The sum to client 1, which knows whether it is in the cohort but no part of the noise."""
    return [
        _hidden_sum(
            plan, *pair, lambda p, q, _: gaussian(p, q, 1.5, 2000), view=lambda chosen: (ME in chosen,)
        )
        for pair in _neighbours(plan, adjacency)
    ]


def _insiders() -> list[Case]:
    cases = []
    alone = release(GaussianNoise(1.5), participation="hidden", adversary="client")
    three = Plan(4, 3, "fixed", 1)
    both: tuple[Adjacency, ...] = ("zero-out", "replace-one")
    for plan, adjacency in itertools.product((POISSON, FIXED, PAIR_OF_FOUR, three, ALL), both):
        where = f"{plan.sampler} {plan.cohort} of {plan.clients} {adjacency}"
        renyi = plan.sampler != "poisson" or adjacency == "zero-out"
        without = replace(alone, adjacency=adjacency)
        knows = replace(without, insider=GaussianNoise(1.2))
        cases += [
            Case(
                f"sum to a member, {where} x{rounds}",
                (knows,),
                replace(plan, rounds=rounds),
                partial(_all_insider_pairs, plan, adjacency, rounds),
                adversary="client",
                tight=(4.0, 0.1),
                renyi=renyi,
            )
            for rounds in (1, 2)
        ]
        cases.append(
            Case(
                f"sum to a member without a share of noise, {where}",
                (without,),
                plan,
                partial(_without_share, plan, adjacency),
                adversary="client",
                tight=(4.0, 0.1),
                renyi=renyi,
            )
        )
    knows = replace(alone, insider=GaussianNoise(1.2))
    for plan in (POISSON, PAIR_OF_FOUR):
        record = replace(knows, unit="record", rate=0.3)

        def one_record(plan: Plan = plan) -> list[Pair]:
            rate = plan.rate if plan.sampler == "poisson" else (plan.cohort - 1) / (plan.clients - 1)
            inside = gaussian(mixed(0.3, 1.0), at(0.0), 1.2).sometimes(rate)
            beside = plan.rate if plan.sampler == "poisson" else plan.cohort / (plan.clients - 1)
            outside = gaussian(mixed(0.3, 1.0), at(0.0), 1.5).sometimes(beside)
            return [either((plan.rate, inside), (1 - plan.rate, outside))]

        cases.append(
            Case(
                f"a record against a member, {plan.sampler}", (record,), plan, one_record, adversary="client"
            )
        )
    return cases


# --- records ------------------------------------------------------------------------------------------------


def beside_known_records(plan: Plan, rate: float, sigma: float, known: float) -> Pair:
    """A hidden cohort's noisy sum of batches. The adversary knows all other records of the client: they shift the sum
    by `known` if the client participates."""
    p = plan.rate
    present = ((p * rate, known + 1.0), (p * (1 - rate), known), (1 - p, 0.0))
    absent = ((p, known), (1 - p, 0.0))
    return gaussian(present, absent, sigma, 20_000)


def _record_kinds(rate: float) -> list[tuple[str, Protection, Adjacency, Pair, bool]]:
    present = mixed(rate, 1.0)
    rows: list[tuple[str, Protection, Adjacency, Pair, bool]] = [
        ("Gaussian", GaussianNoise(0.8), "add-remove", gaussian(present, at(0.0), 0.8), True),
        ("Gaussian", GaussianNoise(0.8), "zero-out", gaussian(present, at(0.0), 0.8), True),
        ("Gaussian", GaussianNoise(0.8), "replace-one", gaussian(present, mixed(rate, -1.0), 0.8), True),
        ("Laplace", LaplaceNoise(1.5), "add-remove", laplacian(present, at(0.0), 1 / 1.5), True),
        ("pure", PureDP(1.5), "add-remove", randomised_response(1.5, rate=rate), False),
        ("approximate", ApproximateDP(1.5, 1e-6), "add-remove", randomised_response(1.5, 1e-6, rate), False),
    ]
    return rows


def _records() -> list[Case]:
    cases = []
    for rate, accesses in ((0.2, 1), (0.2, 3), (1.0, 1)):
        for name, protection, adjacency, pair, exact in _record_kinds(rate):
            for plan, participation in itertools.product((POISSON, FIXED), ("seen", "charged", "hidden")):
                # The client's other records may show that it participated, so a hidden cohort hides nothing of one.
                chance = 1.0 if participation == "charged" else plan.rate
                made = release(
                    protection,
                    "record",
                    participation,  # type: ignore[arg-type]
                    accesses=accesses,
                    rate=rate,
                    adjacency=adjacency,
                )
                cases.append(
                    Case(
                        f"record {participation} {plan.sampler} {name} {adjacency} rate {rate} x{accesses}",
                        (made,),
                        plan,
                        partial(_only, pair, accesses, chance),
                        tight=(1.02, 0.01) if exact else None,
                        renyi=not (adjacency == "replace-one" and rate < 1),
                    )
                )
    cases += [
        Case(
            f"record in a hidden cohort beside known records at {known}",
            (release(GaussianNoise(0.8), "record", "hidden", rate=0.2),),
            POISSON,
            partial(_only, beside_known_records(POISSON, 0.2, 0.8, known)),
            tight=(1.02, 0.01) if known == 30.0 else None,
        )
        for known in (0.0, 3.0, 30.0)
    ]
    first = release(GaussianNoise(0.8), "record", accesses=3, rate=0.2, first_rate=0.5)
    batches = [gaussian(mixed(rate, 1.0), at(0.0), 0.8) for rate in (0.5, 0.2, 0.2)]
    cases.append(
        Case(
            "a first batch of its own rate",
            (first,),
            POISSON,
            lambda: [batches[0].then(*batches[1:]).sometimes(POISSON.rate)],
        )
    )
    return cases


CASES = [
    *_gaussian_clients(),
    *_hidden_gaussian_clients(),
    *_several_releases(),
    *_other_clients(),
    *_insiders(),
    *_records(),
]
