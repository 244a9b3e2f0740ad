"""The privacy statement of a run: the paper's claim, what is proven, and audit results, kept apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fedveil.data.notes import STOPPING_NOTE
from fedveil.privacy.accounting import Guarantee
from fedveil.privacy.meaning import (
    NEARLY_CERTAIN,
    exposes_one,
    fewest_records,
    grade,
    guess_accuracy,
    plain,
    rounded_up,
    sampler_in_words,
)
from fedveil.privacy.releases import ADVERSARIES, Adversary, Plan, PostProcessing, Release, Unprotected
from fedveil.streams import NoiseSource

_WHO: dict[Adversary, str] = {
    "server": "the server",
    "observer": "an observer of the published results",
    "client": "another participant",
}
_NEIGHBOUR = {
    "add-remove": "being in the data or not",
    "replace-one": "being exchanged for another",
    "zero-out": "taking part with one's own contribution or with an empty one",
}
NO_AUDIT = "No audit has tested this run."
SEEDED = (
    "The privacy noise of this run comes from its seed: whoever knows the seed can remove the noise, so the model must "
    'not be published. What is proven below holds only against those who do not know the seed; run.noise = "entropy" '
    "draws noise that nobody can remove."
)


def show(value: float) -> str:
    """A number to four digits, as in the tables."""
    return f"{value:.1f}" if 100 <= value < 1e7 else f"{value:.4g}"


@dataclass(frozen=True)
class PrivacyStatement:
    """The paper's claim, the proven guarantees and the audit of a run; none of them replaces another.

    `paper_claim` is the paper's own number or "none"; `proven` follows from theorems for this run; `audit` is what an
    attack measured, None if none ran. `releases` and `plan` describe what is visible to whom.
    """

    paper_claim: str | float
    proven: tuple[Guarantee, ...]
    audit: Mapping[str, Any] | None = None
    releases: tuple[Release, ...] = ()
    plan: Plan | None = None
    noise: NoiseSource = "entropy"
    removable: bool = False
    """Whether the noise can be reproduced from the run's seed."""
    notes: tuple[str, ...] = ()
    """Notes on data preparation that affect privacy."""
    rows_per_person: int | None = None
    """The largest number of records of one person, where the data identifies persons."""

    def to_json(self) -> dict[str, Any]:
        return {
            "paper_claim": self.paper_claim,
            "proven": [row.to_json() for row in self.proven],
            "audit": None if self.audit is None else dict(self.audit),
            "noise": self.noise,
            "removable": self.removable,
        } | ({"data": list(self.notes), "persons": self.persons()} if self.notes else {})

    def persons(self) -> list[dict[str, Any]]:
        """The guarantees for a whole person, by group privacy over the records that a person may have.

        Guarantees: k records of an (epsilon, delta) guarantee have (k epsilon, k e^((k-1) epsilon) delta)
        (`test_group_privacy_is_the_bound_for_a_person`).
        """
        count = self.rows_per_person
        if count is None:
            return []
        return [
            {
                "adversary": row.adversary,
                "epsilon": count * row.epsilon,
                "delta": min(1.0, count * math.exp(min(700.0, (count - 1) * row.epsilon)) * row.delta),
            }
            for row in self.proven
            if row.unit == "record" and row.epsilon is not None
        ]

    def in_words(self) -> str:
        """The statement in words for a privacy officer: what is protected, against whom, and what is not."""
        lines = [SEEDED, ""] if self.removable else []
        lines += [_claim(self.paper_claim), ""]
        for adversary in ADVERSARIES:
            rows = [row for row in self.proven if row.adversary == adversary]
            if rows:
                lines += [*_against(adversary, rows, self.releases, self.plan), ""]
        if self.notes:
            lines += [*_prepared(self), ""]
        prepared = any(note != STOPPING_NOTE for note in self.notes)
        lines += _not_covered(self.proven, self.plan, has_notes=prepared)
        lines.append(_audited(self.audit))
        return "\n".join(lines)


def _prepared(statement: PrivacyStatement) -> list[str]:
    """How the data was prepared, and the guarantees for persons with several records."""
    lines = ["The data:", *(f"  {note}" for note in statement.notes)]
    for row in statement.persons() if (statement.rows_per_person or 1) > 1 else ():
        bound = f"epsilon is {show(row['epsilon'])} at delta {row['delta']:.2g}"
        whom = _WHO[row["adversary"]]
        lines.append(f"  For a person with all these rows, against {whom} {bound} (group privacy).")
    return lines


def _claim(claim: str | float) -> str:
    if claim == "none":
        return "The paper states no epsilon for this setting."
    return f"The paper states: {claim}. That is the paper's claim, not a result of this accounting."


def _against(
    adversary: Adversary, rows: Sequence[Guarantee], releases: Sequence[Release], plan: Plan | None
) -> list[str]:
    who = _WHO[adversary]
    seen = [r for r in releases if adversary in r.visible_to and not isinstance(r.protection, PostProcessing)]
    lines = [f"Against {who}:"]
    sentences: dict[str, None] = {}  # a release declared for records and for clients is listed once
    for release in seen:
        times = f", {release.accesses} times in a participation" if release.accesses > 1 else ""
        how = f" with {release.protection.in_words()}{times}"
        if adversary == "client" and release.insider is not None:
            how += (
                f" (in its own rounds, where it knows its share of the noise: {release.insider.in_words()})"
            )
        rounds = f" in every {release.every}th round" if release.every > 1 else ""
        sees = f"{who} sees {release.what}"
        if adversary != "server" and isinstance(release.protection, Unprotected):
            sees = f"what is visible to {who} is computed from {release.what}"
        sentences[f"  {sees[0].upper()}{sees[1:]}{how}{rounds}{_who_took_part(release)}."] = None
    lines += sentences
    for row in rows:
        whom = "one client's whole data" if row.unit == "client" else "a single record"
        if row.epsilon is None:
            lines.append(f"  Nothing is proven for {whom}: {row.reason}.")
            continue
        lines.append(
            f"  For {whom}, against {who} epsilon is {show(row.epsilon)} at delta {row.delta:g}{_shared(row)} "
            f"({_NEIGHBOUR[row.adjacency]}; {sampler_in_words(row.sampler)}). {_meaning(row, row.epsilon, plan)}"
        )
        lines.append(f"  Proof: {plain(row.theorem)}.")
    lines += dict.fromkeys(f"  Assumption, {text}." for row in rows for text in row.assumptions)
    return lines


def _shared(row: Guarantee) -> str:
    return f", divided among the {row.ends} rounds after which training could end" if row.ends > 1 else ""


def _who_took_part(release: Release) -> str:
    if isinstance(release.protection, Unprotected) or release.participation == "charged":
        return ""
    return ", and who took part" if release.participation == "seen" else ", but not who took part"


_GUESS = {
    ("client", "add-remove"): "whether a given client's data was used",
    ("client", "zero-out"): "whether a given client contributed its data",
    ("client", "replace-one"): "which of two given clients took part",
    ("record", "add-remove"): "whether a given record was used",
    ("record", "zero-out"): "whether a given record was used",
    ("record", "replace-one"): "which of two given records was used",
}
SEES = {
    "server": "Whoever runs the server",
    "observer": "Whoever sees the published model",
    "client": "Another participant",
}


def odds_in_words(adversary: str, unit: str, adjacency: str, epsilon: float, delta: float) -> str:
    """One sentence with odds: a bound on the best attack of this adversary."""
    question = _GUESS.get((unit, adjacency), f"whether a given {unit} took part")
    who, bound = SEES.get(adversary, adversary), guess_accuracy(epsilon, delta)
    if bound > NEARLY_CERTAIN:
        return f"{who} may become certain {question}: the bound on a right guess is {rounded_up(bound)}."
    return f"{who} can raise a 50 % chance of guessing right {question} to at most {rounded_up(bound)}."


def _meaning(row: Guarantee, epsilon: float, plan: Plan | None) -> str:
    units = 1 if plan is None else plan.clients
    if plan is not None and row.unit == "record":
        units = fewest_records(plan.clients, plan.records_per_client, plan.largest_client)
    said = grade(epsilon, row.delta, units).word
    if epsilon <= 10 and exposes_one(row.delta, units):
        return (
            f"Delta is too large for this to be called protection: with {units} {row.unit}s it would permit "
            "publishing one of them completely."
        )
    odds = odds_in_words(row.adversary, row.unit, row.adjacency, epsilon, row.delta)
    return f"This is {said}. {odds}"


def _not_covered(rows: Sequence[Guarantee], plan: Plan | None, *, has_notes: bool) -> list[str]:
    lines = ["Not covered:"]
    units = {row.unit for row in rows}
    if units == {"record"}:
        lines.append(
            "  Only single records are protected; a client's participation and its data as a whole are not."
        )
    if any(row.unit == "record" and row.epsilon is not None for row in rows):
        lines.append(
            "  How many records each client holds counts as public, and so do the classes that the labels of "
            "synthetic images name."
        )
        lines.append(
            "  Which client holds a record, and whether it is used for training, counts as settled beforehand: a "
            "random split that comes out differently for the others without this record is not covered."
        )
    if "client" in units and any(row.adjacency == "zero-out" for row in rows):
        lines.append(
            "  Where participation is visible, the fact that somebody participated is not protected."
        )
    if needs_trust(rows):
        lines.append(
            "  The rows for adversaries other than the server hold only if the server is trusted not to share what "
            "it observes."
        )
    if any(row.adversary != "server" and row.epsilon is not None for row in rows):
        lines.append(
            "  These rows are about the models. The run's other files (scores of single clients, also on training "
            "examples, label counts, cohort sizes, transcripts, attacks) and the report on them are not covered: "
            "do not publish them with a model of real data."
        )
    if plan is not None:
        sizes = f"{plan.clients} clients, {plan.cohort} in a round, {plan.rounds} rounds"
        prepared = (
            ""
            if has_notes
            else ", and how examples are prepared (the numbers a table is standardised with, its categories)"
        )
        lines.append(
            f"  The number of clients, the plan ({sizes}), the model's shape and its initial weights{prepared} count "
            "as public."
        )
    return lines


class _Row(Protocol):
    @property
    def unit(self) -> str: ...
    @property
    def adversary(self) -> str: ...
    @property
    def adjacency(self) -> str: ...
    @property
    def epsilon(self) -> float | None: ...


def needs_trust(rows: Sequence[_Row]) -> bool:
    """Whether a row depends on a trusted server: the row against the server proves less, or of other neighbours."""
    server = {row.unit: row for row in rows if row.adversary == "server"}

    def weaker(row: _Row) -> bool:
        known = server.get(row.unit)
        if row.epsilon is None or known is None or known.epsilon is None:
            return row.epsilon is not None
        return known.epsilon > row.epsilon or known.adjacency != row.adjacency

    return any(row.adversary != "server" and weaker(row) for row in rows)


def _audited(audit: Mapping[str, Any] | None) -> str:
    if audit is None:
        return NO_AUDIT
    bound, others = float(audit["lower_bound"]), len(audit.get("all", ())) - 1
    chosen = f", the largest of {others + 1} bounds that each have this confidence" if others > 0 else ""
    return (
        f"An audit showed with {float(audit['confidence']):.0%} confidence that epsilon is at least "
        f"{show(bound)} ({audit['samples']} samples{chosen}). A low value does not prove privacy."
    )
