"""The modules of dp-accounting that are needed, without what of its import is read by other calls only.

Its package imports everything it has, and its modules import `scipy.stats`, `scipy.signal` and `scipy.optimize`, which
take most of a command's start; of these, Gaussian noise needs three functions of the normal distribution. So the
modules are imported under an empty package, and a `LazyModule` stands for each part of SciPy that is not loaded yet:
the first call that reads it loads it. Afterwards `import dp_accounting` and `import scipy.stats` are what they always
are.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy

from fedveil.lazy_modules import LazyModule


@dataclass(frozen=True)
class Normal:
    """What dp-accounting calls of `scipy.stats.norm(scale=scale)`.

    Guarantees: the same bits (`test_the_normal_distribution_has_the_bits_of_scipy`).
    """

    scale: float

    def cdf(self, x: Any) -> Any:
        from scipy.special import ndtr

        return ndtr(x / self.scale)

    def logcdf(self, x: Any) -> Any:
        from scipy.special import log_ndtr

        return log_ndtr(x / self.scale)

    def ppf(self, probability: Any) -> Any:
        from scipy.special import ndtri

        return ndtri(probability) * self.scale


_OF_NUMPY = ("numpy.f2py", "numpy.testing", "numpy.polynomial")
"""SciPy's array namespace takes over every attribute of NumPy, and with it these parts, which nothing here reads."""


def _stand_ins() -> dict[str, ModuleType]:
    names = ("scipy.optimize", "scipy.signal", "scipy.stats", *_OF_NUMPY)
    found: dict[str, ModuleType] = {name: LazyModule(name) for name in names}
    vars(found["scipy.stats"])["norm"] = Normal
    spec = importlib.util.find_spec("dp_accounting")
    if spec is not None:
        found["dp_accounting"] = importlib.util.module_from_spec(spec)  # not executed
    return {name: module for name, module in found.items() if name not in sys.modules}


_found = _stand_ins()
_parts = {name.rpartition(".")[2]: _found[name] for name in _OF_NUMPY if name in _found}
sys.modules.update(_found)
vars(numpy).update(_parts)
try:
    from dp_accounting import rdp
    from dp_accounting.dp_event import GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import common, pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as pld
    from dp_accounting.privacy_accountant import NeighboringRelation
    from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
finally:
    for _name, _module in _found.items():
        if sys.modules.get(_name) is _module:
            del sys.modules[_name]
    for _name, _module in _parts.items():
        if vars(numpy).get(_name) is _module:
            delattr(numpy, _name)

__all__ = [
    "GaussianDpEvent",
    "LaplaceDpEvent",
    "NeighboringRelation",
    "PoissonSampledDpEvent",
    "common",
    "compute_delta",
    "pld",
    "pld_pmf",
    "rdp",
]
