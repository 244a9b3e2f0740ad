"""Private federated learning: train over many clients' data, and know how private that was.

Names are imported at their first use, so that commands that need no torch do not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedveil.data.client_data import ArrayClients, ClientData, LazyClients
    from fedveil.data.registry import load_dataset
    from fedveil.errors import FedveilError
    from fedveil.features.feature_map import as_features
    from fedveil.methods.method import METHODS, At, Method, register
    from fedveil.models.registry import make_model, register_model
    from fedveil.partition.registry import make_partition
    from fedveil.partition.share import share
    from fedveil.prediction.trained import TrainedModel, load
    from fedveil.privacy.releases import Plan, Release
    from fedveil.secure_sum.settings import SecureSum
    from fedveil.session.options import EarlyStopping, PrivacySettings
    from fedveil.session.privacy_guard import privacy_statement
    from fedveil.session.results import Result
    from fedveil.session.run import make_plan, run
    from fedveil.task import Batch, Task

_PLACES = {
    "data.client_data": ("ArrayClients", "ClientData", "LazyClients"),
    "data.registry": ("load_dataset",),
    "errors": ("FedveilError",),
    "features.feature_map": ("as_features",),
    "methods": ("METHODS",),
    "methods.method": ("At", "Method", "register"),
    "models.registry": ("make_model", "register_model"),
    "partition.registry": ("make_partition",),
    "partition.share": ("share",),
    "prediction.trained": ("TrainedModel", "load"),
    "privacy.releases": ("Plan", "Release"),
    "secure_sum.settings": ("SecureSum",),
    "session.options": ("EarlyStopping", "PrivacySettings"),
    "session.privacy_guard": ("privacy_statement",),
    "session.results": ("Result",),
    "session.run": ("make_plan", "run"),
    "task": ("Batch", "Task"),
}
_PLACE = {name: place for place, names in _PLACES.items() for name in names}

__all__ = [
    "METHODS",
    "ArrayClients",
    "At",
    "Batch",
    "ClientData",
    "EarlyStopping",
    "FedveilError",
    "LazyClients",
    "Method",
    "Plan",
    "PrivacySettings",
    "Release",
    "Result",
    "SecureSum",
    "Task",
    "TrainedModel",
    "as_features",
    "load",
    "load_dataset",
    "make_model",
    "make_partition",
    "make_plan",
    "privacy_statement",
    "register",
    "register_model",
    "run",
    "share",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACE:
        raise AttributeError(f"module 'fedveil' has no attribute {name!r}")
    value = getattr(import_module(f"fedveil.{_PLACE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
