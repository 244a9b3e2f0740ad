"""The callbacks of a command's runs besides the progress bar: the live page, TensorBoard, MLflow."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from fedveil.experiment.config import Config
from fedveil.privacy.releases import Plan
from fedveil.session.callbacks.trackers import MLflowLog, TensorBoardLog, require_mlflow, require_tensorboard
from fedveil.session.loop import Callback

if TYPE_CHECKING:
    from fedveil.report.live_page import LiveView


class RunCallbacks:
    """The requested callbacks, opened before the first run and closed after the last, also if one fails."""

    def __init__(
        self, *, live: bool = False, tensorboard: Path | None = None, mlflow: str | None = None
    ) -> None:
        if tensorboard is not None:
            require_tensorboard(str(tensorboard))
        if mlflow is not None:
            require_mlflow(mlflow)
        self._view: LiveView | None = None
        if live:
            from fedveil.report.live_page import LiveView  # slow to import

            self._view = LiveView()
        self._tensorboard = tensorboard
        self._mlflow = mlflow
        self._stack = ExitStack()

    @property
    def url(self) -> str | None:
        """The address of the live page, if there is one."""
        return None if self._view is None else self._view.url

    def __enter__(self) -> RunCallbacks:
        if self._view is not None:
            self._stack.enter_context(self._view)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def of_run(self, folder: Path, config: Config, plan: Plan) -> list[Callback]:
        """The callbacks of the run in this folder, which the live page follows from now on."""
        experiment, identity, seed = folder.parts[-3:]
        title = f"{experiment}: {config.method['name']}, {seed.replace('-', ' ')}"
        if self._view is not None:
            from fedveil.report.live_page import Followed

            section = config.privacy
            self._view.follow(folder, Followed(title, plan.rounds, section.budget, section.delta))
        out: list[Callback] = []
        if self._tensorboard is not None:
            board = TensorBoardLog(self._tensorboard / f"{experiment}-{identity}-{seed}")
            self._stack.callback(board.close)
            out.append(board)
        if self._mlflow is not None:
            flow = MLflowLog(self._mlflow, experiment, title)
            self._stack.callback(flow.close)
            out.append(flow)
        return out
