"""What an upload amounts to: the model its sender would have, in whatever form it was sent.

For those who look at the wire, attacks and audits; no method needs it.
"""

from __future__ import annotations

from typing import Any

import torch

from fedveil.errors import InputError
from fedveil.messages import Message
from fedveil.methods.cpsgd import CpSGD, Levels, rotate_back
from fedveil.methods.dp_fedags_proven import ModelAndMask, Selected, scattered
from fedveil.methods.method import AnyMethod, At
from fedveil.methods.scaffold import Changes
from fedveil.training.local_sgd import Schedule, scheduled_lr
from fedveil.tree import Params, add, expand, unflatten


def innermost(method: AnyMethod) -> AnyMethod:
    """The method inside all wrappers."""
    inner: Any = method
    while hasattr(inner, "inner"):
        inner = inner.inner
    found: AnyMethod = inner
    return found


def uploaded_models(method: AnyMethod, at: At, down: Message, up: Message) -> tuple[Params, Params]:
    """The models that the clients were sent, and those that their uploads amount to, both `[K, ...]`."""
    method = innermost(method)
    sent: Params | None = getattr(down, "params", None)
    if sent is None:
        raise InputError("method", method.name, "sends no model", "Look at its final model instead.")
    start = expand(sent, up.count)
    size = sum(leaf[0].numel() for leaf in start.values())
    schedule: Schedule = getattr(method, "lr_schedule", "constant")
    lr = scheduled_lr(getattr(method, "lr", 1.0), schedule, at.round, at.plan.rounds)
    if isinstance(up, Selected):
        assert isinstance(down, ModelAndMask)
        everywhere = {"places": torch.arange(size).unsqueeze(0)}
        places = (up.own or down.mask or everywhere)["places"]
        return start, add(start, unflatten(scattered(up.values, places, size), start), scale=-lr)
    if isinstance(up, Levels):
        assert isinstance(method, CpSGD)
        steps = up.levels.double() * method.spacing(up.levels.shape[1])
        like = next(iter(start.values()))
        return start, add(start, unflatten(rotate_back(steps, at.round, size).to(like.dtype), start))
    if isinstance(up, Changes):
        return start, add(start, up.params)
    for field, factor in (("params", None), ("update", 1.0), ("gradient", -lr)):
        leaves: Params | None = getattr(up, field, None)
        if leaves is not None:
            return start, leaves if factor is None else add(start, leaves, scale=factor)
    raise InputError(
        "method", method.name, "uploads nothing that amounts to a model", "Look at its final model instead."
    )
