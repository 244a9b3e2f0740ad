"""torch, loaded at its first use: commands that compute with no tensor do not wait for it.

Modules that commands such as `fedveil list` and `fedveil account` import take `torch`, `nn` and `functional` from here,
and import `Tensor` for type checkers only. A module that defines an `nn.Module` imports torch itself, and is imported
where it is used.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import safetensors.torch as safetensors_torch
    import torch as torch
    from torch import nn as nn
    from torch.nn import functional as functional
else:

    class _Lazy(ModuleType):
        """A module that is imported when one of its names is asked for, and keeps the names it was asked for."""

        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module(self.__name__), name)
            setattr(self, name, value)
            return value

    torch = _Lazy("torch")
    nn = _Lazy("torch.nn")
    functional = _Lazy("torch.nn.functional")
    safetensors_torch = _Lazy("safetensors.torch")

__all__ = ["functional", "nn", "safetensors_torch", "torch"]
