"""torch, imported at its first use, so that commands that need no tensor start without waiting for it.

Modules that commands such as `fedveil list` and `fedveil account` import take `torch`, `nn` and `functional` from here,
and import `Tensor` for type checkers only. A module that defines an `nn.Module` imports torch itself, and is imported
where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedveil.lazy_modules import LazyModule

if TYPE_CHECKING:
    import safetensors.torch as safetensors_torch
    import torch as torch
    from torch import nn as nn
    from torch.nn import functional as functional
else:
    torch = LazyModule("torch")
    nn = LazyModule("torch.nn")
    functional = LazyModule("torch.nn.functional")
    safetensors_torch = LazyModule("safetensors.torch")

__all__ = ["functional", "nn", "safetensors_torch", "torch"]
