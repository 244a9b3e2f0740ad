"""Every inversion attack; importing this module makes their names known."""

from fedveil.attacks.inversion import analytic, gias, gradinversion, inverting_gradients, leakage
from fedveil.attacks.text import lamp, rows

__all__ = ["analytic", "gias", "gradinversion", "inverting_gradients", "lamp", "leakage", "rows"]
