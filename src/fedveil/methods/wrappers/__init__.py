"""Every registered wrapper; importing this package makes their names known."""

from fedveil.methods.wrappers import averaging, denoising
from fedveil.methods.wrappers.wrapper import WRAPPERS, Rule, WrappedMethod

__all__ = ["WRAPPERS", "Rule", "WrappedMethod", "averaging", "denoising"]
