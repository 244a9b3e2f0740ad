"""Your own methods and models in a Python file of yours, for every command.

Only the person at the command line names such files, by `--plugin` or FEDVEIL_PLUGINS: a configuration, a result folder
or a server never can, so none of them can make this machine run code.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fedveil.errors import InputError

VARIABLE = "FEDVEIL_PLUGINS"


def load_plugins(paths: Sequence[Path]) -> None:
    """Run these files and those of FEDVEIL_PLUGINS, each once; child processes run the same ones."""
    named = [Path(text) for text in os.environ.get(VARIABLE, "").split(os.pathsep) if text]
    wanted = list(dict.fromkeys(path.resolve() for path in [*named, *paths]))
    for path in wanted:
        _load(path)
    if wanted:
        os.environ[VARIABLE] = os.pathsep.join(map(str, wanted))


def _load(path: Path) -> None:
    name = f"fedveil_plugin_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return
    if not path.is_file() or path.suffix != ".py":
        raise InputError("--plugin", str(path), "is not a Python file", "Give the path of a .py file.")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while they are made
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InputError(
            "--plugin", str(path), f"fails with {type(error).__name__}: {error}", "Fix the file."
        ) from error
