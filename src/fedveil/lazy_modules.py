"""Modules that are imported at their first use: most commands end without needing them."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """A module that is imported when one of its names is asked for, and keeps the names it was asked for."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:  # it stands for the module there, too
            del sys.modules[self.__name__]
        value = getattr(import_module(self.__name__), name)
        setattr(self, name, value)
        return value
