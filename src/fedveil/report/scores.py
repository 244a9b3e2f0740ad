"""The section of the page with all scores on test examples and their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fedveil.report.files import number
from fedveil.report.groups import Setting, Spread, limits_of
from fedveil.report.markup import NOTHING, Cell, section, table
from fedveil.report.run import Run

_SCORES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auc": "AUC",
    "average_precision": "average precision",
    "calibration_error": "calibration error (less is better)",
    "r2": "R²",
    "rmse": "root mean square error, in the units of the table (less is better)",
    "concordance": "concordance",
    "mcc": "Matthews correlation",
    "perplexity": "perplexity (less is better)",
}
_ALONE = ("mcc", "perplexity")  # of texts: a number without an interval
_MOST_SIDE_BY_SIDE = 3


def scores(settings: Sequence[Setting]) -> str:
    """A table of all scores on the test set, and one of the clients' own; empty if there is only accuracy."""
    known = [(s, _rows(s)) for s in settings if s.first.finished]
    shown = [(s, rows) for s, rows in known if rows and list(rows) != ["accuracy"]]
    tables = ""
    for start in range(0, len(shown), _MOST_SIDE_BY_SIDE):
        some = shown[start : start + _MOST_SIDE_BY_SIDE]
        names = [key for key in _SCORES if any(key in rows for _, rows in some)]
        body: list[list[Cell]] = [
            [_SCORES[key], *(rows.get(key, NOTHING) for _, rows in some)] for key in names
        ]
        tables += table("On the test set", ["score", *(s.name for s, _ in some)], body, sortable=False)
    own = "".join(_per_client(s) for s in settings)
    lead = "In brackets: the 95 % interval, over the test examples. With several seeds: mean and sample deviation."
    return section("scores", "All scores", tables, own, lead=lead)


def _rows(setting: Setting) -> dict[str, Cell]:
    found: dict[str, Cell] = {}
    for key in _SCORES:
        values = [_value(run, key) for run in setting.runs if run.finished]
        spread = Spread.of(values)
        if spread is not None:
            interval = limits_of(setting.first.metrics.get(key)) if spread.count == 1 else None
            found[key] = _cell(spread, interval)
    return found


def _value(run: Run, key: str) -> float | None:
    if key in _ALONE:
        return number(getattr(run, key))
    metric = run.metrics.get(key)
    return number(metric.get("value")) if isinstance(metric, Mapping) else None


def _cell(spread: Spread, interval: tuple[float, float] | None) -> Cell:
    shown = _shown(spread.mean)
    if spread.deviation is not None:
        shown += f" ± {spread.deviation:.2g}"
    if interval is not None:
        shown += f" <small>({_shown(interval[0])} to {_shown(interval[1])})</small>"
    return shown, spread.mean


def _shown(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.4g}"


def _per_client(setting: Setting) -> str:
    """Each client's own held-out examples: how many, and the scores."""
    found = {
        str(name): metrics
        for name, metrics in setting.first.client_metrics.items()
        if isinstance(metrics, Mapping)
    }
    names = [key for key in _SCORES if any(_known(metrics, key) for metrics in found.values())]
    if not names:
        return ""
    rows = [
        [escape(name), _count(metrics), *(_known(metrics, key) or NOTHING for key in names)]
        for name, metrics in found.items()
    ]
    heads = ["client", "examples", *(_SCORES[key].partition(",")[0].partition(" (")[0] for key in names)]
    caption = f"On each client's held-out examples: {setting.name}"
    return f"<details><summary>{escape(caption)}</summary>{table(caption, heads, rows)}</details>"


def _known(metrics: Mapping[str, Any], key: str) -> Cell | None:
    metric = metrics.get(key)
    value = number(metric.get("value")) if isinstance(metric, Mapping) else None
    return None if value is None else _cell(Spread(value, None, 1), limits_of(metric))


def _count(metrics: Mapping[str, Any]) -> Cell:
    count = number(metrics.get("examples"))
    return NOTHING if count is None else (f"{count:g}", count)
