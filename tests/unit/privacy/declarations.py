"""How the methods of the library declare themselves, in a few lines each: fixtures for accounting."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from scipy.stats import binom

from fedveil.privacy.mechanisms import Binomial, SparseVector, TopKGaussian
from fedveil.privacy.releases import (
    ADVERSARIES,
    Adversary,
    GaussianNoise,
    PostProcessing,
    RandomGaussianNoise,
    Release,
    Unprotected,
)

OTHERS: tuple[Adversary, ...] = ("observer", "client")


def udp_fedavg(sigma: float, cohort: int = 10) -> list[Release]:
    """Cohorts of a fixed size; a member knows one share of the mean's noise."""
    members = GaussianNoise(sigma * math.sqrt((cohort - 1) / cohort))
    return [
        Release("each upload", "client", ("server",), GaussianNoise(sigma / math.sqrt(cohort))),
        Release(
            "the noisy mean", "client", OTHERS, GaussianNoise(sigma), participation="hidden", insider=members
        ),
    ]


def udp_fedavg_poisson(sigma: float, clients: int = 100, cohort: int = 10) -> list[Release]:
    """Poisson cohorts: an upload carries sigma / sqrt(max(K, pN)), a member knows K and its share."""

    def noise(present: int, left: Callable[[float], float]) -> RandomGaussianNoise:
        others = clients - present
        weights = Counter[int]()
        for k in range(others + 1):
            weights[max(present + k, cohort)] += binom.pmf(k, others, cohort / clients)
        likely = {k: w for k, w in weights.items() if w > 1e-18}
        return RandomGaussianNoise(tuple(left(k) for k in likely), tuple(likely.values()))

    members = noise(2, lambda k: sigma * math.sqrt((k - 1) / k))
    return [
        Release("each upload", "client", ("server",), noise(1, lambda k: sigma / math.sqrt(k))),
        Release(
            "the noisy mean", "client", OTHERS, GaussianNoise(sigma), participation="hidden", insider=members
        ),
    ]


def fedceo(sigma: float, interval: int, cohort: int = 10, scope: str = "shared") -> list[Release]:
    upload = sigma / math.sqrt(cohort) if scope == "shared" else sigma
    total = GaussianNoise(upload * math.sqrt(cohort))
    mean = Release("the noisy mean", "client", OTHERS, total, except_every=interval, following=True)
    return [
        Release("each upload", "client", ("server",), GaussianNoise(upload)),
        Release("the personal models", "client", OTHERS, GaussianNoise(upload), every=interval),
        replace(mean, participation="hidden", following=False),
        mean,  # who participated decides who starts from which personal model
    ]


def record_dp_sgd(sigma: float, batch: int, records: int, epochs: int) -> list[Release]:
    """Record-level DP-SGD inside each client (local DP-FedAvg; FedCEO's `unit = "record"`)."""
    steps = epochs * math.ceil(records / batch)
    rate = 1 / math.ceil(records / batch)
    return [
        Release("each upload", "record", ADVERSARIES, GaussianNoise(sigma), accesses=steps, rate=rate),
        Release("the mean", "record", OTHERS, PostProcessing("a function of the uploads")),
    ]


def fedlap_dp(
    sigma: float = 1.0, batch: int = 256, records: int = 10_000, accesses: int = 200, hidden: float = 1.0
) -> list[Release]:
    rate = batch / records
    return [
        Release(
            "the synthetic images",
            "record",
            ADVERSARIES,
            GaussianNoise(sigma),
            participation="charged",
            accesses=accesses,
            rate=rate,
            first_rate=hidden * rate,
        )
    ]


def dp_fedags_as_printed() -> list[Release]:
    return [
        Release(
            "the upload",
            "client",
            ADVERSARIES,
            Unprotected("coordinates below the threshold leave without noise, as do loss and size"),
        )
    ]


def dp_fedags_all_or_masked(sigma: float) -> list[Release]:
    """V0 (every coordinate) and V1 (the mask of the previous noisy aggregate): the same guarantee."""
    return [
        Release("the noisy gradient", "client", ADVERSARIES, GaussianNoise(sigma)),
        Release("the mask", "client", ADVERSARIES, PostProcessing("from the previous noisy aggregate")),
    ]


def dp_fedags_gumbel(sigma: float, count: int, epsilon: float) -> list[Release]:
    """V2."""
    mechanism = TopKGaussian(1.0, count, epsilon, sigma)
    return [Release("the chosen coordinates", "client", ADVERSARIES, mechanism.protection())]


def dp_fedags_sparse_vector(e1: float, e2: float, e3: float) -> list[Release]:
    """V3."""
    mechanism = SparseVector(1.0, 0.1, 5, e1, e2, e3)
    return [Release("at most five coordinates", "client", ADVERSARIES, mechanism.protection())]


def cpsgd(trials: int = 2**14, dimension: int = 64) -> list[Release]:
    mechanism = Binomial(1.0, trials, 0.1, dimension, 1e-9)
    return [Release("the quantised upload", "client", ADVERSARIES, mechanism.protection())]


def fedem() -> list[Release]:
    return [
        Release("each gradient", "client", ADVERSARIES, Unprotected("perturbed inputs are not noise")),
    ]
