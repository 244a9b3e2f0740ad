"""Figures that a run saves in its folder for the report, drawn by its method from the messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedveil.data.dataset import Dataset
from fedveil.messages import Message
from fedveil.methods.method import AnyMethod, At
from fedveil.session.loop import Callback


class DrawPictures(Callback):
    """Saves the method's figures of every exchange under `folder`."""

    def __init__(self, method: AnyMethod, dataset: Dataset, folder: Path) -> None:
        self._method, self._dataset, self._folder = method, dataset, folder

    @property
    def reads_uploads(self) -> bool:
        return False  # a method that draws uploads defines no exact sum of them

    def exchange_ends(self, at: At, cohort: Sequence[int], down: Message, up: Message | None) -> None:
        figures = {} if up is None else self._method.pictures(at, up, self._dataset)
        if not figures:
            return
        from fedveil.figures.figure import save_figure  # slow to import, and most methods draw nothing

        for name, figure in figures.items():
            save_figure(figure, self._folder / f"{name}.png")
