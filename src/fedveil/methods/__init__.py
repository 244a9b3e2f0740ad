"""Every registered method; importing this package makes their names known."""

from fedveil.methods import fedavg, fedem, fedprox, fedsgd, scaffold, udp_fedavg
from fedveil.methods.method import METHODS

__all__ = ["METHODS", "fedavg", "fedem", "fedprox", "fedsgd", "scaffold", "udp_fedavg"]
