"""Scripts of `experiments/` as modules, for tests of what they compute."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2] / "experiments"


def experiment_script(path: str) -> ModuleType:
    """The script at this path under `experiments/`, loaded afresh."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
