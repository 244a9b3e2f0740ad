"""The finding of an audit: a lower bound on epsilon with a stated confidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ALARM = 1e-3
"""The largest probability that an audit calls a correct mechanism broken; far below that of a 95 % bound."""


@dataclass(frozen=True)
class AuditFinding:
    """With probability `confidence` over the audit's own randomness, epsilon is at least `lower_bound`.

    `estimate` is a point estimate that may exceed the true epsilon; it is not a bound, for the reason `estimate_note`.
    `p_value` bounds the probability of such observations under the declared mechanism. It detects broken
    mechanisms where the bound cannot: n samples never give a bound above log n.
    `sure_bound` is the lower bound that holds with probability 1 - `ALARM`; only it can refute a proof.
    """

    kind: str
    lower_bound: float
    confidence: float
    samples: int
    delta: float
    estimate: float | None = None
    estimate_note: str = ""
    p_value: float | None = None
    sure_bound: float | None = None

    def contradicts(self, proven: float | None) -> bool:
        """Whether epsilon exceeds the proven one, so that the mechanism or the proof is broken."""
        bound = self.lower_bound if self.sure_bound is None else self.sure_bound
        return proven is not None and bound > proven

    def broken(self, proven: float | None) -> bool:
        """Whether the audit refutes the mechanism: its proven epsilon, or that it is the declared one."""
        undeclared = self.p_value is not None and self.p_value < ALARM
        return self.contradicts(proven) or undeclared

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "kind": self.kind,
            "lower_bound": self.lower_bound,
            "confidence": self.confidence,
            "samples": self.samples,
            "delta": self.delta,
        }
        if self.estimate is not None:
            row |= {"estimate": self.estimate, "estimate_note": self.estimate_note}
        if self.p_value is not None:
            row["p_value"] = self.p_value
        return row

    def in_words(self, proven: float | None = None) -> str:
        text = (
            f"{self.kind}: epsilon is at least {self.lower_bound:.2f} with {self.confidence:.0%} confidence "
            f"({self.samples} samples, delta {self.delta:g})."
        )
        if self.estimate is not None:
            text += f" Estimate, not a bound: {self.estimate:.2f} ({self.estimate_note})."
        if self.contradicts(proven):
            text += f" BROKEN: {proven:.2f} was claimed to be proven."
        elif self.broken(proven):
            text += f" BROKEN: this is not the mechanism that was declared (p = {self.p_value:.1g})."
        return text
