"""Evaluation of membership scores: accuracy, AUC, the low end of the ROC curve, all with intervals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.atomic_files import write_atomically, writing
from fedveil.errors import InputError

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

LOW_RATES = (0.01, 0.001)
_DRAWS = 1000
_MOST_POINTS = 2000


@dataclass(frozen=True)
class Interval:
    """A value with a two-sided 95 % confidence interval."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class MembershipFinding:
    """The result of an attack. `fpr`, `tpr` are its ROC curve.

    `accuracy` is that of the best threshold on one half of members and non-members, on the other half.
    `tpr_at` gives, for false-positive rates, the true positives of the largest threshold not above the rate; with
    n non-members a rate below 1/n means none of them. Its interval takes the threshold as given.
    """

    attack: str
    target: str
    members: int
    others: int
    accuracy: Interval
    auc: Interval
    tpr_at: dict[float, Interval]
    fpr: Floats
    tpr: Floats
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "attack": self.attack,
            "settings": dict(self.settings),
            "target": self.target,
            "members": self.members,
            "others": self.others,
            "accuracy": self.accuracy.to_json(),
            "auc": self.auc.to_json(),
            "tpr_at_fpr": {f"{rate:g}": found.to_json() for rate, found in self.tpr_at.items()},
            "smallest_resolved_fpr": 1 / self.others,
            "confidence": 0.95,
        }

    def named_rates(self) -> dict[str, Interval]:
        """True positives by false-positive rate; a rate too small for the number of non-members is marked."""
        return {
            f"TPR at {100 * rate:g} % FPR"
            + (f" (none of {self.others})" if rate * self.others < 1 else ""): tpr
            for rate, tpr in self.tpr_at.items()
        }

    def in_words(self) -> str:
        low = ", ".join(f"{name} {found}" for name, found in self.named_rates().items())
        return (
            f"{self.attack} on {self.target}: AUC {self.auc}, accuracy {self.accuracy}, {low} "
            f"({self.members} members, {self.others} others)"
        )


def clopper_pearson(events: int, trials: int) -> Interval:
    """The exact two-sided 95 % interval of a probability after `events` in `trials`."""
    from scipy.stats import beta

    tail = (1 - 0.95) / 2
    low = 0.0 if events == 0 else float(beta.ppf(tail, events, trials - events + 1))
    high = 1.0 if events == trials else float(beta.ppf(1 - tail, events + 1, trials - events))
    return Interval(events / trials, low, high)


def area(members: Floats, others: Floats) -> float:
    """The probability that a member scores above a non-member, with ties counting half."""
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([members, others]))[: len(members)]
    n, m = len(members), len(others)
    return float((ranks.sum() - n * (n + 1) / 2) / (n * m))


def roc(members: Floats, others: Floats) -> tuple[Floats, Floats]:
    """False and true positive rates at every threshold, from (0, 0) to (1, 1)."""
    thresholds = np.unique(np.concatenate([members, others]))[::-1]
    if len(thresholds) > _MOST_POINTS:
        thresholds = thresholds[np.unique(np.geomspace(1, len(thresholds), _MOST_POINTS).astype(int)) - 1]
    fpr = 1 - np.searchsorted(np.sort(others), thresholds, side="left") / len(others)
    tpr = 1 - np.searchsorted(np.sort(members), thresholds, side="left") / len(members)
    return np.concatenate([[0.0], fpr, [1.0]]), np.concatenate([[0.0], tpr, [1.0]])


def true_positives_at(members: Floats, others: Floats, rate: float) -> Interval:
    """The true-positive rate when at most `rate` of the non-members are classified as members."""
    allowed = int(rate * len(others) + 1e-9)
    bar = np.sort(others)[::-1][allowed] if allowed < len(others) else -np.inf
    return clopper_pearson(int((members > bar).sum()), len(members))


def held_out_accuracy(members: Floats, others: Floats, rng: np.random.Generator) -> Interval:
    """Accuracy on one half of equally many members and non-members, with the best threshold of the other half."""
    count = min(len(members), len(others))
    ins, outs = rng.permutation(members)[:count], rng.permutation(others)[:count]
    half = count // 2
    values = np.unique(np.concatenate([ins[:half], outs[:half]]))
    middle = (values[1:] + values[:-1]) / 2
    bars = np.concatenate([[-np.inf], middle, [np.inf]])
    right = (half - np.searchsorted(np.sort(ins[:half]), bars, side="left")) + np.searchsorted(
        np.sort(outs[:half]), bars, side="left"
    )
    bar = bars[int(right.argmax())]
    found = int((ins[half:] >= bar).sum() + (outs[half:] < bar).sum())
    return clopper_pearson(found, 2 * (count - half))


def judge(
    attack: str, target: str, scores: Floats, is_member: Bools, rng: np.random.Generator
) -> MembershipFinding:
    """Score an attack against the truth, which the attack has not observed."""
    scores, is_member = np.asarray(scores, dtype=np.float64), np.asarray(is_member, dtype=np.bool_)
    if scores.shape != is_member.shape or scores.ndim != 1:
        raise InputError("scores", scores.shape, "do not match the examples", "Give one score for each.")
    if not np.isfinite(scores).all():
        raise InputError(
            "scores", "nan or inf", "a score is not finite", "Check the weights of the attacked model."
        )
    members, others = scores[is_member], scores[~is_member]
    if min(len(members), len(others)) < 4:
        raise InputError(
            "members",
            (len(members), len(others)),
            "are too few to evaluate an attack",
            "Use 4 of each kind or more.",
        )
    draws = [area(rng.choice(members, len(members)), rng.choice(others, len(others))) for _ in range(_DRAWS)]
    low, high = np.quantile(draws, [0.025, 0.975])
    fpr, tpr = roc(members, others)
    return MembershipFinding(
        attack,
        target,
        len(members),
        len(others),
        held_out_accuracy(members, others, rng),
        Interval(area(members, others), float(low), float(high)),
        {rate: true_positives_at(members, others, rate) for rate in LOW_RATES},
        fpr,
        tpr,
    )


def save(finding: MembershipFinding, folder: Path) -> None:
    """Write `roc.json`, `roc.png` and, last, `finding.json`."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    curve = {"fpr": finding.fpr.tolist(), "tpr": finding.tpr.tolist()}
    write_atomically(folder / "roc.json", json.dumps(curve).encode())
    with writing(folder):
        draw_roc([finding], folder / "roc.png")
    write_atomically(folder / "finding.json", (json.dumps(finding.to_json(), indent=2) + "\n").encode())


def draw_roc(findings: Sequence[MembershipFinding], path: Path) -> None:
    """Plot ROC curves on logarithmic axes, which show the low end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    least = min(0.5 / max(f.others, f.members) for f in findings)
    for finding, style in zip(findings, ["-", "--", "-.", ":"] * len(findings), strict=False):
        label = f"{finding.attack} (AUC {finding.auc.value:.2f})"
        axes.step(finding.fpr.clip(least), finding.tpr.clip(least), style, where="post", label=label)
    axes.plot([least, 1], [least, 1], color="grey", linewidth=0.8, label="guessing")
    axes.set(
        xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1),
        xlabel="false positive rate", ylabel="true positive rate",
    )  # fmt: skip
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)
