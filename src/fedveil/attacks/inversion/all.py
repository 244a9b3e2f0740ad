"""All inversion attacks; importing this module registers them."""

from fedveil.attacks.inversion import analytic, gias, gradinversion, inverting_gradients, leakage
from fedveil.attacks.text import lamp, rows

__all__ = ["analytic", "gias", "gradinversion", "inverting_gradients", "lamp", "leakage", "rows"]
