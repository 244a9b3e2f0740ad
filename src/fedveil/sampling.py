"""Who takes part in a round: drawn from a stream of the round, and always in ascending order."""

from __future__ import annotations

from fedveil.privacy.releases import Plan
from fedveil.streams import named_stream


def draw_cohort(plan: Plan, seed: int, round: int) -> tuple[int, ...]:
    """All clients; `cohort` of them without replacement; or each with probability `plan.rate` (Poisson)."""
    if plan.sampler == "all":
        return tuple(range(plan.clients))
    stream = named_stream(seed, round, "cohort")
    size = plan.cohort if plan.sampler == "fixed" else int(stream.binomial(plan.clients, plan.rate))
    drawn = stream.choice(plan.clients, size=size, replace=False, shuffle=False)
    return tuple(sorted(drawn.tolist()))
