"""The progress bar of a run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedveil.messages import Record
from fedveil.methods.method import At
from fedveil.privacy.releases import Plan
from fedveil.session.callbacks.progress import ShowProgress, progress_bar
from fedveil.session.loop import RoundEnd


@pytest.mark.parametrize("here", [True, False], ids=["simulated", "deployed"])
def test_a_round_is_shown_whether_or_not_its_start_was_told(here: bool) -> None:
    """Of a run on nodes only the ends of rounds are known here."""
    at = At(Plan(2, 2, "all", 3), 1)
    text = io.StringIO()
    with progress_bar(Console(file=text, width=120)) as progress:
        shown = ShowProgress(progress, "run seed 0", 3)
        if here:
            shown.round_starts(at, (0, 1))
        shown.round_ends(RoundEnd(at, (0, 1), Record(), {}, False, {"accuracy": 0.5, "epsilon": 2.0}))
        task = progress.tasks[0]
    assert (len(progress.tasks), task.completed, task.total) == (1, 1, 3)
    assert "accuracy 50.00 %  ε 2.00" in text.getvalue()


def test_the_bar_is_whole_in_80_columns() -> None:
    text = io.StringIO()
    with progress_bar(Console(file=text, width=80)) as progress:
        shown = ShowProgress(progress, "dp-fedags-proven seed 0", 300)
        metrics = {"accuracy": 0.5, "epsilon": 17.86}
        for number in (1, 300):
            at = At(Plan(2, 2, "all", 300), number)
            shown.round_ends(RoundEnd(at, (0, 1), Record(), {}, False, metrics))
    assert "300/300 accuracy 50.00 %  ε 17.86 took 0:00:0" in text.getvalue()
    assert "…" not in text.getvalue()
