"""What a client uploaded, read as a gradient: the same for every method whose upload says which way to step."""

from __future__ import annotations

from typing import Any

import torch

from fedveil.attacks.knowledge import local_steps, sent_share
from fedveil.attacks.view import LocalSteps
from fedveil.errors import InputError
from fedveil.messages import Message
from fedveil.methods.cpsgd import CpSGD, Levels, rotate_back
from fedveil.methods.dp_fedags_proven import Selected, scattered
from fedveil.methods.method import AnyMethod, At
from fedveil.methods.scaffold import Changes
from fedveil.methods.uploads import innermost
from fedveil.tree import Params, scale, unflatten


def as_gradient(
    method: AnyMethod, at: At, sent: Params, down: Any, up: Message
) -> tuple[Params, LocalSteps | None]:
    """The upload as a gradient at the model that was sent, and the local steps behind it if the client trained.

    A trained model or its change is divided by the local learning rate, and by the share of it that is sent.
    Coordinates that were not sent are zero.
    """
    local = local_steps(method, at)
    gradient: Params | None = getattr(up, "gradient", None)
    if gradient is not None:
        return gradient, local
    if local is not None:
        if isinstance(up, Selected):
            return _selected(up, down, sent), local
        change = _change(method, at, sent, up)
        if change is not None:
            return scale(change, -1 / (sent_share(method) * local.lr)), local
    raise InputError(
        "method",
        method.name,
        "its uploads carry no gradient and no trained model, so there is nothing to invert",
        "Attack a method that sends gradients or models, such as fedsgd, fedem or fedavg.",
    )


def _change(method: AnyMethod, at: At, sent: Params, up: Message) -> Params | None:
    """By how much the client's model moved; None if the upload does not tell."""
    inner = innermost(method)
    if isinstance(up, Levels) and isinstance(inner, CpSGD):
        turned = up.levels.double() * inner.spacing(up.levels.shape[1])
        size = sum(leaf[0].numel() for leaf in sent.values())
        return unflatten(rotate_back(turned, at.round, size).to(next(iter(sent.values())).dtype), sent)
    update: Params | None = getattr(up, "update", None)
    if update is not None:
        return update
    params: Params | None = getattr(up, "params", None)
    if params is None or isinstance(up, Changes):
        return params
    return {name: leaf - sent[name] for name, leaf in params.items()}


def _selected(up: Selected, down: Any, sent: Params) -> Params:
    size = sum(leaf[0].numel() for leaf in sent.values())
    places = up.own.get("places", down.mask.get("places"))
    if places is None:
        places = torch.arange(size).unsqueeze(0)
    return unflatten(scattered(up.values, places, size), sent)
