"""From releases and a plan to epsilon, for each unit and adversary, with the theorem that proves it.

The unit of composition is a round. All releases of one round that an adversary observes are accounted for together,
because they depend on the same draw of the cohort:

* participation visible ("seen"): with probability p the client participates and the privacy loss is that of all
  its releases together, otherwise it is 0. The adversary knows which, so the round's privacy loss
  distribution is the mixture p * PLD + (1 - p) * identity (the cohort does not depend on the data). This is
  zero-out adjacency: in the neighbouring data set the client participates with an update of zero.
* participation hidden, Poisson cohort, Gaussian noise on the sum: the subsampled Gaussian mechanism
  (add/remove; zero-out has the same dominating pair). All Gaussian releases of a round are one vector query.
* participation hidden, fixed cohort: removing one client adds another, so the sum changes by up to 2C:
  dp-accounting's bound for the truncated subsampled Gaussian (replace-one). Under zero-out the smaller of
  that bound and the one for visible participation is used; both are valid.
* any other hidden participation is charged as if it were visible: an adversary that knows more never has a smaller
  epsilon, so the bound stays valid.
* records: a hidden cohort does not amplify their privacy. A record is in the sum with probability p * q (client in the
  cohort, record in the batch), but the client's other records are in it with probability p, and if the adversary
  knows them they show that the client participated. The round is the mixture p * (q-subsampled) + (1 - p) * identity.
* a `client` knows in which rounds it participated, and there it knows its own share of the noise (`insider`).
  The round is the mixture of those two cases, which it can distinguish. For a cohort of fixed size it thereby
  learns that the others were drawn from N - 1. A participant of a Poisson cohort is sent its size, which
  discloses something about who else participated: those rounds are accounted for as if the cohort were visible.

If any release of a round makes participation visible, it is visible for the whole round.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedveil.errors import InputError
from fedveil.privacy import loss
from fedveil.privacy.loss import Bundle, Part, Step
from fedveil.privacy.releases import (
    ADVERSARIES,
    UNITS,
    Adjacency,
    Adversary,
    GaussianNoise,
    LaplaceNoise,
    Plan,
    PostProcessing,
    Protection,
    Release,
    RenyiCurve,
    Sampler,
    Unit,
    Unprotected,
    ZeroConcentratedDP,
)

Accountant = Literal["best", "rdp"]


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta)-DP of `unit` against `adversary`; epsilon None: nothing is proven, for `reason`."""

    unit: Unit
    adversary: Adversary
    adjacency: Adjacency
    sampler: str
    epsilon: float | None
    delta: float
    theorem: str
    reason: str = ""
    assumptions: tuple[str, ...] = ()
    ends: int = 1
    """The number of rounds after which the run could have ended; epsilon holds at delta / ends."""

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "unit": self.unit,
            "adversary": self.adversary,
            "adjacency": self.adjacency,
            "sampler": self.sampler,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "theorem": self.theorem,
            "assumptions": list(self.assumptions),
        }
        if self.reason:
            row["reason"] = self.reason
        if self.ends > 1:
            row["ends"] = self.ends
        return row


@dataclass(frozen=True)
class Cohort:
    """How a round's clients are drawn; a round's privacy loss depends on no other part of the plan."""

    clients: int
    cohort: int
    sampler: Sampler

    @classmethod
    def of(cls, plan: Plan) -> Cohort:
        return cls(plan.clients, plan.cohort, plan.sampler)

    @property
    def rate(self) -> float:
        return 1.0 if self.sampler == "all" else self.cohort / self.clients


@dataclass(frozen=True)
class Round:
    """The releases of one round, and how its cohort was drawn."""

    releases: tuple[Release, ...]
    cohort: Cohort


Rounds = Counter[Round]


def rounds_of(releases: Sequence[Release], plan: Plan, last: int | None = None, first: int = 0) -> Rounds:
    """Rounds `first`..`last` of the plan (default: all, with round 0 before training), equal ones counted."""
    cohort = Cohort.of(plan)
    end = plan.rounds if last is None else last
    # From round 2 on, releases repeat with this period.
    period = math.lcm(*(release.except_every or release.every for release in releases))
    counts: Counter[tuple[int, ...]] = Counter()
    for t in range(first, min(end, max(first, 2) + period - 1) + 1):
        times = 1 if t < 2 else (end - t) // period + 1
        counts[tuple(i for i, release in enumerate(releases) if release.happens_in(t))] += times
    return Counter({Round(tuple(releases[i] for i in p), cohort): n for p, n in counts.items() if p})


def account(
    releases: Sequence[Release], plan: Plan, delta: float, accountant: Accountant = "best", ends: int = 1
) -> tuple[Guarantee, ...]:
    """Account for a whole plan.

    Args:
        releases: Everything that a round discloses.
        plan: The outline of the run.
        delta: The delta of every guarantee.
        accountant: "best" uses privacy loss distributions wherever they are valid and Renyi divergences otherwise;
            "rdp" forces the latter (published numbers are often Renyi numbers).
        ends: See `account_rounds`.

    Returns:
        One row for each unit and adversary that the releases name.

    Guarantees:
        Epsilon agrees with two other accountants (`test_sampled_gaussians_match_the_table_and_two_other_libraries`).
        One release without protection leaves nothing proven (`test_one_unprotected_release_spoils_all_others`).
    """
    return account_rounds(rounds_of(releases, plan), delta, accountant, _pairs(releases), ends)


def account_participation(releases: Sequence[Release], plan: Plan, delta: float) -> tuple[Guarantee, ...]:
    """The guarantee for one round, given that the client participated and the adversary knows it ("one upload").

    Where rounds have different releases, it is the largest epsilon of them.
    """
    kinds = list(rounds_of([replace(r, participation="charged") for r in releases], plan))

    def dearest(unit: Unit, adversary: Adversary) -> Guarantee:
        seen = [kind for kind in kinds if any(adversary in r.visible_to for r in kind.releases)]
        counted = [Counter([kind]) for kind in seen] or [Counter(kinds)]
        rows = [_guarantee(rounds, delta, unit, adversary, "best") for rounds in counted]
        return max(rows, key=lambda row: math.inf if row.epsilon is None else row.epsilon)

    return tuple(dearest(unit, adversary) for unit, adversary in _pairs(releases))


def account_rounds(
    rounds: Rounds,
    delta: float,
    accountant: Accountant = "best",
    pairs: Sequence[tuple[Unit, Adversary]] | None = None,
    ends: int = 1,
) -> tuple[Guarantee, ...]:
    """The guarantees of any collection of rounds, including rounds of several runs on the same data.

    Where released models decided after which of `ends` rounds a run ended, epsilon of the rounds that ran is itself an
    output. Each end gets delta / ends: the outputs that end there are an event of the rounds until then, so over all
    ends the failure probability is at most delta (`test_no_rule_of_stopping_exceeds_the_stated_delta`).
    """
    if not 0 < delta < 1:
        raise InputError("delta", delta, "is not a probability", "Use a number in (0, 1), such as 1e-5.")
    if pairs is None:
        pairs = named_pairs(rounds)
    found = (_guarantee(rounds, delta / ends, unit, adversary, accountant) for unit, adversary in pairs)
    return tuple(replace(row, delta=delta, ends=ends) for row in found)


def epsilon_of(
    releases: Sequence[Release], plan: Plan, delta: float, adversary: Adversary, unit: Unit
) -> float | None:
    """The epsilon of one (unit, adversary), None where nothing is proven.

    Args:
        releases: Everything that a round discloses.
        plan: The outline of the run.
        delta: The delta of the guarantee.
        adversary: The adversary of the guarantee.
        unit: The unit that is protected.

    Returns:
        Epsilon over all rounds.

    Guarantees:
        Those of `account` (`test_one_unprotected_release_spoils_all_others`).
    """
    return _guarantee(rounds_of(releases, plan), delta, unit, adversary, "best").epsilon


def epsilon_by_round(
    releases: Sequence[Release], plan: Plan, delta: float, points: int = 24
) -> dict[tuple[Unit, Adversary], list[tuple[int, float | None]]]:
    """Epsilon after a number of rounds, at up to `points` rounds evenly spread over the plan."""
    steps = sorted({max(1, round(plan.rounds * i / points)) for i in range(1, points + 1)} | {plan.rounds})
    return {
        (unit, adversary): [
            (t, _guarantee(rounds_of(releases, plan, t), delta, unit, adversary, "best").epsilon)
            for t in steps
            if t
        ]
        for unit, adversary in _pairs(releases)
    }


def last_that_fits(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from `low` to `high` for which `fits` is true, by bisection; `fits` is monotone."""
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _pairs(releases: Iterable[Release]) -> list[tuple[Unit, Adversary]]:
    """The (unit, adversary) rows: the units that releases name, and every adversary.

    Unprotected and post-processed releases define a unit only if no other release does.
    """
    listed = list(releases)
    priced = {r.unit for r in listed if not isinstance(r.protection, (Unprotected, PostProcessing))}
    units = priced or {r.unit for r in listed}
    return [(unit, adversary) for unit in UNITS if unit in units for adversary in ADVERSARIES]


def named_pairs(rounds: Rounds) -> list[tuple[Unit, Adversary]]:
    """The rows that a statement about these rounds has."""
    return _pairs(release for round_ in rounds for release in round_.releases)


def _sampler_words(rounds: Iterable[Round], releases: Sequence[Release], unit: Unit) -> str:
    clients = " + ".join(sorted({r.cohort.sampler for r in rounds})) or "none"
    if unit == "record" and any(r.rate < 1 or (r.first_rate or 1) < 1 for r in releases):
        return f"{clients} clients, poisson records"
    return clients


def _visible(rounds: Rounds, adversary: Adversary) -> Rounds:
    """The rounds restricted to releases visible to this adversary."""
    visible: Rounds = Counter()
    for round_, count in rounds.items():
        kept = tuple(r for r in round_.releases if adversary in r.visible_to)
        if kept:
            visible[Round(kept, round_.cohort)] += count
    return visible


def renyi_curve(rounds: Rounds, unit: Unit, adversary: Adversary) -> RenyiCurve:
    """The Renyi divergences of these rounds, for theorems that are stated in terms of them.

    Raises:
        InputError: Nothing is proven for this unit and adversary, or only up to a failure probability.
    """
    row = _guarantee(rounds, 0.5, unit, adversary, "rdp")
    visible, split = _visible(rounds, adversary), adversary == "client"
    costly = {round_: n for round_, n in visible.items() if any(r.costs for r in round_.releases)}
    if row.epsilon is None or not costly:
        reason = row.reason or "everything is computed from other releases"
        raise InputError(
            "method", adversary, f"has no Renyi curve: {reason}", "Choose a method with a proof."
        )
    how = (unit, _adjacency(visible, unit, True, split), True, True)
    price = _price_to_a_client if split else _price
    steps = [(price(round_, *how)[0], count) for round_, count in costly.items()]
    orders, values, failure = loss.renyi_curve(steps)
    if failure > 0:
        raise InputError(
            "method",
            adversary,
            f"its mechanisms may fail with probability {failure:g}",
            "Use Gaussian noise.",
        )
    kept = [(a, float(value)) for a, value in zip(orders, values, strict=True) if math.isfinite(value)]
    return RenyiCurve(tuple(a for a, _ in kept), tuple(value for _, value in kept))


def _guarantee(
    rounds: Rounds, delta: float, unit: Unit, adversary: Adversary, accountant: Accountant
) -> Guarantee:
    """One row, with the assumptions of its releases."""
    row = _priced(rounds, delta, unit, adversary, accountant)
    visible = [r for round_ in _visible(rounds, adversary) for r in round_.releases]
    return replace(row, assumptions=tuple(dict.fromkeys(text for r in visible for text in r.assumptions)))


def _priced(
    rounds: Rounds, delta: float, unit: Unit, adversary: Adversary, accountant: Accountant
) -> Guarantee:
    visible = _visible(rounds, adversary)
    releases = list({r: None for round_ in visible for r in round_.releases})
    costly = [r for r in releases if r.costs]
    sampler = _sampler_words(visible or rounds, costly, unit)
    adjacency: Adjacency = "add-remove" if unit == "record" else "zero-out"

    def none(reason: str) -> Guarantee:
        return Guarantee(unit, adversary, adjacency, sampler, None, delta, "none", reason)

    if not releases:
        return none("no release to this adversary is declared, so nothing is claimed")
    against = [(r.what, p) for r in costly for p in _protections(r, adversary)]
    reasons = [f"{what}: {p.reason}" for what, p in against if isinstance(p, Unprotected)]
    if reasons:
        return none("; ".join(dict.fromkeys(reasons)))
    foreign = [r.what for r in costly if r.unit != unit]
    if foreign:
        return none(
            f"protected for another unit, which gives no guarantee for this one: {', '.join(foreign)}"
        )
    if not costly:
        return Guarantee(unit, adversary, adjacency, sampler, 0.0, delta, "post-processing")

    only_renyi = any(isinstance(p, (ZeroConcentratedDP, RenyiCurve)) for _, p in against)
    renyi = accountant == "rdp" or only_renyi or delta < loss.SMALLEST_PLD_DELTA
    split = adversary == "client"
    adjacency = _adjacency(visible, unit, renyi, split)
    epsilon, theorems = _composed(visible, delta, unit, adjacency, renyi, split, fixed_is_seen=renyi)
    fixed = any(r.cohort.sampler == "fixed" for r in visible)
    if fixed and unit == "client" and adjacency == "zero-out" and not renyi:
        other = _composed(visible, delta, unit, adjacency, renyi, split, fixed_is_seen=True)
        epsilon, theorems = min((epsilon, theorems), other)
    how = "Renyi divergence, converted by Balle et al. 2020" if renyi else "privacy loss distribution"
    if not math.isfinite(epsilon):
        return none(
            f"no finite epsilon holds at delta {delta:g}: the noise is too small, or the mechanisms' failure "
            "probability is larger than delta"
        )
    return Guarantee(unit, adversary, adjacency, sampler, epsilon, delta, f"{how}: {'; '.join(theorems)}")


def _protections(release: Release, adversary: Adversary) -> tuple[Protection, ...]:
    """Every protection of a release against this adversary, as a participant or not."""
    if adversary != "client" or release.insider is None:
        return (release.protection,)
    return release.protection, release.insider


def _composed(
    rounds: Rounds,
    delta: float,
    unit: Unit,
    adjacency: Adjacency,
    renyi: bool,
    split: bool,
    fixed_is_seen: bool,
) -> tuple[float, tuple[str, ...]]:
    """Epsilon of the rounds, and the theorems used; `split`: the adversary is a client that participates in some."""
    price = _price_to_a_client if split else _price
    steps: Counter[Step] = Counter()
    theorems: dict[str, None] = {}
    for round_, count in rounds.items():
        if any(r.costs for r in round_.releases):
            step, theorem = price(round_, unit, adjacency, renyi, fixed_is_seen)
            steps[step] += count
            theorems[theorem] = None
    return loss.epsilon(steps, delta, renyi), tuple(theorems)


def _adjacency(rounds: Iterable[Round], unit: Unit, renyi: bool, split: bool) -> Adjacency:
    """The one adjacency under which all rounds can be composed: the stated one, or the natural one."""
    costly = [round_ for round_ in rounds if any(r.costs for r in round_.releases)]
    stated = {r.adjacency for round_ in costly for r in round_.releases if r.costs} - {None}
    if len(stated) > 1:
        raise InputError("adjacency", stated, "one guarantee has one adjacency", "State the same everywhere.")
    if unit == "record":
        return next(iter(stated), None) or "add-remove"
    natural = {_amplification(round_, renyi) for round_ in costly}
    if split and any(_discloses_size(round_) for round_ in costly):
        natural.add(None)
    if natural == {"add-remove"}:
        possible: tuple[Adjacency, ...] = ("add-remove", "zero-out", "replace-one")
    elif None not in natural:
        possible = ("replace-one", "zero-out")
    else:
        possible = ("zero-out", "replace-one")
    chosen = next(iter(stated), None) or possible[0]
    if chosen not in possible:
        raise InputError(
            "adjacency",
            chosen,
            "cannot be proven: participation is visible, or the cohort has a fixed size",
            f"Use {' or '.join(possible)}, or leave it out.",
        )
    return chosen


def _amplification(round_: Round, renyi: bool) -> Adjacency | None:
    """The adjacency under which sampling of the hidden cohort amplifies privacy; None where no theorem applies."""
    costly = [r for r in round_.releases if r.costs]
    sampler = round_.cohort.sampler
    if round_.cohort.rate == 1 or any(r.participation != "hidden" for r in costly):
        return None
    if all(isinstance(r.protection, GaussianNoise) for r in costly):
        if sampler == "poisson":
            return "add-remove"
        return None if renyi else "replace-one"
    single = len(costly) == 1 and costly[0].accesses == 1
    if single and isinstance(costly[0].protection, LaplaceNoise) and sampler == "poisson":
        return "add-remove"
    return None


def _discloses_size(round_: Round) -> bool:
    """Whether participants learn the size of a Poisson cohort, which depends on every client's participation."""
    return round_.cohort.sampler == "poisson" and any(r.insider is not None for r in round_.releases)


def _price_to_a_client(
    round_: Round, unit: Unit, adjacency: Adjacency, renyi: bool, fixed_is_seen: bool
) -> tuple[Step, str]:
    """The round against a client, which knows whether it participated: a mixture of the two cases."""
    releases, cohort = round_.releases, round_.cohort
    knows = any(r.insider is not None for r in releases)
    hidden = unit == "client" and any(r.participation == "hidden" for r in releases if r.costs)
    if not knows and not (hidden and cohort.sampler == "fixed"):
        return _price(round_, unit, adjacency, renyi, fixed_is_seen)
    inside = tuple(replace(r, protection=r.insider or r.protection, insider=None) for r in releases)
    outside = tuple(replace(r, insider=None) for r in releases)
    how = (unit, adjacency, renyi, fixed_is_seen)
    if cohort.rate == 1 or any(r.participation == "charged" for r in releases if r.costs):
        return _price(Round(inside, cohort), *how)
    if cohort.sampler == "fixed":
        others = replace(cohort, clients=cohort.clients - 1)
        step, theorem = _price(Round(outside, others), *how)
        if cohort.cohort == 1:  # it is the only participant of its rounds
            return replace(step, weight=1 - cohort.rate), theorem
        inside_step, _ = _price(Round(inside, replace(others, cohort=cohort.cohort - 1)), *how)
        return replace(inside_step, weight=cohort.rate, otherwise=step), theorem
    step, theorem = _price(Round(outside, cohort), *how)
    seen = tuple(replace(r, participation="seen") for r in inside)
    inside_step, with_it = _price(Round(seen, cohort), *how)
    theorems = theorem if with_it == theorem else f"{theorem}, {with_it} in its own rounds"
    return replace(inside_step, weight=cohort.rate, otherwise=step), theorems


def _price(
    round_: Round, unit: Unit, adjacency: Adjacency, renyi: bool, fixed_is_seen: bool
) -> tuple[Step, str]:
    """One round as a step of the composition, and the theorem that allows it."""
    costly = [r for r in round_.releases if r.costs]
    cohort = round_.cohort
    amplification = _amplification(round_, renyi) if unit == "client" else None
    if amplification == "add-remove":
        bundle = Bundle.of([part for r in costly for part in _parts(r)], adjacency)
        ((protection, _, _),) = bundle.parts  # all Gaussian releases of a round are one vector query
        step = Step(Bundle.of([(protection, cohort.rate, 1)], adjacency))
        kind = "Gaussian" if isinstance(protection, GaussianNoise) else "Laplace"
        return step, f"Poisson-subsampled {kind} mechanism"
    if amplification == "replace-one" and not fixed_is_seen:
        bundle = Bundle.of([part for r in costly for part in _parts(r)], adjacency)
        step = Step(bundle, fixed_cohort=(cohort.clients, cohort.cohort))
        return step, "truncated subsampled Gaussian bound (cohorts without replacement, sensitivity 2C)"
    bundle = Bundle.of([part for r in costly for part in _parts(r)], adjacency)
    records = " of Poisson-sampled batches" if any(rate < 1 for _, rate, _ in bundle.parts) else ""
    charged = any(r.participation == "charged" for r in costly)
    if charged or cohort.rate == 1:
        return Step(bundle), f"adaptive composition{records}, every round charged"
    return Step(bundle, seen_rate=cohort.rate), f"mixture over seen participation{records}"


def _parts(release: Release) -> list[Part]:
    first = release.first_rate
    if first is None or first == release.rate:
        return [(release.protection, release.rate, release.accesses)]
    rest: list[Part] = [(release.protection, release.rate, release.accesses - 1)]
    return [(release.protection, first, 1), *(rest if release.accesses > 1 else [])]
