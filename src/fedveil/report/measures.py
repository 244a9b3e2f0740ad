"""Measures of runs: accuracy, or its counterpart for regression, survival and text models."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A measure of a model on the test set.

    `key` is its name in a run's files, `span` what its values can be, and `guess` what a model that knows nothing about
    the examples reaches; None where that depends on the data.
    """

    key: str
    name: str
    span: tuple[float, float]
    guess: float | None = None
    guessing: str = ""
    higher: bool = True

    @property
    def percent(self) -> bool:
        return self.key == "accuracy"

    @property
    def factor(self) -> float:
        return 100.0 if self.percent else 1.0

    @property
    def title(self) -> str:
        return f"{self.name[0].upper()}{self.name[1:]}"

    @property
    def axis(self) -> str:
        return "test accuracy, %" if self.percent else f"{self.name} on the test set"

    def formatted(self, value: float, deviation: float | None = None) -> str:
        """The number as tables show it: "84.96 ± 0.40 %", "0.944 ± 0.003"."""
        spread = "" if deviation is None else f" ± {self._number(deviation)}"
        return f"{self._number(value)}{spread}{' %' if self.percent else ''}"

    def in_words(self, value: float, deviation: float | None = None) -> str:
        """With its name: "84.96 % accuracy", "R² of 0.944"."""
        number = self.formatted(value, deviation)
        return f"{number} accuracy" if self.percent else f"{self.name} of {number}"

    def limits(self, interval: tuple[float, float]) -> str:
        """The ends of an interval: "95.4 to 98.6 %", "0.924 to 0.960"."""
        low, high = interval
        return f"{100 * low:.1f} to {100 * high:.1f} %" if self.percent else f"{low:.3f} to {high:.3f}"

    def _number(self, value: float) -> str:
        if self.percent:
            return f"{100 * value:.2f}"
        return f"{value:.3f}" if self.span[1] <= 1 else f"{value:.4g}"


ACCURACY = Measure("accuracy", "accuracy", (0.0, 1.0))
MEASURES = (
    ACCURACY,
    Measure("r2", "R²", (-math.inf, 1.0), 0.0, "always answering the mean"),
    Measure("concordance", "concordance", (0.0, 1.0), 0.5, "a random order"),
    Measure("perplexity", "perplexity", (1.0, math.inf), higher=False),
)
