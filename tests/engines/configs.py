"""Small experiments for every engine."""

from __future__ import annotations

from typing import Any

from fedveil import METHODS
from fedveil.experiment.config import Config, make_config
from fedveil.methods.method import field_names
from tests.contract.federation import QUICK

COMPARED = ("fedavg", "udp-fedavg", "fedceo", "fedlap-dp", "dp-fedags", "fedem")


def quick_config(name: str, engine: str = "simulation", *, clients: int = 4, **run: Any) -> Config:
    """Two rounds of a method on a few digits; one thread and one client at a time, so that bits can be compared."""
    known = set(field_names(METHODS[name]))
    wanted = QUICK | {"batch_size": 32, "block": 2, "perturbation_steps": 3}
    fields = {key: value for key, value in wanted.items() if key in known}
    for field in METHODS[name](**fields).unused_fields():  # a configuration with one is refused
        fields.pop(field, None)
    section = {"rounds": 2, "cohort": min(3, clients), "engine": engine, "execution": "one-by-one"}
    return make_config(
        {
            "task": {
                "dataset": "digits",
                "model": "mlp-2",
                "data_options": {"max_train": 240, "max_test": 100},
            },
            "partition": {"kind": "dirichlet", "clients": clients},
            "method": {"name": name} | fields,
            "run": section | {"workers": 1, "checkpoint_every": 1} | run,
        }
    )
