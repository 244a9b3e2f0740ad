"""Every registered method; importing this package makes their names known."""

from fedveil.methods import fedavg, fedprox, fedsgd, scaffold, udp_fedavg
from fedveil.methods.method import METHODS

__all__ = ["METHODS", "fedavg", "fedprox", "fedsgd", "scaffold", "udp_fedavg"]
