"""A progress bar on the terminal: rounds, accuracy, epsilon so far, time left."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedveil.run import Observer, RoundEnd


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )


class ShowProgress(Observer):
    def __init__(self, progress: Progress, title: str, rounds: int) -> None:
        self._progress = progress
        self._bar = progress.add_task(title, total=rounds, status="")
        self._accuracy = ""
        self._epsilon = ""

    def round_ends(self, end: RoundEnd) -> None:
        if end.metrics.get("accuracy") is not None:
            self._accuracy = f"accuracy {100 * end.metrics['accuracy']:5.2f} %"
        if end.metrics.get("epsilon") is not None:
            self._epsilon = f"ε {end.metrics['epsilon']:.2f}"
        self._progress.update(
            self._bar, completed=end.at.round, status=f"{self._accuracy}  {self._epsilon}".strip()
        )
