"""Private federated learning: train over many clients' data, and know how private that was."""

from fedveil.data.client_data import ArrayClients, ClientData, LazyClients
from fedveil.data.registry import load_dataset
from fedveil.errors import FedveilError
from fedveil.methods.method import METHODS, At, Method, register
from fedveil.models.registry import make_model, register_model
from fedveil.partition.registry import make_partition
from fedveil.partition.share import share
from fedveil.prediction.trained import TrainedModel, load
from fedveil.privacy.releases import Plan, Release
from fedveil.secure_sum.settings import SecureSum
from fedveil.session.options import PrivacySettings
from fedveil.session.privacy_guard import privacy_statement
from fedveil.session.results import Result
from fedveil.session.run import make_plan, run
from fedveil.task import Batch, Task

__all__ = [
    "METHODS",
    "ArrayClients",
    "At",
    "Batch",
    "ClientData",
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
