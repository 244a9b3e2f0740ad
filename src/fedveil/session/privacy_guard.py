"""Charges every round to the privacy ledger before it starts, and stops before the budget is exceeded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedveil.errors import InputError, LedgerError
from fedveil.methods.method import AnyMethod, At
from fedveil.privacy.accounting import Rounds, account, account_rounds, rounds_of
from fedveil.privacy.ledger import Budget, BudgetKeeper, Ledger
from fedveil.privacy.releases import Plan, PostProcessing, Release, Unit, Unprotected
from fedveil.privacy.statement import PrivacyStatement
from fedveil.session.loop import Callback, RoundEnd
from fedveil.session.options import PrivacySettings
from fedveil.streams import NoiseSource

_POINTS = 10  # number of rounds for which epsilon is shown; computing it every round would take too long


def unit_of(method: AnyMethod, plan: Plan) -> Unit:
    """The unit that this method protects; if it protects none, records if all its releases are about records."""
    releases = method.releases(plan)
    for release in releases:
        if not isinstance(release.protection, Unprotected) and release.costs:
            return release.unit
    stated = {release.unit for release in releases}
    return "record" if stated == {"record"} else "client"


def is_private(method: AnyMethod, plan: Plan) -> bool:
    """Whether any release of this method is protected, so that its noise and sampling must be secret."""
    return any(not isinstance(r.protection, Unprotected | PostProcessing) for r in method.releases(plan))


def noise_for(method: AnyMethod, plan: Plan, asked: NoiseSource | None, *, own_data: bool) -> NoiseSource:
    """The source of a simulation's privacy noise and cohorts.

    By default entropy for the user's own data and the seed for public benchmarks. A method that protects nothing has
    no secret noise: it is always seeded, so that its runs are reproducible.
    """
    if not is_private(method, plan):
        return "seeded"
    return asked or ("entropy" if own_data else "seeded")


def declared(method: AnyMethod, plan: Plan, *, deployed: bool) -> tuple[Release, ...]:
    """The method's releases; with deployed nodes, which may refuse to answer, participation counts as visible.

    A deployed node refuses cohorts below its policy's minimum, and rounds beyond its limits. So the other clients'
    uploads depend on the size of this cohort, where it is disclosed, and on earlier cohorts: a sum then does not hide
    participation. Only Poisson cohorts of unknown size are independent of one another.
    """
    releases = tuple(method.releases(plan))
    if not deployed:
        return releases

    def disclosed(release: Release) -> bool:
        disclosed = plan.sampler == "fixed" or release.insider is not None
        return disclosed and release.unit == "client" and release.participation == "hidden"

    return tuple(replace(r, participation="seen") if disclosed(r) else r for r in releases)


def privacy_statement(
    method: AnyMethod,
    plan: Plan,
    delta: float,
    *,
    noise: NoiseSource = "entropy",
    deployed: bool = False,
    ends: int = 1,
) -> PrivacyStatement:
    """State the claims and guarantees of a run of this plan.

    Args:
        method: The method with its fields.
        plan: The outline of the run.
        delta: The delta of every guarantee.
        noise: The source of privacy noise; noise from a seed can be removed by whoever knows the seed.
        deployed: Whether clients are nodes with their own policies, which may refuse.
        ends: The number of rounds after which the run may end, if released models decide that.

    Returns:
        The paper's claim and the guarantees for each unit and adversary.

    Guarantees:
        An unprotected release has no finite epsilon
        (`test_an_unprotected_method_proves_nothing_and_states_the_reason`).
    """
    releases = declared(method, plan, deployed=deployed)
    claim = method.paper_claim(plan)
    proven = account(releases, plan, delta, ends=ends)
    removable = noise == "seeded" and is_private(method, plan)
    return PrivacyStatement(claim or "none", proven, None, releases, plan, noise, removable)


class PrivacyGuard(Callback):
    def __init__(
        self,
        method: AnyMethod,
        plan: Plan,
        settings: PrivacySettings,
        run: str,
        ledger: Path | None,
        *,
        noise: NoiseSource = "seeded",
        deployed: bool = False,
    ) -> None:
        self._method = method
        self._plan = plan
        self._settings = settings
        self._run = run
        self._noise: NoiseSource = noise
        self._deployed = deployed
        self._releases = declared(method, plan, deployed=deployed)
        self._replay_safe = noise == "seeded"
        self._ledger = None if ledger is None else Ledger(ledger)
        self._keeper: BudgetKeeper | None = None
        unit = settings.budget_unit or unit_of(method, plan)
        adversary = settings.budget_adversary
        self._pair = unit, adversary
        if settings.budget is None:
            return
        if self._ledger is None:
            raise InputError(
                "privacy.budget",
                settings.budget,
                "a budget needs a ledger",
                "Give a results folder or ledger.",
            )
        one = account(self._releases, replace(plan, rounds=1), settings.share)
        row = next((r for r in one if r.adversary == adversary and r.unit == unit), None)
        if row is None or row.epsilon is None:
            reason = row.reason if row is not None else f"nothing is stated for the unit {unit!r}"
            raise InputError(
                "privacy.budget",
                settings.budget,
                f"{method.name} proves no epsilon against the {adversary}: {reason}",
                "Choose a method or fields with a proof, or leave the budget out.",
            )
        budget = Budget(settings.budget, settings.share, adversary, unit)
        self._keeper = BudgetKeeper(budget, self._ledger, run, self._releases, plan)

    @property
    def ledger_path(self) -> Path | None:
        return None if self._ledger is None else self._ledger.path

    def require_charged(self, rounds: int) -> None:
        """Refuse to resume after so many rounds if one is missing from the ledger, which would understate epsilon."""
        if self._ledger is None:
            return
        for number in range(rounds + 1):
            due = any(release.happens_in(number) for release in self._releases)
            if due and not self._ledger.is_charged(self._run, number):
                raise LedgerError(
                    f"{self._ledger.path}: round {number} of {rounds} was run but is not on this privacy ledger. "
                    "Restore the ledger from a copy, or remove the results and treat their releases as spent.",
                    field="round",
                    value=number,
                )

    def round_starts(self, at: At, cohort: Sequence[int]) -> str | None:
        if self._keeper is not None:
            if self._keeper.charge(at.round, replay_safe=self._replay_safe):
                return None
            budget = self._keeper.budget
            return (
                f"the privacy budget of epsilon {budget.epsilon:g} (delta {self._settings.delta:g}, "
                f"{budget.unit} level, against the {budget.adversary}) does not allow round {at.round}"
            )
        if self._ledger is not None:
            self._ledger.charge(
                self._run, at.round, self._releases, self._plan, replay_safe=self._replay_safe
            )
        return None

    def charge_start(self) -> None:
        """Charge the releases before the first round.

        Raises:
            InputError: The budget does not allow it; nothing is charged.
        """
        refusal = self.round_starts(At(self._plan, 0), ())
        if refusal is not None:
            budget = self._settings.budget
            raise InputError("privacy.budget", budget, refusal, "Give a larger budget, or more noise.")

    def round_ends(self, end: RoundEnd) -> None:
        step = max(1, self._plan.rounds // _POINTS)
        if end.at.round % step == 0 or end.at.round == 1 or end.last:
            end.metrics["epsilon"] = self._epsilon_after(end.at.round)

    def _epsilon_after(self, round_: int) -> float | None:
        # Rounds that are repeated with the same noise count up to this one, so that a resumed run has the same numbers.
        charged: Rounds = Counter() if self._replay_safe else self._charged()
        disclosed = charged or rounds_of(self._releases, self._plan, round_)
        if not disclosed:
            return 0.0
        (row,) = account_rounds(disclosed, self._settings.share, pairs=[self._pair])
        return row.epsilon

    def _charged(self) -> Rounds:
        """All charged attempts of this run."""
        return Counter() if self._ledger is None else self._ledger.rounds(self._run)

    def released_in_words(self, rounds: int) -> str:
        """The releases of the completed rounds of a run that ended early, one line or more."""
        if rounds == 0:
            return "No round was completed. The ledger has what was charged before: a started round counts.\n"
        return f"After {rounds} completed rounds:\n{self.statement(rounds).in_words()}\n"

    def statement(self, rounds: int, answered: int | None = None) -> PrivacyStatement:
        """The statement of everything that this run was charged for; without a ledger, of the rounds that were run.

        If the actual noise depends on `answered`, the smallest number of clients that answered in a completed round,
        rows state it.
        """
        found = self._of_rounds(rounds)
        noise = None if answered is None else self._method.noise_found(self._plan, answered)
        if noise is None:
            return found
        return replace(
            found, proven=tuple(replace(row, assumptions=(*row.assumptions, noise)) for row in found.proven)
        )

    def _of_rounds(self, rounds: int) -> PrivacyStatement:
        delta, ends = self._settings.delta, self._settings.ends
        plan = replace(self._plan, rounds=rounds) if rounds else self._plan
        plain = privacy_statement(
            self._method, plan, delta, noise=self._noise, deployed=self._deployed, ends=ends
        )
        plain = replace(plain, notes=self._settings.notes, rows_per_person=self._settings.rows_per_person)
        charged = self._charged()
        if charged:
            pairs = [(row.unit, row.adversary) for row in plain.proven]
            return replace(plain, proven=account_rounds(charged, delta, pairs=pairs, ends=ends))
        return plain if rounds else replace(plain, proven=())
