"""A callback that scores the model on the test set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedveil.evaluation.accuracy import Score, evaluate
from fedveil.session.loop import Callback, RoundEnd
from fedveil.task import Task
from fedveil.tree import Params

if TYPE_CHECKING:
    from torch import Tensor


class EvaluateOnTest(Callback):
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
        end.metrics.update(score.metrics())
