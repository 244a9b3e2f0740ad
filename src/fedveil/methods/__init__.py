"""Every registered method; importing this package makes their names known."""

from fedveil.methods import (
    cpsgd,
    dp_fedags,
    dp_fedags_proven,
    dp_fedavg,
    dp_fedsnlc,
    fedavg,
    fedprox,
    fedsgd,
    scaffold,
    udp_fedavg,
)
from fedveil.methods.method import METHODS

__all__ = [
    "METHODS",
    "cpsgd",
    "dp_fedags",
    "dp_fedags_proven",
    "dp_fedavg",
    "dp_fedsnlc",
    "fedavg",
    "fedprox",
    "fedsgd",
    "scaffold",
    "udp_fedavg",
]
