"""Makes the node that finds this on its path misbehave, as FEDVEIL_TEST_FAULT says. For tests only."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

_APP = "fedveil.federation.client_app"


def _spoil(fault: str) -> None:
    import torch

    from fedveil.engines.flower import node
    from fedveil.engines.worker import ClientWorker

    update = ClientWorker.update

    def spoilt(self: ClientWorker, ids: Any, down: Any, known: Any, at: Any) -> Any:
        up, after = update(self, ids, down, known, at)
        if fault == "nan":
            up = up.map(lambda _, leaf: leaf * torch.nan if leaf.is_floating_point() else leaf)
        elif fault == "shape":
            up = up.map(lambda _, leaf: leaf[..., :-1] if leaf.dim() > 2 else leaf)
        elif fault == "size":
            up = up.map(lambda _, leaf: leaf.repeat(1, 1, 999) if leaf.dim() == 3 else leaf)
        elif fault == "late" and at.round == 2:
            mark = Path(os.environ["FEDVEIL_TEST_MARK"])
            mark.touch()
            while mark.exists():  # until the test deletes it
                time.sleep(0.2)
        return up, after

    ClientWorker.update = spoilt  # type: ignore[method-assign]
    if fault == "version":
        vars(node)["VERSION"] = "9.9.9"
    elif fault == "model":
        vars(node)["fingerprint"] = lambda *_: "0" * 16


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: Any) -> Any:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        _spoil(os.environ["FEDVEIL_TEST_FAULT"])
        self._inner.exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _APP:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if "FEDVEIL_TEST_FAULT" in os.environ:
    sys.meta_path.insert(0, _Finder())
