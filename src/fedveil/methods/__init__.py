"""All built-in methods by name; a method's module is imported at its first use."""

from fedveil.methods.method import METHODS

_MODULES = (
    ("centaur", "centaur"),
    ("dp-fedags", "dp_fedags"),
    ("cpsgd", "cpsgd"),
    ("dp-fedags-proven", "dp_fedags_proven"),
    ("dp-fedavg", "dp_fedavg"),
    ("dp-fedprox", "dp_fedprox"),
    ("dp-fedsgd", "dp_fedsgd"),
    ("dp-fedsnlc", "dp_fedsnlc"),
    ("dsc", "dsc"),
    ("fedavg", "fedavg"),
    ("fedceo", "fedceo"),
    ("feddm", "feddm"),
    ("fedsgd", "fedsgd"),
    ("fedem", "fedem"),
    ("fedlap", "fedlap"),
    ("fedlap-dp", "fedlap"),
    ("fedprox", "fedprox"),
    ("ppsgd", "ppsgd"),
    ("psg", "psg"),
    ("scaffold", "scaffold"),
    ("udp-fedavg", "udp_fedavg"),
)
"""The names of methods and the modules here that register them, in the order of tables and pictures."""

METHODS.offer({name: f"{__name__}.{module}" for name, module in _MODULES})

__all__ = ["METHODS"]
