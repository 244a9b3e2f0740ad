"""All built-in wrappers by name; a wrapper's module is imported at its first use."""

from fedveil.methods.wrappers.wrapper import WRAPPERS, Rule, WrappedMethod, Wrapper

_MODULES = (
    ("model-average", "averaging"),
    ("low-pass", "averaging"),
    ("server-momentum", "averaging"),
    ("gradient-gaussian", "defences"),
    ("gradient-laplace", "defences"),
    ("ppfa", "defences"),
    ("ldpm", "defences"),
    ("gradient-masking", "defences"),
    ("sign-compression", "defences"),
    ("gradient-pruning", "defences"),
    ("dp-sgd", "defences"),
    ("displacement-denoise", "denoising"),
)
"""The names of wrappers and the modules here that register them."""

WRAPPERS.offer({name: f"{__name__}.{module}" for name, module in _MODULES})

__all__ = ["WRAPPERS", "Rule", "WrappedMethod", "Wrapper"]
