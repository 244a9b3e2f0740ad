"""The privacy of selecting the best of several runs on the same data.

Selecting the best of several trained runs discloses something about all of them: by composition, the choice has the
epsilon of all runs together. Private selection has a smaller one. The number of trials K is drawn, independently of
the data, from a distribution with a sufficiently heavy tail; each trial draws a candidate at random, with replacement;
only the best trial is released, and K is not.

Papernot and Steinke 2022, "Hyperparameter tuning with Renyi differential privacy" (arXiv 2110.03620). Symbols: lambda
an order, eps(lambda) the Renyi divergence of one trial, eps'(lambda) that of the selection.

* Theorem 2, K truncated negative binomial (eta, gamma), for every lambda > 1 and lambda_hat >= 1:
  eps'(lambda) = eps(lambda) + (1 + eta) (1 - 1/lambda_hat) eps(lambda_hat) + (1 + eta) log(1/gamma) / lambda_hat
  + log(E K) / (lambda - 1).
* Theorem 6, K Poisson of mean mu, if a trial is (eps_hat, delta_hat)-DP with e^eps_hat <= 1 + 1/(lambda - 1):
  eps'(lambda) = eps(lambda) + mu delta_hat + log(mu) / (lambda - 1). Here it is visible if no trial was made, which
  adds e^-mu to the moment e^((lambda - 1) eps'(lambda)); without it the formula is too small for mu below 1.

**Guarantees**: the curves bound the exact divergence of the whole procedure
(`test_selection_bounds_the_exact_divergence_of_the_procedure`).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedveil.errors import InputError
from fedveil.privacy import loss
from fedveil.privacy.accounting import Guarantee, Rounds, account_rounds, renyi_curve
from fedveil.privacy.loss import Floats
from fedveil.privacy.releases import Release, RenyiCurve, Unit

_MOST_TRIALS = 1e6  # largest expected number


@dataclass(frozen=True)
class NegativeBinomialTrials:
    """K from 1 on, truncated negative binomial; eta 1 is the geometric, eta 0 the logarithmic distribution."""

    eta: float = 1.0
    gamma: float = 0.1
    theorem: ClassVar[str] = "Theorem 2"

    def __post_init__(self) -> None:
        if not -1 < self.eta <= 100:
            raise InputError("eta", self.eta, "is out of range", "Use a number above -1, at most 100.")
        if not 1e-6 <= self.gamma < 1:
            raise InputError("gamma", self.gamma, "is out of range", "Use a number from 1e-6 on, below 1.")
        if self.mean > _MOST_TRIALS:
            raise InputError("gamma", self.gamma, f"means {self.mean:.3g} trials", "Use a larger gamma.")

    @property
    def mean(self) -> float:
        odds = 1 / self.gamma - 1
        if self.eta == 0:
            return odds / -math.log(self.gamma)
        return self.eta * odds / -math.expm1(self.eta * math.log(self.gamma))

    def probability(self, trials: int) -> float:
        """The probability of exactly `trials` trials."""
        if trials < 1:
            return 0.0
        log_first = math.log1p(-self.gamma) - math.log(self._normaliser)
        steps = sum(math.log1p((self.eta - 1) / (i + 1)) for i in range(1, trials))
        return math.exp(log_first + steps + (trials - 1) * math.log1p(-self.gamma))

    @property
    def _normaliser(self) -> float:
        if self.eta == 0:
            return -math.log(self.gamma)
        return math.expm1(-self.eta * math.log(self.gamma)) / self.eta

    def curve(self, trial: RenyiCurve) -> Floats:
        orders, values = np.asarray(trial.orders), np.asarray(trial.values)
        tail = -math.log(self.gamma)
        # Order 1, or the best one.
        extra = min(tail, float(((1 - 1 / orders) * values + tail / orders).min()))
        total: Floats = values + (1 + self.eta) * extra + math.log(self.mean) / (orders - 1)
        return total

    def in_words(self) -> str:
        return f"truncated negative binomial (eta {self.eta:g}, gamma {self.gamma:g}, mean {self.mean:.4g})"

    def to_json(self) -> dict[str, Any]:
        return {"distribution": "negative-binomial", "eta": self.eta, "gamma": self.gamma, "mean": self.mean}


@dataclass(frozen=True)
class PoissonTrials:
    """K Poisson; with probability e^-mean no trial is made, and nothing is released."""

    mean: float = 10.0
    theorem: ClassVar[str] = "Theorem 6"

    def __post_init__(self) -> None:
        if not 0.01 <= self.mean <= 1e4:
            raise InputError("mean", self.mean, "is out of range", "Use a number from 0.01 to 10000.")

    def probability(self, trials: int) -> float:
        """The probability of exactly `trials` trials."""
        return math.exp(trials * math.log(self.mean) - self.mean - math.lgamma(trials + 1))

    def curve(self, trial: RenyiCurve) -> Floats:
        from fedveil.privacy.dp_library import compute_delta

        orders, values = np.asarray(trial.orders), np.asarray(trial.values)
        allowed = np.log1p(1 / (orders - 1))
        fails = np.array([compute_delta(trial.orders, trial.values, eps)[0] for eps in allowed])
        tried = (orders - 1) * (values + self.mean * fails) + math.log(self.mean)
        total: Floats = np.logaddexp(tried, -self.mean) / (orders - 1)
        return total

    def in_words(self) -> str:
        return f"Poisson (mean {self.mean:g})"

    def to_json(self) -> dict[str, Any]:
        return {"distribution": "poisson", "mean": self.mean}


Trials = NegativeBinomialTrials | PoissonTrials


def draw(trials: Trials) -> int:
    """Draw a number of trials from the system's entropy: it must be secret and independent of the data."""
    left, count = secrets.SystemRandom().random(), 0
    ceiling = 1000 * (trials.mean + 1)  # the tail beyond it is below the resolution of `left`
    while (left := left - trials.probability(count)) >= 0 and count < ceiling:
        count += 1
    return count


def selection_curve(candidates: Sequence[Rounds], unit: Unit, trials: Trials) -> RenyiCurve:
    """The divergences of the best trial, against an observer.

    A trial releases the candidate that it drew and the run's results, so its divergence is that of a mixture with
    visible candidate. A score that is not public is an additional release of each candidate.
    """
    curves = [renyi_curve(rounds, unit, "observer") for rounds in candidates]
    orders = tuple(sorted(set.intersection(*(set(curve.orders) for curve in curves))))
    if not orders:
        raise InputError(
            "method", "observer", "the candidates' Renyi curves share no order", "Use more noise."
        )
    values = [np.array([v for a, v in zip(c.orders, c.values, strict=True) if a in orders]) for c in curves]
    trial = loss.mixed_renyi([(1 / len(values), value) for value in values], orders)
    best = np.maximum(trials.curve(RenyiCurve(orders, tuple(map(float, trial)))), 0)
    return RenyiCurve(orders, tuple(map(float, best)))


def selection_release(curve: RenyiCurve, unit: Unit) -> Release:
    """The selected run, with all its rounds and models, as one release."""
    return Release("the best of the trials", unit, ("observer",), curve, participation="charged")


def composed(runs: Sequence[Rounds], delta: float) -> tuple[Guarantee, ...]:
    """The guarantees of all runs together, which bound a selection that is not private."""
    total = sum(runs, Rounds())
    return account_rounds(total, delta) if total else ()
