"""Callbacks for external trackers: TensorBoard and MLflow, each only if it is installed."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from fedveil.errors import InputError
from fedveil.session.loop import Callback, RoundEnd


class TensorBoardLog(Callback):
    """Writes every metric of a round to a TensorBoard folder."""

    def __init__(self, folder: Path) -> None:
        board = require_tensorboard(str(folder))
        try:
            self._writer: Any = board.SummaryWriter(str(folder))
        except OSError as error:
            reason = f"cannot be written: {error.strerror}"
            raise InputError("--tensorboard", str(folder), reason, "Give a folder.") from error

    def round_ends(self, end: RoundEnd) -> None:
        for name, value in numbers(end).items():
            self._writer.add_scalar(name, value, end.at.round)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MLflowLog(Callback):
    """Writes every metric of a round to an MLflow tracking store, one MLflow run per run."""

    def __init__(self, uri: str, experiment: str, name: str) -> None:
        flow = require_mlflow(uri)
        client = flow.tracking.MlflowClient(tracking_uri=uri)
        known = client.get_experiment_by_name(experiment)
        place = client.create_experiment(experiment) if known is None else known.experiment_id
        self._client: Any = client
        self._run: str = client.create_run(place, run_name=name).info.run_id

    def round_ends(self, end: RoundEnd) -> None:
        for name, value in numbers(end).items():
            self._client.log_metric(self._run, name, value, step=end.at.round)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def numbers(end: RoundEnd) -> dict[str, float]:
    """The finite numbers among a round's metrics."""
    return {
        name: float(value)
        for name, value in end.metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def require_tensorboard(folder: str) -> ModuleType:
    """Import the package; the error says how to install it."""
    return _optional("torch.utils.tensorboard", "--tensorboard", folder, "tensorboard")


def require_mlflow(uri: str) -> ModuleType:
    """Import the package, with telemetry off, and check that the store answers."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    flow = _optional("mlflow", "--mlflow", uri, "mlflow-skinny")
    try:
        with _without_retries():
            flow.tracking.MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            "--mlflow",
            uri,
            f"the store does not answer: {reason[0]}",
            "Give a database, such as sqlite:///mlflow.db (needs sqlalchemy and alembic), or a running server",
        ) from error
    return flow


@contextmanager
def _without_retries() -> Iterator[None]:
    """Ask once: MLflow's own retries would keep a mistyped address waiting for minutes."""
    names = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: value for name, value in names.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]


def _optional(module: str, option: str, value: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            option, value, f"{package} is not installed", f"Install it: pip install {package}"
        ) from error
