"""What a server knows of a method from its public configuration: how clients train, and how they defend."""

from __future__ import annotations

import math
from typing import Any

from fedveil.attacks.view import Adaptation, LocalSteps
from fedveil.methods.dp_fedags import DPFedAGS
from fedveil.methods.dp_fedags_proven import DPFedAGSProven
from fedveil.methods.dp_fedavg import DPFedAvg
from fedveil.methods.dp_fedprox import DPFedProx
from fedveil.methods.dp_fedsnlc import DPFedSNLC
from fedveil.methods.fedceo import FedCEO
from fedveil.methods.fedprox import FedProx
from fedveil.methods.fields import LocalTraining
from fedveil.methods.method import AnyMethod, At
from fedveil.methods.ppsgd import PPSGD
from fedveil.methods.scaffold import Scaffold
from fedveil.methods.uploads import innermost
from fedveil.methods.user_level import UserLevelAveraging
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
from fedveil.privacy.releases import GaussianNoise, RandomGaussianNoise, Release
from fedveil.training.local_sgd import scheduled_lr
from fedveil.training.private_sgd import accumulated_noise

_UNTOUCHED = 0.02  # of the clip: DP-FedAGS noises larger coordinates of a gradient and leaves the rest bare


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
    """How a method's clients train between two messages; None if they do not.

    Scaffold's correction and PPSGD's personal part are not of the configuration: see `recorded`.
    """
    inner: Any = innermost(method)
    if isinstance(inner, (DPFedProx, Scaffold)):
        lr = scheduled_lr(inner.lr, inner.lr_schedule, at.round, at.plan.rounds)
        if isinstance(inner, Scaffold):
            return LocalSteps(lr, inner.batch_size, inner.epochs, steps=inner.local_steps)
        return LocalSteps(lr, inner.batch_size, inner.epochs, proximal=inner.proximal)
    if not isinstance(inner, LocalTraining):
        return None
    lr = inner.lr_at(at)
    if isinstance(inner, DPFedAvg) and inner.unit == "record":
        return LocalSteps(lr, None, steps=inner.steps())  # Poisson batches: on average every step reads all
    if isinstance(inner, PPSGD):
        lr *= (inner.lr + inner.personal_lr) / inner.lr  # both parts move
    return LocalSteps(
        lr,
        inner.batch_size,
        inner.epochs,
        inner.momentum,
        inner.weight_decay,
        inner.local_steps,
        inner.proximal if isinstance(inner, FedProx) else 0.0,
        _clip_of_gradient(inner, lr),
    )


def _clip_of_gradient(inner: Any, lr: float) -> float | None:
    """The norm to which a client's update is cut, read as a gradient; None where it is not cut, or record by record."""
    clip = float(getattr(inner, "clip", math.inf))
    if not math.isfinite(clip) or getattr(inner, "unit", "client") == "record":
        return None
    if isinstance(inner, (DPFedAGS, DPFedAGSProven, DPFedSNLC)):
        return clip
    return clip * float(getattr(inner, "server_lr", 1.0)) / (sent_share(inner) * lr)


def sent_share(method: AnyMethod) -> float:
    """What of its model's change a client sends, as a factor: some multiply by `server_lr`, PPSGD keeps a part."""
    inner = innermost(method)
    if not isinstance(inner, (UserLevelAveraging, FedCEO)):
        return 1.0
    kept = inner.personal_lr if isinstance(inner, PPSGD) else 0.0
    return inner.server_lr * inner.lr / (inner.lr + kept)


def adaptation_to(method: AnyMethod, at: At, dimension: int, examples: int) -> Adaptation:
    """How an attacker who knows the configuration adapts to its outermost defence, or to its declared noise."""
    for defence in defences_of(method):
        if isinstance(defence, (GradientMasking, GradientPruning)):
            return Adaptation("mask")
        if isinstance(defence, SignCompression):
            return Adaptation("sign")
        std = _noise_of(defence, dimension, examples)
        if std > 0:
            return Adaptation("noise", std)
    inner = innermost(method)
    if isinstance(inner, (DPFedAGS, DPFedSNLC)):
        return Adaptation("small", limit=_UNTOUCHED * inner.clip)
    if isinstance(inner, DPFedAGSProven) and inner.variant != "everywhere":
        return Adaptation("mask")
    std = declared_noise(method, at, examples)
    return Adaptation("noise", std) if std > 0 else Adaptation()


def declared_noise(method: AnyMethod, at: At, examples: int) -> float:
    """The standard deviation that the declared noise has in each entry of what the server reads as a gradient.

    Every method is judged by what it declares to disclose to the server, in units of its clip; 0 if it declares no
    Gaussian noise there. Noise on each step of local training adds up over the steps.
    """
    inner: Any = innermost(method)
    clip = float(getattr(inner, "clip", math.inf))
    if not math.isfinite(clip):
        return 0.0
    for release in method.releases(at.plan):
        multiplier = _multiplier(release)
        if multiplier > 0 and "server" in release.visible_to and release.happens_in(at.round):
            return multiplier * clip * _entry_scale(method, inner, release, at, examples)
    return 0.0


def _multiplier(release: Release) -> float:
    noise = release.protection
    if isinstance(noise, GaussianNoise):
        return noise.multiplier
    if isinstance(noise, RandomGaussianNoise):
        drawn = zip(noise.multipliers, noise.weights, strict=True)
        return math.sqrt(math.fsum(weight * value**2 for value, weight in drawn))
    return 0.0


def _entry_scale(method: AnyMethod, inner: Any, release: Release, at: At, examples: int) -> float:
    """What one unit of clipped noise becomes in the upload, read as a gradient."""
    local = local_steps(method, at)
    if local is None:
        return 1 / examples if release.unit == "record" else 1.0
    if isinstance(inner, DPFedAGSProven):
        return 1.0  # it clips and noises the accumulated gradient, not the update
    if isinstance(inner, DPFedAvg) and release.unit == "record":
        return math.sqrt(inner.steps()) / max(1.0, inner.record_rate * examples)
    of_update = float(getattr(inner, "server_lr", 1.0)) / (sent_share(method) * local.lr)
    if release.unit == "client":
        return of_update
    assert local.batch_size is not None
    return of_update * accumulated_noise(local.lr, local.batch_size, local.epochs, local.momentum, examples)


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
