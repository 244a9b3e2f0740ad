"""A progress bar on the terminal: rounds, accuracy, epsilon so far, time left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.table import Column
from rich.text import Text

from fedveil.methods.method import At
from fedveil.session.loop import Callback, RoundEnd

_NARROW_BAR = 8
LINE_SECONDS = 30.0
"""Without a terminal: the smallest interval between progress lines, in seconds."""


class _Bars(Progress):
    """Starts the display with the first bar, so that a command that is refused shows only its message."""

    def __enter__(self) -> Self:
        return self

    def add_task(self, description: str, *args: Any, **fields: Any) -> TaskID:
        self.start()
        room = self.console.width // 5 if _is_narrow(self.console) else len(description)
        shown = description if len(description) <= room else f"{description[: room - 1]}…"
        return super().add_task(shown, *args, **fields)

    def stop(self) -> None:
        if self.live.is_started:
            super().stop()


class _Time(ProgressColumn):
    """The remaining time, after the end the elapsed time; both together are too wide for 80 columns."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(f"took {_clock(task.finished_time or 0.0)}")
        left = task.time_remaining
        return Text("" if left is None else f"{_clock(left)} left")


def _is_narrow(console: Console) -> bool:
    return console.width < 80


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=max(0, round(seconds))))


def progress_bar(console: Console) -> Progress:
    """Progress bars on this console, in a shorter form on narrow ones (60 columns)."""
    width = _NARROW_BAR if _is_narrow(console) else 30
    return _Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=width),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        _Time(Column(no_wrap=True)),
        console=console,
    )


class ShowProgress(Callback):
    def __init__(self, progress: Progress, title: str, rounds: int) -> None:
        self._progress = progress
        self._title, self._rounds = title, rounds
        self._bar: TaskID | None = None  # created with the first round, so that errors are printed before it
        self._accuracy = ""
        self._epsilon = ""
        self._told = time.monotonic()

    def round_starts(self, at: At, cohort: Sequence[int]) -> str | None:
        if self._bar is None and at.round > 1:
            console = self._progress.console
            console.print(f"{self._title}: resumed from round {at.round} of {self._rounds}", soft_wrap=True)
        self._shown(at.round - 1)
        return None

    def round_ends(self, end: RoundEnd) -> None:
        bar = self._shown(end.at.round - 1)  # a round on a cluster only reports its end
        if end.metrics.get("accuracy") is not None:
            word = "" if _is_narrow(self._progress.console) else "accuracy "
            self._accuracy = f"{word}{100 * end.metrics['accuracy']:5.2f} %"
        if end.metrics.get("epsilon") is not None:
            self._epsilon = f"ε {end.metrics['epsilon']:.2f}"
        else:  # that of an earlier round: it is not computed after every one, and never falls
            self._epsilon = self._epsilon.replace("ε ", "ε≥")
        status = f"{self._accuracy}  {self._epsilon}".strip()
        self._progress.update(bar, completed=end.at.round, status=status)
        self._print_line(end.at.round, status)

    def _print_line(self, done: int, status: str) -> None:
        """Print a line at intervals where no bar can be drawn: in a log file, under nohup or Slurm."""
        console, now = self._progress.console, time.monotonic()
        if console.is_terminal or now - self._told < LINE_SECONDS:
            return
        self._told = now
        console.print(f"{self._title}: round {done} of {self._rounds}  {status}".rstrip(), soft_wrap=True)

    def _shown(self, done: int) -> TaskID:
        if self._bar is None:
            self._bar = self._progress.add_task(self._title, total=self._rounds, completed=done, status="")
        return self._bar
