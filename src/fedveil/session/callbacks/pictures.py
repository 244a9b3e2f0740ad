"""Pictures that a run leaves in its folder for the report, drawn by its method from what went over the wire."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedveil.data.dataset import Dataset
from fedveil.messages import Message
from fedveil.methods.method import AnyMethod, At
from fedveil.session.loop import Callback


class DrawPictures(Callback):
    """Saves the pictures of every exchange that the method has something to show of, under `folder`."""

    def __init__(self, method: AnyMethod, dataset: Dataset, folder: Path) -> None:
        self._method, self._dataset, self._folder = method, dataset, folder

    @property
    def reads_uploads(self) -> bool:
        return False  # a method that draws its uploads sends no sums of them

    def exchange_ends(self, at: At, cohort: Sequence[int], down: Message, up: Message | None) -> None:
        figures = {} if up is None else self._method.pictures(at, up, self._dataset)
        if not figures:
            return
        from fedveil.figures.figure import save_figure  # most methods draw nothing, and need not wait for it

        for name, figure in figures.items():
            save_figure(figure, self._folder / f"{name}.png")
