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
    others, rate = plan.clients - present, plan.rate
    if rate == 1:
        return [(plan.clients, 1.0)]
    drawn = np.arange(others + 1)
    # From the most likely size outwards, so that no probability is the difference of large logarithms.
    ratio = (others - drawn[:-1]) / drawn[1:] * (rate / (1 - rate))
    mode = min(int((others + 1) * rate), others)
    with np.errstate(under="ignore"):
        above, below = np.cumprod(ratio[mode:]), np.cumprod(1 / ratio[:mode][::-1])[::-1]
        chance = np.concatenate([below, [1.0], above])
        chance /= chance.sum()
    likely = (chance > 0) & (np.cumsum(chance[::-1])[::-1] > 1e-20)
    return [(present + int(k), float(chance[k])) for k in drawn[likely]]
