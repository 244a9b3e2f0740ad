"""Scores of a model: accuracy and loss, over all examples, per class and per client.

For text classifiers also the Matthews correlation, for language models the perplexity; the latter's accuracy and loss
are per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedveil.data.client_data import Clients
from fedveil.evaluation.targets import concordance, r_squared, root_mean_square
from fedveil.evaluation.text_overlap import matthews, perplexity
from fedveil.lazy_torch import torch
from fedveil.losses import risk_of, target_of, times_of
from fedveil.task import Task
from fedveil.token_losses import IGNORED, token_losses
from fedveil.tree import Params, State, with_axis, without_axis

if TYPE_CHECKING:
    from torch import Tensor

EXTRA_METRICS = ("mcc", "perplexity", "rmse", "r2", "concordance")
"""Fields of a score that only some kinds of models have."""


@dataclass(frozen=True)
class Score:
    accuracy: float | None
    """None for regression and survival models."""
    loss: float
    per_class: list[float | None]
    """Accuracy on the examples of each class, None for a class without examples; empty without classes."""
    mcc: float | None = None
    """The Matthews correlation of a classifier of texts."""
    perplexity: float | None = None
    """Per token, for language models."""
    rmse: float | None = None
    """For regression, in the units of the table."""
    r2: float | None = None
    concordance: float | None = None
    """For survival models."""

    def metrics(self) -> dict[str, Any]:
        """The entries of a round's record; an overflowed loss is None, since JSON has no infinity."""
        found = {"accuracy": self.accuracy, "loss": _finite(self.loss), "per_class": self.per_class}
        extra = {name: getattr(self, name) for name in EXTRA_METRICS}
        return found | {name: _finite(value) for name, value in extra.items() if value is not None}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def evaluate(
    task: Task,
    params: Params,
    x: Tensor,
    y: Tensor,
    *,
    classes: int | None = None,
) -> Score:
    """The score of one model on these examples, in evaluation mode."""
    size = _batch_size(task)
    if y.dim() == 2:
        return _evaluate_tokens(task, params, x, y, size)
    scores = outputs_of(task, params, x, size)
    y = y.cpu()
    loss = float(task.example_loss(scores, y).double().mean())
    target = target_of(task.example_loss)
    if target == "number":
        error = (scores.squeeze(-1) - y) * getattr(task.example_loss, "scale", 1.0)
        return Score(None, loss, [], rmse=root_mean_square(error), r2=r_squared(scores.squeeze(-1), y))
    if target == "survival":
        risk = risk_of(task.example_loss, scores)
        return Score(None, loss, [], concordance=concordance(risk, *times_of(task.example_loss, y)))
    predicted = scores.argmax(-1)
    hits = predicted == y
    count = classes or int(y.max()) + 1
    per_class = [float(hits[y == c].double().mean()) if bool((y == c).any()) else None for c in range(count)]
    mcc = None if task.text is None else matthews(y, predicted)
    return Score(float(hits.double().mean()), loss, per_class, mcc)


def outputs_of(task: Task, params: Params, x: Tensor, size: int | None = None) -> Tensor:
    """The model's outputs for every example `[n, ...]`, in evaluation mode, on the CPU."""
    w, size = with_axis(params), size or _batch_size(task)
    with torch.no_grad():
        parts = [
            task.outputs(w, x[None, start : start + size].to(task.device))[0].cpu()
            for start in range(0, len(x), size)
        ]
    return torch.cat(parts)


def _batch_size(task: Task) -> int:
    return 1000 if task.text is None else task.text.largest_batch


def _evaluate_tokens(task: Task, params: Params, x: Tensor, y: Tensor, size: int) -> Score:
    """A language model's accuracy, loss and perplexity over all tokens that have a successor."""
    w = with_axis(params)
    total, hits, count = 0.0, 0, 0
    with torch.no_grad():
        for start in range(0, len(x), size):
            by = y[start : start + size].to(task.device)
            scores = task.outputs(w, x[None, start : start + size].to(task.device))[0]
            total += float(token_losses(scores, by).double().sum())
            hits += int((scores.argmax(-1) == by).sum())
            count += int((by != IGNORED).sum())
    mean = total / max(1, count)
    return Score(hits / max(1, count), mean, [], perplexity=perplexity(mean))


def evaluate_clients(task: Task, params: Params, clients: Clients, ids: Sequence[int]) -> list[float | None]:
    """The accuracy of one model on each client's own examples; None for a client without any."""
    out: list[float | None] = []
    for client in ids:
        data = clients.load([client])
        if not data.largest:
            out.append(None)
            continue
        out.append(evaluate(task, params, data.x[0], data.y[0]).accuracy)
    return out


@dataclass(frozen=True)
class PersonalScore:
    """Scores of personal models, averaged over `clients` of them."""

    clients: int
    test_accuracy: float | None
    """On the common test examples."""
    own_accuracy: float | None
    """On each client's own examples (held-out ones if there are any)."""


def evaluate_personal(
    task: Task,
    personal: Callable[[State], Params | None],
    states: Mapping[int, State],
    test: tuple[Tensor, Tensor] | None,
    own: Clients,
    *,
    most: int = 20,
) -> PersonalScore | None:
    """The scores of the personal models of at most `most` evenly chosen clients that participated.

    None if no client has participated yet, or if there are no personal models.
    """
    known = sorted(states)
    chosen = known[:: max(1, math.ceil(len(known) / most))]
    on_test: list[float] = []
    on_own: list[float] = []
    for client in chosen:
        params = personal({name: leaf.unsqueeze(0) for name, leaf in states[client].items()})
        if params is None:
            return None
        model = without_axis(params)
        if test is not None:
            on_test.extend(a for a in (evaluate(task, model, *test).accuracy,) if a is not None)
        on_own.extend(score for score in evaluate_clients(task, model, own, [client]) if score is not None)
    if not chosen:
        return None
    return PersonalScore(
        len(chosen),
        sum(on_test) / len(on_test) if on_test else None,
        sum(on_own) / len(on_own) if on_own else None,
    )


def evaluate_cohort(
    task: Task, models: Params | None, test: tuple[Tensor, Tensor] | None
) -> PersonalScore | None:
    """The score of the models `[K, ...]` that a server holds for a cohort; None if there are none."""
    if models is None or test is None:
        return None
    count = next(iter(models.values())).shape[0]
    rows = [{name: leaf[k] for name, leaf in models.items()} for k in range(count)]
    scores = [score for row in rows if (score := evaluate(task, row, *test).accuracy) is not None]
    return PersonalScore(count, sum(scores) / len(scores), None) if scores else None


def majority_rate(test: tuple[Tensor, Tensor] | None) -> dict[str, float] | None:
    """The accuracy of always predicting the most frequent test class, and the number of labels."""
    if test is None or test[1].is_floating_point():  # numbers and survival times have no classes
        return None
    labels = test[1].flatten()
    labels = labels[labels >= 0]
    if not len(labels):
        return None
    return {"rate": int(torch.bincount(labels).max()) / len(labels), "labels": len(labels)}
