"""What a server knows of a method from its public configuration: how clients train, and how they defend."""

from __future__ import annotations

import math
from typing import Any

from fedveil.attacks.view import Adaptation, LocalSteps
from fedveil.methods.dp_fedags import DPFedAGS
from fedveil.methods.fields import LocalTraining
from fedveil.methods.method import AnyMethod, At
from fedveil.methods.udp_fedavg import UDPFedAvg, upload_multiplier
from fedveil.methods.wrappers.defences import (
    DPSGD,
    LDPM,
    PPFA,
    Defence,
    Defended,
    GradientGaussian,
    GradientLaplace,
    GradientMasking,
    GradientPruning,
    SignCompression,
)

_UNTOUCHED = (
    0.02  # DP-FedAGS noises the larger coordinates of a gradient clipped to 1 and leaves the rest bare
)


def innermost(method: AnyMethod) -> AnyMethod:
    """The method inside all wrappers."""
    inner: Any = method
    while hasattr(inner, "inner"):
        inner = inner.inner
    found: AnyMethod = inner
    return found


def defences_of(method: AnyMethod) -> list[Defence]:
    """The defences around a method, outermost first."""
    found: list[Defence] = []
    layer: Any = method
    while hasattr(layer, "inner"):
        if isinstance(layer, Defended):
            found.append(layer.defence)
        layer = layer.inner
    return found


def local_steps(method: AnyMethod, at: At) -> LocalSteps | None:
    """How a method's clients train between two messages; None if they do not."""
    inner = innermost(method)
    if not isinstance(inner, LocalTraining):
        return None
    return LocalSteps(inner.lr_at(at), inner.batch_size, inner.epochs, inner.momentum, inner.weight_decay)


def adaptation_to(method: AnyMethod, at: At, dimension: int, examples: int) -> Adaptation:
    """How an attacker who knows the configuration adapts to its outermost defence."""
    for defence in defences_of(method):
        if isinstance(defence, (GradientMasking, GradientPruning)):
            return Adaptation("mask")
        if isinstance(defence, SignCompression):
            return Adaptation("sign")
        std = _noise_of(defence, dimension, examples)
        if std > 0:
            return Adaptation("noise", std)
    inner = innermost(method)
    if isinstance(inner, DPFedAGS):
        return Adaptation("small", limit=_UNTOUCHED)
    if isinstance(inner, UDPFedAvg) and math.isfinite(inner.clip) and inner.noise_multiplier > 0:
        share = upload_multiplier(inner.noise_multiplier, inner.noise_scope, at.plan)
        return Adaptation("noise", inner.server_lr * inner.clip * share / inner.lr_at(at))
    return Adaptation()


def _noise_of(defence: Defence, dimension: int, examples: int) -> float:
    """The standard deviation of what a defence adds to each coordinate."""
    if isinstance(defence, GradientGaussian):
        return defence.std
    if isinstance(defence, GradientLaplace):
        return defence.scale * math.sqrt(2)
    if isinstance(defence, PPFA):
        return defence.length(dimension) / math.sqrt(dimension)
    if isinstance(defence, LDPM):
        return defence.std / math.sqrt(defence.kept)
    if isinstance(defence, DPSGD) and math.isfinite(defence.clip):
        return defence.clip * defence.noise_multiplier / examples
    return 0.0
