"""Standard metrics of a model, each with a 95 % interval.

Intervals of proportions are Wilson's; the others are from a bootstrap over examples, with a fixed seed so that a
summary is reproducible: its percentiles, and for the calibration error, whose resamples are biased upwards, a
confidence region of the signed gaps. Where only m of n examples are resampled, deviations are scaled by sqrt(m / n). A
metric that is undefined (the AUC of one class) has no value but a reason, `why`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedveil.evaluation.targets import concordance, r_squared, root_mean_square
from fedveil.lazy_torch import torch
from fedveil.losses import risk_of, target_of, times_of
from fedveil.streams import named_stream

if TYPE_CHECKING:
    from torch import Tensor

Floats = npt.NDArray[np.float64]
_RESAMPLES = 200
_MOST_EXAMPLES = 20_000  # a bootstrap over more would be slow
_MOST_PAIRED = 2000  # concordance compares all pairs
_MOST_CLASSES = 20
_BINS = 10
_Z = 1.959964  # normal quantile of a 95 % interval
ONE_CLASS = "only one class among the examples"


def metrics_of(loss: object, outputs: Tensor, y: Tensor, classes: int) -> dict[str, Any]:
    """Metrics by name, for outputs `[n, ...]` of a model of this loss and labels `[n]`."""
    if not bool(torch.isfinite(outputs).all()):
        return {"examples": len(y), "why": "the model's outputs are not finite"}
    target = target_of(loss)
    if target == "number":
        return _of_numbers(outputs.squeeze(-1).double(), y.double(), float(getattr(loss, "scale", 1.0)))
    if target == "survival":
        return _of_times(risk_of(loss, outputs), *times_of(loss, y))
    return _of_classes(torch.softmax(outputs.double(), -1).numpy(), y.numpy(), classes)


def _of_classes(probabilities: Floats, y: npt.NDArray[np.int64], classes: int) -> dict[str, Any]:
    predicted = probabilities.argmax(1)
    hits = predicted == y
    confusion = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(confusion, (y, predicted), 1)
    return {
        "examples": len(y),
        "accuracy": wilson(int(hits.sum()), len(y)),
        "confusion": confusion.tolist() if classes <= _MOST_CLASSES else None,
        **_resampled(probabilities, y),
        "calibration": _curve(probabilities, hits),
    }


def _resampled(probabilities: Floats, y: npt.NDArray[np.int64]) -> dict[str, dict[str, Any]]:
    """The metrics with intervals of a bootstrap."""
    count = len(y)
    if count > _MOST_EXAMPLES:
        chosen = named_stream(0, "bootstrap-part").choice(count, _MOST_EXAMPLES, replace=False)
        part = _resampled(probabilities[chosen], y[chosen])
        shrink = math.sqrt(_MOST_EXAMPLES / count)
        once = np.ones((1, count))
        return {
            name: _scaled(one["value"], part[name], shrink) if one["value"] is not None else one
            for name, one in _bootstrapped(probabilities, y, once).items()
        }
    stream = named_stream(0, "bootstrap")
    counts = stream.multinomial(count, np.full(count, 1 / count), size=_RESAMPLES).astype(np.float64)
    return _bootstrapped(probabilities, y, counts)


def _scaled(value: float, part: Mapping[str, Any], shrink: float) -> dict[str, Any]:
    """A value with the interval of a part of the examples, moved to the value and shrunk."""
    if part["value"] is None:
        return {"value": value}
    low, high = (value + shrink * (part[end] - part["value"]) for end in ("low", "high"))
    return {"value": value, "low": low, "high": high}


def _bootstrapped(
    probabilities: Floats, y: npt.NDArray[np.int64], counts: Floats
) -> dict[str, dict[str, Any]]:
    hits = probabilities.argmax(1) == y
    return {
        "balanced_accuracy": _interval(
            _balanced(hits, y, np.ones((1, len(y))))[0], _balanced(hits, y, counts)
        ),
        "auc": _ranked(probabilities, y, counts, _auc),
        "average_precision": _ranked(probabilities, y, counts, _average_precision),
        "calibration_error": _calibration_error(probabilities, hits, counts),
    }


def _of_numbers(predicted: Tensor, y: Tensor, scale: float) -> dict[str, Any]:
    draws = _draws(len(y))
    rmse = [root_mean_square(predicted[d] - y[d]) * scale for d in draws]
    explained = [r_squared(predicted[d], y[d]) for d in draws]
    known = np.array([value for value in explained if value is not None])
    return {
        "examples": len(y),
        "rmse": _interval(root_mean_square(predicted - y) * scale, np.array(rmse), count=len(y)),
        "r2": _interval(r_squared(predicted, y), known, "all examples have the same number", len(y)),
    }


def _of_times(risk: Tensor, time: Tensor, event: Tensor) -> dict[str, Any]:
    found = [concordance(risk[d], time[d], event[d]) for d in _draws(len(risk))]
    known = np.array([value for value in found if value is not None])
    return {
        "examples": len(risk),
        "events": int(event.sum()),
        "concordance": _interval(
            concordance(risk, time, event), known, "no two examples have an order: too few events", len(risk)
        ),
    }


def wilson(hits: int, count: int) -> dict[str, Any]:
    """A proportion with Wilson's 95 % interval."""
    if not count:
        return {"value": None, "why": "no examples"}
    share, z2 = hits / count, _Z * _Z / count
    middle = (share + z2 / 2) / (1 + z2)
    half = _Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count)) / (1 + z2)
    return {"value": share, "low": max(0.0, middle - half), "high": min(1.0, middle + half)}


def _interval(
    value: float | None, drawn: Floats, why: str = ONE_CLASS, count: int = _MOST_PAIRED
) -> dict[str, Any]:
    """A value with the percentiles of its resamples, of at most `_MOST_PAIRED` of `count` examples each."""
    if value is None or math.isnan(value):
        return {"value": None, "why": why}
    drawn = drawn[~np.isnan(drawn)]
    low, high = np.percentile(drawn, [2.5, 97.5]) if len(drawn) else (value, value)
    interval = {"value": float(value), "low": float(low), "high": float(high)}
    if count <= _MOST_PAIRED:
        return interval
    return _scaled(value, interval, math.sqrt(_MOST_PAIRED / count))


def _draws(count: int) -> list[Tensor]:
    stream = named_stream(0, "bootstrap")
    size = min(count, _MOST_PAIRED)
    return [torch.from_numpy(stream.integers(0, count, size)) for _ in range(_RESAMPLES)]


def _balanced(hits: npt.NDArray[np.bool_], y: npt.NDArray[np.int64], counts: Floats) -> Floats:
    """The mean over the occurring classes of the accuracy on each, for each resample."""
    shares = []
    for label in np.unique(y):
        mine = y == label
        with np.errstate(invalid="ignore"):
            shares.append((counts[:, mine] @ hits[mine]) / counts[:, mine].sum(1))
    return np.asarray(np.nanmean(np.stack(shares), axis=0))


def _ranked(
    probabilities: Floats,
    y: npt.NDArray[np.int64],
    counts: Floats,
    of: Callable[[Floats, npt.NDArray[np.bool_], Floats], Floats],
) -> dict[str, Any]:
    """A ranking metric of probabilities: for two classes that of the second, otherwise the mean over classes,
    one-vs-rest."""
    labels = np.unique(y)
    if len(labels) < 2:
        return {"value": None, "why": ONE_CLASS}
    if probabilities.shape[1] > _MOST_CLASSES:
        return {"value": None, "why": f"more than {_MOST_CLASSES} classes"}
    chosen = [1] if probabilities.shape[1] == 2 else labels.tolist()
    both = np.concatenate([np.ones((1, len(y))), counts])
    found = np.mean([of(probabilities[:, k], y == k, both) for k in chosen], axis=0)
    return _interval(float(found[0]), found[1:])


def _steps(scores: Floats, positive: npt.NDArray[np.bool_], counts: Floats) -> tuple[Floats, Floats]:
    """True and false positives `[resamples, thresholds]`, in descending order of distinct scores."""
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.cumsum(counts[:, order] * positive[order], axis=1)[:, last]
    misses = np.cumsum(counts[:, order] * ~positive[order], axis=1)[:, last]
    return hits, misses


def _auc(scores: Floats, positive: npt.NDArray[np.bool_], counts: Floats) -> Floats:
    hits, misses = (np.pad(steps, ((0, 0), (1, 0))) for steps in _steps(scores, positive, counts))
    area = (np.diff(misses, axis=1) * (hits[:, 1:] + hits[:, :-1]) / 2).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(area / (hits[:, -1] * misses[:, -1]))


def _average_precision(scores: Floats, positive: npt.NDArray[np.bool_], counts: Floats) -> Floats:
    hits, misses = _steps(scores, positive, counts)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.nan_to_num(hits / (hits + misses))
        gained = np.diff(np.pad(hits, ((0, 0), (1, 0))), axis=1)
        return np.asarray((gained * precision).sum(1) / hits[:, -1])


def _bins(probabilities: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
    """The predicted class's probability of each example, and its bin."""
    sure = probabilities.max(1)
    return sure, np.minimum((sure * _BINS).astype(np.int64), _BINS - 1)


def _calibration_error(probabilities: Floats, hits: npt.NDArray[np.bool_], counts: Floats) -> dict[str, Any]:
    """The expected calibration error: the L1 norm of the signed gaps of the bins, each weighted by its examples.

    Absolute values of noisy gaps are too large on average, and in resamples more so, so that percentiles of resampled
    errors can lie above the error itself. The signed gaps are means, whose bootstrap is valid: the 95 % quantile r of
    the L1 distance of resampled gaps from the observed ones gives a confidence region (Hall: The Bootstrap and
    Edgeworth Expansion. Springer 1992, Section 4.2). By the triangle inequality the error is within r of the observed
    one.
    """
    sure, place = _bins(probabilities)
    gaps = np.eye(_BINS)[place] * (sure - hits)[:, None]  # [n, bins]
    found = gaps.mean(0)
    value = float(np.abs(found).sum())
    radius = float(np.quantile(np.abs(counts @ gaps / len(gaps) - found).sum(1), 0.95))
    return {"value": value, "low": max(0.0, value - radius), "high": min(1.0, value + radius)}


def _curve(probabilities: Floats, hits: npt.NDArray[np.bool_]) -> list[dict[str, Any]]:
    """The calibration curve: accuracy by predicted probability."""
    sure, place = _bins(probabilities)
    return [
        {
            "confidence": float(sure[place == k].mean()),
            "accuracy": float(hits[place == k].mean()),
            "examples": int((place == k).sum()),
        }
        for k in range(_BINS)
        if bool((place == k).any())
    ]
