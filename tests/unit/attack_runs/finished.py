"""Runs on the digits with a transcript."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedveil.experiment.config import make_config
from fedveil.experiment.run import run_seed


def finished(tmp_path: Path, method: dict[str, Any], **more: Any) -> Path:
    config = make_config(
        {
            "task": {"dataset": "digits", "model": "logistic"} | more.pop("task", {}),
            "partition": more.pop("partition", {"kind": "iid", "clients": 300}),
            "method": method,
            "run": {"rounds": 2, "cohort": 2, "transcript": True} | more.pop("run", {}),
            **more,
        }
    )
    result = run_seed(config, 0, experiment="unit", results=tmp_path)
    assert result.folder is not None
    return result.folder
