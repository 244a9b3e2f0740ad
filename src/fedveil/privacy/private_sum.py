"""The private sum of a cohort: who adds which share of its noise, the protection of each share, and the sum itself.

Symbols: C `clip`, sigma `multiplier`, K the size of the cohort (of Poisson cohorts p N is its expectation,
`plan.cohort`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from fedveil.errors import DivergedError, InputError
from fedveil.lazy_torch import torch
from fedveil.privacy.mechanisms import SumMechanism, Unnoised, gaussian
from fedveil.privacy.releases import GaussianNoise, Plan, Protection, RandomGaussianNoise, Release
from fedveil.privacy.sampling import cohort_sizes
from fedveil.streams import Stream
from fedveil.tree import Params, add, moved, with_axis, without_axis, zeros_like

NoiseScope = Literal["shared", "local"]
_MOST_DRAWS = 48
_SUMMED = 4
"""The grid of uploads is coarse, so that float32 holds them exactly (docs/noise.md, claim 3)."""
_HELD = 2.0**21
"""The number of grid steps that float32 can represent beside a model: product, sum and `lr` are each rounded once, an
error below 3 / 8 of the step."""
_EXACT_ROWS = 2**15
"""So many clipped updates without noise may be summed in float64 (docs/noise.md)."""
_FAR = 16
"""A draw exceeds so many standard deviations with probability below 2^-180."""


class TopUp(Protocol):
    """The noise that the server adds to a sum of bounded contributions."""

    def perturb(self, total: Params, streams: Sequence[Stream]) -> Params: ...


@dataclass(frozen=True)
class CohortNoise:
    """Gaussian noise on the sum of a cohort's clipped updates, and who adds which share of it.

    "shared": each of K clients adds sigma C / sqrt(K), so that the sum has noise sigma C. "local": each adds sigma C,
    so that its upload alone is protected. "central": clients add nothing, the server adds sigma C. The argument
    `cohort` is the size that was announced to the clients, 0 if none was.

    Guarantees: uploads and top-up together have exactly the noise of `total`, however many clients participate and
    answer (`test_uploads_and_top_up_make_the_declared_noise`).
    """

    clip: float
    multiplier: float
    scope: Literal["shared", "local", "central"]
    plan: Plan

    def sharers(self, cohort: int = 0) -> int:
        """The number of clients that share the noise of a sum: the announced cohort, at least the planned size."""
        return max(cohort, self.plan.clients if self.plan.sampler == "all" else self.plan.cohort)

    def upload(self, cohort: int = 0) -> SumMechanism:
        """The mechanism that each client applies to its update."""
        if self.scope == "central":
            if self.multiplier and self.sharers(cohort) > _EXACT_ROWS:
                raise InputError(
                    "run.cohort",
                    self.sharers(cohort),
                    "rounding errors of a sum of so many updates would not be covered by the guarantee",
                    f'Use at most {_EXACT_ROWS} clients in a round, or noise_scope = "local".',
                )
            return Unnoised(self.clip, 'the server adds the noise (noise_scope = "central")')
        upload = gaussian(self.clip, self._share(cohort), _SUMMED)
        if upload.step and not _fits(upload, 0.0):
            raise InputError(
                "noise_multiplier",
                self.multiplier,
                "gives an upload so little noise that float32 cannot represent update and noise together",
                "Use more noise, or 0 for none.",
            )
        return upload

    def total(self, cohort: int = 0) -> SumMechanism:
        """The mechanism that protects the sum: the noise of the uploads and of the server."""
        if self.scope == "local":
            return gaussian(self.clip, self.multiplier * math.sqrt(self.sharers(cohort)))
        return gaussian(self.clip, self.multiplier)

    def top_up(self, present: int, cohort: int = 0) -> SumMechanism:
        """The noise that the server adds to a sum of `present` uploads, so that it has the noise of `total`."""
        if self.scope == "central":
            return self.total(cohort)
        absent = max(0, self.sharers(cohort) - present)
        return gaussian(self.clip, self._share(cohort) * math.sqrt(absent))

    def others(self, cohort: int = 0) -> SumMechanism:
        """The noise of the sum that is unknown to a client, which knows its own share."""
        return gaussian(self.clip, self._share(cohort) * math.sqrt(self.sharers(cohort) - 1))

    def _share(self, cohort: int) -> float:
        """The noise of one upload in units of the clip."""
        return (
            self.multiplier / math.sqrt(self.sharers(cohort)) if self.scope == "shared" else self.multiplier
        )

    def releases(self) -> tuple[Release, Release]:
        """The releases of a run: each upload to the server, their mean to everybody else.

        A participant knows its own share of the mean's noise: 1 / max(K, p N) of its variance. Where the cohort has
        only one client, the sum contains nobody else's data.
        """
        plan = self.plan
        total = protection_in_cohorts(self.total, plan)
        insider = None
        if self.scope != "central" and plan.clients > 1 and (plan.sampler == "poisson" or self.sharers() > 1):
            insider = protection_in_cohorts(self.others, plan, present=2)
        disclosed = isinstance(total, RandomGaussianNoise)  # the noise level shows how many participated
        return (
            Release(
                "each client's noisy model", "client", ("server",), protection_in_cohorts(self.upload, plan)
            ),
            Release(
                "the averaged model",
                "client",
                ("observer", "client"),
                total,
                participation="seen" if disclosed else "hidden",
                insider=insider,
            ),
        )


def protection_in_cohorts(
    mechanism: Callable[[int], SumMechanism], plan: Plan, *, present: int = 1
) -> Protection:
    """The protection of `mechanism(K)`, where K is the size of a cohort with `present` given participants.

    The size of a Poisson cohort is random, independent of the data and known to those to whom it is announced.
    """
    if plan.sampler != "poisson":
        return mechanism(0).protection()
    weights: dict[float, float] = {}
    for size, weight in cohort_sizes(plan, min(present, plan.clients)):
        drawn = mechanism(size).protection()
        if not isinstance(drawn, GaussianNoise):
            return drawn
        weights[drawn.multiplier] = weights.get(drawn.multiplier, 0.0) + weight
    if len(weights) == 1:
        return GaussianNoise(min(weights))
    rows = list(weights.items())
    # Neighbouring sizes are grouped, with the least noise among them.
    group = math.ceil(len(rows) / _MOST_DRAWS)
    groups = [rows[i : i + group] for i in range(0, len(rows), group)]
    return RandomGaussianNoise(
        tuple(min(value for value, _ in part) for part in groups),
        tuple(math.fsum(weight for _, weight in part) for part in groups),
    )


@dataclass(frozen=True)
class NoisySum:
    """A noisy sum `[1, ...]` and the divisor of its mean."""

    total: Params
    cohort: int

    def mean(self) -> Params:
        """The sum over the cohort, without a client axis."""
        return {name: leaf / self.cohort for name, leaf in without_axis(self.total).items()}

    def added_to(self, start: Params, lr: float = 1.0) -> Params:
        """`start` plus `lr` times the mean, in the dtype of `start`."""
        return moved(start, without_axis(self.total), lr / self.cohort)


def private_sum(
    uploads: Params | None,
    like: Params,
    present: int,
    plan: Plan,
    top_up: TopUp,
    stream: Stream,
    *,
    upload: SumMechanism | None = None,
    start: Params | None = None,
    lr: float = 1.0,
) -> NoisySum:
    """The sum of `present` clients' bounded uploads `[present, ...]`, completed by the server's noise.

    Args:
        uploads: None if nobody answered: then the sum is noise alone.
        like: A model with the uploads' shapes, without a client axis.
        present: Number of clients that answered.
        plan: A Poisson cohort's sum is divided by the planned size, whoever participated; a fixed cohort's by the
            number that answered.
        top_up: The noise that the server adds.
        stream: The stream of the server's noise.
        upload: The mechanism that the clients applied to their updates, if they add noise.
        start: Given if uploads are models `start + lr * update`: the model `[1, ...]` or models `[present, ...]` that
            the clients were sent. The updates are summed.
        lr: See `start`.

    Guarantees: multiples of the uploads' grid are summed without any rounding, so that the sum's guarantee is that of
    its whole noise (`test_the_sum_of_uploads_is_exact`).
    """
    if uploads is None:
        total = {name: leaf.double() for name, leaf in with_axis(zeros_like(like)).items()}
    else:
        step = 0.0 if upload is None else upload.step
        updates = uploads if start is None else _updates(uploads, start, lr, step)
        total = {name: leaf.sum(0, keepdim=True, dtype=torch.float64) for name, leaf in updates.items()}
    divisor = plan.cohort if plan.sampler == "poisson" or present == 0 else present
    return NoisySum(top_up.perturb(total, [stream]), divisor)


def exact_total(
    uploads: Params, upload: SumMechanism, *, start: Params | None = None, lr: float = 1.0
) -> Params | None:
    """The exact sum `[1, ...]` of some uploads, which `private_sum` accepts in their place.

    Arguments as there. None where uploads are not multiples of a grid: then the result depends on the summation order.
    """
    if not upload.step:
        return None
    updates = uploads if start is None else _updates(uploads, start, lr, upload.step)
    return {name: leaf.sum(0, keepdim=True, dtype=torch.float64) for name, leaf in updates.items()}


def noisy_models(
    upload: SumMechanism, start: Params, update: Params, streams: Sequence[Stream], lr: float = 1.0
) -> Params:
    """The uploads: `start` plus `lr` times the bounded and noisy `update`, all `[K, ...]`.

    Raises:
        DivergedError: The model, which the server knows, is so large that float32 cannot represent the noise beside it.
    """
    largest = max((float(leaf.abs().max()) for leaf in start.values() if leaf.numel()), default=0.0)
    if upload.step and not _fits(upload, largest / lr):
        raise DivergedError(
            f"the model has grown to {largest:g}: float32 cannot represent noise of {upload.std * lr:g} beside it",
            field="model",
            value=largest,
        )
    return add(start, upload(update, streams), scale=lr)


def _fits(upload: SumMechanism, beside: float) -> bool:
    """Whether float32 can represent multiples of the upload's grid added to a number as large as `beside`."""
    return beside + upload.clip + _FAR * upload.std <= _HELD * upload.step


def _updates(uploads: Params, start: Params, lr: float, step: float) -> Params:
    """The updates in models `start + lr * update`, in float64, recovered exactly as multiples of the step."""
    doubles = {name: leaf.to(torch.float64, copy=True) for name, leaf in uploads.items()}
    found = {name: leaf.sub_(start[name]).div_(lr * (step or 1.0)) for name, leaf in doubles.items()}
    return {name: leaf.round_().mul_(step) for name, leaf in found.items()} if step else found
