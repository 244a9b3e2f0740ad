"""The progress bar of a run."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console
from rich.text import Text

from fedveil.messages import Record
from fedveil.methods.method import At
from fedveil.privacy.releases import Plan
from fedveil.session.callbacks import progress as module
from fedveil.session.callbacks.progress import LINE_SECONDS, ShowProgress, progress_bar
from fedveil.session.loop import RoundEnd


@pytest.mark.parametrize("here", [True, False], ids=["simulated", "deployed"])
def test_a_round_is_shown_even_without_a_start_event(here: bool) -> None:
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


def test_an_epsilon_of_an_earlier_round_is_a_lower_bound() -> None:
    """It is not computed after every round, and a run may stop early."""
    text = io.StringIO()
    with progress_bar(Console(file=text, width=80)) as progress:
        shown = ShowProgress(progress, "run seed 0", 40)
        for number, metrics in ((1, {"epsilon": 1.5}), (2, {})):
            at = At(Plan(2, 2, "all", 40), number)
            shown.round_ends(RoundEnd(at, (0, 1), Record(), {}, False, metrics))
    assert "2/40 ε≥1.50" in text.getvalue()


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


def test_the_bar_stays_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Time, "render", lambda *_: Text("0:12:34 left"))
    text = io.StringIO()
    console = Console(file=text, width=60, force_terminal=True, color_system=None)
    with progress_bar(console) as progress:
        shown = ShowProgress(progress, "dp-fedags-proven seed 0", 300)
        at = At(Plan(2, 2, "all", 300), 150)
        shown.round_ends(RoundEnd(at, (0, 1), Record(), {}, False, {"accuracy": 0.5, "epsilon": 17.86}))
    last = re.sub(r"\x1b\[[?0-9]*[a-zA-Z]", "\n", text.getvalue()).strip().splitlines()[-1]
    assert last.count("━") >= 4, "half of a bar of eight"
    assert "150/300 50.00 %  ε 17.86 0:12:34 left" in last
    assert len(last) <= 60


def test_without_a_terminal_progress_is_a_line_at_most_every_half_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    text = io.StringIO()
    with progress_bar(Console(file=text, width=120)) as progress:
        shown = ShowProgress(progress, "run seed 0", 100)
        for number in range(1, 101):
            now += 1.0
            at = At(Plan(2, 2, "all", 100), number)
            shown.round_ends(RoundEnd(at, (0, 1), Record(), {}, False, {"accuracy": 0.5}))
        lines = [line for line in text.getvalue().splitlines() if line.startswith("run seed 0: round")]
    assert [line.split(" of ")[0] for line in lines] == [
        f"run seed 0: round {int(LINE_SECONDS) * count}" for count in (1, 2, 3)
    ]


def test_a_terminal_gets_the_bar_and_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_SECONDS", 0.0)
    text = io.StringIO()
    with progress_bar(Console(file=text, width=120, force_terminal=True)) as progress:
        shown = ShowProgress(progress, "run seed 0", 2)
        shown.round_ends(RoundEnd(At(Plan(2, 2, "all", 2), 1), (0, 1), Record(), {}, False, {}))
    assert "round 1 of 2" not in text.getvalue()


@pytest.mark.parametrize(("first", "said"), [(1, False), (7, True)])
def test_a_resumed_run_shows_its_first_round(first: int, said: bool) -> None:
    text = io.StringIO()
    with progress_bar(Console(file=text, width=120)) as progress:
        shown = ShowProgress(progress, "run seed 0", 10)
        for number in (first, first + 1):
            shown.round_starts(At(Plan(2, 2, "all", 10), number), (0, 1))
    assert text.getvalue().count("resumed from round 7 of 10") == said
