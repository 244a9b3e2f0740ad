"""Every registered method; importing this package makes their names known."""

from fedveil.methods import (
    centaur,
    cpsgd,
    dp_fedags,
    dp_fedags_proven,
    dp_fedavg,
    dp_fedsnlc,
    fedavg,
    fedceo,
    fedem,
    fedprox,
    fedsgd,
    ppsgd,
    scaffold,
    udp_fedavg,
)
from fedveil.methods.method import METHODS

__all__ = [
    "METHODS",
    "centaur",
    "cpsgd",
    "dp_fedags",
    "dp_fedags_proven",
    "dp_fedavg",
    "dp_fedsnlc",
    "fedavg",
    "fedceo",
    "fedem",
    "fedprox",
    "fedsgd",
    "ppsgd",
    "scaffold",
    "udp_fedavg",
]
