"""Plugin files: the user's own methods and models, for every command.

Plugin files are named only on the command line or in the environment (`--plugin`, FEDVEIL_PLUGINS), never by a
configuration, a results folder or a server, so none of these can make this machine run code.
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
    """Run these files and those of FEDVEIL_PLUGINS, each once; child processes inherit them."""
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
    sys.modules[name] = module  # dataclasses look up their module when they are defined
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InputError(
            "--plugin", str(path), f"fails with {type(error).__name__}: {error}", "Fix the file."
        ) from error
