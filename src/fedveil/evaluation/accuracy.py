"""How good a model is: accuracy and loss, over all examples, per class and per client."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.data.client_data import Clients
from fedveil.run import Observer, RoundEnd
from fedveil.task import Task
from fedveil.tree import Params, State, with_axis, without_axis


@dataclass(frozen=True)
class Score:
    accuracy: float
    loss: float
    per_class: list[float | None]
    """Accuracy among the examples of each class; None for a class without examples."""


def evaluate(
    task: Task, params: Params, x: Tensor, y: Tensor, *, classes: int | None = None, batch_size: int = 1000
) -> Score:
    """The score of one model on these examples, in evaluation mode."""
    w = with_axis(params)
    right: list[Tensor] = []
    losses: list[Tensor] = []
    with torch.no_grad():
        for start in range(0, len(x), batch_size):
            bx = x[None, start : start + batch_size].to(task.device)
            by = y[None, start : start + batch_size].to(task.device)
            scores = task.outputs(w, bx)
            losses.append(task.example_loss(scores[0], by[0]).double().cpu())
            right.append((scores[0].argmax(-1) == by[0]).cpu())
    hits = torch.cat(right)
    count = classes or int(y.max()) + 1
    per_class = [float(hits[y == c].double().mean()) if bool((y == c).any()) else None for c in range(count)]
    return Score(float(hits.double().mean()), float(torch.cat(losses).mean()), per_class)


def evaluate_clients(task: Task, params: Params, clients: Clients, ids: Sequence[int]) -> list[float | None]:
    """The accuracy of one model on each client's own examples; None for a client without any."""
    out: list[float | None] = []
    w = with_axis(params)
    for client in ids:
        data = clients.load([client])
        if not data.largest:
            out.append(None)
            continue
        with torch.no_grad():
            scores = task.outputs(w, data.x.to(task.device))
        out.append(float((scores.argmax(-1).cpu() == data.y).double().mean()))
    return out


@dataclass(frozen=True)
class PersonalScore:
    """How good the clients' own models are, averaged over `clients` of them."""

    clients: int
    test_accuracy: float | None
    """On the common test examples."""
    own_accuracy: float | None
    """On each client's own examples (held-out ones where there are any)."""


def evaluate_personal(
    task: Task,
    personal: Callable[[State], Params | None],
    states: Mapping[int, State],
    test: tuple[Tensor, Tensor] | None,
    own: Clients,
    *,
    most: int = 20,
) -> PersonalScore | None:
    """The scores of the personal models of at most `most` clients that took part, spread evenly over them.

    None where nobody took part yet, or where clients have no model of their own.
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
            on_test.append(evaluate(task, model, *test).accuracy)
        on_own.extend(score for score in evaluate_clients(task, model, own, [client]) if score is not None)
    if not chosen:
        return None
    return PersonalScore(
        len(chosen),
        sum(on_test) / len(on_test) if on_test else None,
        sum(on_own) / len(on_own) if on_own else None,
    )


class EvaluateOnTest(Observer):
    """Scores the model every `every` rounds and after the last."""

    def __init__(self, task: Task, x: Tensor, y: Tensor, classes: int | None, every: int) -> None:
        self.task = task
        self.x = x
        self.y = y
        self.classes = classes
        self.every = every

    def score(self, params: Params) -> Score:
        return evaluate(self.task, params, self.x, self.y, classes=self.classes)

    def round_ends(self, end: RoundEnd) -> None:
        if end.at.round % self.every and not end.last:
            return
        score = self.score(end.model)
        end.metrics.update(accuracy=score.accuracy, loss=score.loss, per_class=score.per_class)
