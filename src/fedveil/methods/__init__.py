"""Every registered method; importing this package makes their names known."""

from fedveil.methods import (
    centaur,
    dp_fedprox,
    dsc,
    fedavg,
    fedceo,
    feddm,
    fedem,
    fedlap,
    fedprox,
    fedsgd,
    ppsgd,
    psg,
    scaffold,
    udp_fedavg,
)
from fedveil.methods.method import METHODS

__all__ = [
    "METHODS",
    "centaur",
    "dp_fedprox",
    "dsc",
    "fedavg",
    "fedceo",
    "feddm",
    "fedem",
    "fedlap",
    "fedprox",
    "fedsgd",
    "ppsgd",
    "psg",
    "scaffold",
    "udp_fedavg",
]
