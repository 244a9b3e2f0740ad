"""Sampling of cohorts, from a stream of the round or from entropy, always in ascending order."""

from __future__ import annotations

from random import SystemRandom

import numpy as np

from fedveil.privacy.releases import Plan
from fedveil.streams import EntropyStream, named_stream


def draw_cohort(plan: Plan, seed: int, round: int) -> tuple[int, ...]:
    """All clients; `cohort` of them without replacement; or each with probability `plan.rate` (Poisson)."""
    if plan.sampler == "all":
        return tuple(range(plan.clients))
    stream = named_stream(seed, round, "cohort")
    size = plan.cohort if plan.sampler == "fixed" else int(stream.binomial(plan.clients, plan.rate))
    drawn = stream.choice(plan.clients, size=size, replace=False, shuffle=False)
    return tuple(sorted(drawn.tolist()))


def draw_secret_cohort(plan: Plan) -> tuple[int, ...]:
    """A cohort of the same distribution, from the operating system's entropy.

    Guarantees:
        It cannot be reproduced, even with the run's seed, which amplification by sampling requires
        (`test_a_secret_cohort_has_the_distribution_of_the_sampler`).
    """
    if plan.sampler == "all":
        return tuple(range(plan.clients))
    if plan.sampler == "fixed":
        return tuple(sorted(SystemRandom().sample(range(plan.clients), plan.cohort)))
    present = EntropyStream().random(plan.clients) < plan.rate
    return tuple(np.flatnonzero(present).tolist())


def cohort_sizes(plan: Plan, present: int = 0) -> list[tuple[int, float]]:
    """The sizes of a Poisson cohort with `present` given participants, ascending, with their probabilities.

    Tails with a probability below 1e-20 are left out.
    """
    from scipy.stats import binom

    others = plan.clients - present
    drawn = np.arange(others + 1)
    chance = binom.pmf(drawn, others, plan.rate)
    likely = (chance > 0) & (binom.sf(drawn - 1, others, plan.rate) > 1e-20)
    return [(present + int(k), float(chance[k])) for k in drawn[likely]]
