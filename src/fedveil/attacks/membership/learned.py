"""Attacks that learn to recognise members from a shadow model.

ML-Leaks: Salem et al. 2019, adversary 1: one shadow, the three largest probabilities, no label needed.
White-box: after Nasr, Shokri, Houmansadr 2019: loss, norm of the gradient and gradients of the last layer, over
all observed rounds. Deviation: both train a logistic regression, where the papers train small networks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.attacks.membership.threat_model import (
    Examples,
    MembershipView,
    half_of,
    log_probabilities,
    losses,
    register_membership,
    train_shadows,
)
from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.methods.fields import STRICT
from fedveil.task import Task
from fedveil.training.per_example import per_example_gradients
from fedveil.tree import Params, flat_rows, rows, without_axis

if TYPE_CHECKING:
    from torch import Tensor

Floats = npt.NDArray[np.float64]
_CHUNK = 64
_TINY = 1e-12


@register_membership("ml-leaks", "a classifier of the top three probabilities, trained on one shadow model")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class MLLeaks:
    top: Annotated[int, Field(ge=1)] = 3
    """Number of the largest probabilities that the classifier uses."""

    def __call__(self, view: MembershipView, rng: np.random.Generator) -> Tensor:
        inside, outside, shadow = _one_shadow(view, rng)

        def features(models: Params, examples: Examples) -> Tensor:
            log_p = log_probabilities(view.task, models, examples)
            kept = log_p.topk(min(self.top, log_p.shape[-1]), dim=-1).values
            return torch.cat([kept.exp(), kept.clamp(min=-30)], dim=-1)

        seen = features(view.models, view.asked)
        return _learned(features(shadow, inside)[0], features(shadow, outside)[0], seen)


@register_membership(
    "white-box", "a classifier of gradient norms and last-layer gradients, over the observed rounds"
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class WhiteBox:
    def __call__(self, view: MembershipView, rng: np.random.Generator) -> Tensor:
        inside, outside, shadow = _one_shadow(view, rng)
        seen = torch.stack(
            [
                gradient_features(view.task, rows(view.models, [r]), view.asked)
                for r in range(view.model_count)
            ]
        )
        members, others = (gradient_features(view.task, shadow, part) for part in (inside, outside))
        return _learned(members, others, seen)


def gradient_features(task: Task, model: Params, examples: Examples) -> Tensor:
    """For each example: loss, norms of the whole and of the last layer's gradient, and that layer's largest rows."""
    w = without_axis(model)
    last = _last_layer(w)
    found = []
    for i in range(0, len(examples), _CHUNK):
        part = examples.take(torch.arange(i, min(i + _CHUNK, len(examples))))
        gradients = per_example_gradients(task.module, w, part.x, part.y, loss=task.example_loss)
        whole = sum(
            (flat_rows(g).double().square().sum(1) for g in gradients.values()), torch.zeros(len(part))
        )
        per_class = (
            gradients[last].flatten(2).double().square().sum(2)
            if gradients[last].dim() > 2
            else gradients[last].double().square()
        )
        largest = per_class.topk(min(3, per_class.shape[1]), dim=1).values
        squares = torch.cat([whole.double()[:, None], per_class.sum(1, keepdim=True), largest], dim=1)
        found.append(torch.log(squares + _TINY) / 2)
    return torch.cat([torch.log(losses(task, model, examples)[0] + _TINY)[:, None], torch.cat(found)], dim=1)


def _last_layer(w: Params) -> str:
    """The weight of the last layer: the last matrix of the model."""
    matrices = [name for name, leaf in w.items() if leaf.dim() >= 2]
    return matrices[-1] if matrices else list(w)[-1]


def _one_shadow(view: MembershipView, rng: np.random.Generator) -> tuple[Examples, Examples, Params]:
    """The attacker's own examples split in half, and a model trained on the first half."""
    if len(view.own) < 4:
        raise InputError(
            "own", len(view.own), "are too few for a shadow model", "Give the attacker at least 4 examples."
        )
    inside, outside = half_of(len(view.own), rng)
    shadow = train_shadows(view.task, view.recipe, view.own, [inside], rng, view.start)
    return view.own.take(inside), view.own.take(outside), shadow


def _learned(members: Tensor, others: Tensor, seen: Tensor) -> Tensor:
    """The mean log odds of membership over the observed models, `[n]`, from features `[R, n, f]`."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    known: Floats = torch.cat([members, others]).numpy()
    labels = np.repeat([1, 0], [len(members), len(others)])
    scaler = StandardScaler().fit(known)
    judge = LogisticRegression(max_iter=2000).fit(scaler.transform(known), labels)
    odds = [judge.decision_function(scaler.transform(one.numpy())) for one in seen]
    return torch.from_numpy(np.mean(odds, axis=0))
