"""All built-in wrappers; importing this package registers them."""

from fedveil.methods.wrappers import averaging, defences, denoising
from fedveil.methods.wrappers.wrapper import WRAPPERS, Rule, WrappedMethod, Wrapper

__all__ = ["WRAPPERS", "Rule", "WrappedMethod", "Wrapper", "averaging", "defences", "denoising"]
