"""LiRA: the likelihood ratio of the model's confidence under models trained with and without an example.

Carlini, Chien, Nasr, Song, Terzis, Tramer: Membership Inference Attacks From First Principles. S&P 2022, the
online attack. n shadow models are n clients of one stacked run, each trained on a random half of the candidates,
completed by the attacker's own examples to the size of the target's training set.

Deviation: with few shadows one variance is used for all examples, one for "in" and one for "out", as the paper
recommends below 64 shadows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.attacks.membership.threat_model import (
    Examples,
    MembershipView,
    log_probabilities,
    register_membership,
    train_shadows,
)
from fedveil.lazy_torch import torch
from fedveil.methods.fields import STRICT
from fedveil.task import Task
from fedveil.tree import Params

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_LOGIT = 30.0


@register_membership(
    "lira", "likelihood ratio of confidences with and without the example, from n shadow models"
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class LiRA:
    shadows: Annotated[int, Field(ge=2)] = 16
    """Shadow models, half of them trained with each example."""

    def __call__(self, view: MembershipView, rng: np.random.Generator) -> Tensor:
        asked = len(view.asked)
        inside = balanced_halves(self.shadows, asked, rng)
        fill = min(len(view.own), max(0, (view.recipe.examples or 0) - asked // 2))
        parts = [
            torch.cat([row.nonzero()[:, 0], asked + torch.from_numpy(rng.permutation(len(view.own))[:fill])])
            for row in inside
        ]
        shadows = train_shadows(view.task, view.recipe, view.asked + view.own, parts, rng, view.start)
        seen = logits(view.task, shadows, view.asked)
        target = logits(view.task, view.newest(), view.asked)[0]
        return likelihood_ratio(target, seen, inside)


def balanced_halves(shadows: int, examples: int, rng: np.random.Generator) -> Tensor:
    """The training examples of each shadow, `[S, n]`: every example is in a random half of the shadows."""
    ranks = rng.random((shadows, examples)).argsort(axis=0)
    return torch.from_numpy(ranks < shadows // 2)


def logits(task: Task, models: Params, examples: Examples) -> Tensor:
    """log(p / (1 - p)) of the true class's probability p, `[R, n]`, computed without cancellation."""
    log_p = log_probabilities(task, models, examples)
    true = examples.y.expand(log_p.shape[0], -1).unsqueeze(-1)
    right = log_p.gather(-1, true).squeeze(-1)
    wrong = log_p.scatter(-1, true, -torch.inf).logsumexp(-1)
    return (right - wrong).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)


def likelihood_ratio(target: Tensor, seen: Tensor, inside: Tensor) -> Tensor:
    """log N(target; in) - log N(target; out) for each example, with means per example and shared variances."""
    mean_in, var_in = _fit(seen, inside)
    mean_out, var_out = _fit(seen, ~inside)

    def log_density(mean: Tensor, var: Tensor) -> Tensor:
        return -((target - mean).square()) / (2 * var) - var.log() / 2

    return log_density(mean_in, var_in) - log_density(mean_out, var_out)


def _fit(seen: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    weight = chosen.to(seen.dtype)
    count = weight.sum(0).clamp(min=1)
    mean = (seen * weight).sum(0) / count
    spread = ((seen - mean).square() * weight).sum() / (weight.sum() - len(mean)).clamp(min=1)
    return mean, spread.clamp(min=1e-6)
