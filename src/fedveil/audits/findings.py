"""What an audit reports: a lower bound on epsilon that holds with a stated confidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AuditFinding:
    """With probability `confidence` over the audit's own randomness, epsilon is at least `lower_bound`.

    `estimate` is a best guess that may exceed the truth; it is never a bound, and `estimate_note` says why.
    """

    kind: str
    lower_bound: float
    confidence: float
    samples: int
    delta: float
    estimate: float | None = None
    estimate_note: str = ""

    def contradicts(self, proven: float | None) -> bool:
        """Whether the mechanism leaks more than was proven: then mechanism or proof is broken."""
        return proven is not None and self.lower_bound > proven

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
        return text
