"""A callback that stops a run whose model no longer improves on public examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedveil.evaluation.accuracy import evaluate
from fedveil.methods.method import At
from fedveil.session.loop import Callback, RoundEnd
from fedveil.session.options import EarlyStopping
from fedveil.task import Task

if TYPE_CHECKING:
    from torch import Tensor


class StopEarly(Callback):
    """Scores every model on public examples, and stops before a round is charged.

    The decision depends only on released models and public examples, so it is post-processing. It is made from the
    recorded rounds, so a resumed run makes the same decision.
    """

    def __init__(
        self,
        task: Task,
        public: tuple[Tensor, Tensor],
        rule: EarlyStopping,
        history: Sequence[Mapping[str, Any]],
    ) -> None:
        self._task = task
        self._public = public
        self._rule = rule
        self._history = history

    def round_starts(self, at: At, cohort: Sequence[int]) -> str | None:
        return self._rule.reason([line[self._rule.key] for line in self._history if self._rule.key in line])

    def round_ends(self, end: RoundEnd) -> None:
        score = evaluate(self._task, end.model, *self._public).metrics()
        if score.get(self._rule.metric) is not None:
            end.metrics[self._rule.key] = score[self._rule.metric]
