"""Every registered method; importing this package makes their names known."""

from fedveil.methods import centaur, fedavg, fedceo, fedprox, fedsgd, ppsgd, scaffold, udp_fedavg
from fedveil.methods.method import METHODS

__all__ = ["METHODS", "centaur", "fedavg", "fedceo", "fedprox", "fedsgd", "ppsgd", "scaffold", "udp_fedavg"]
