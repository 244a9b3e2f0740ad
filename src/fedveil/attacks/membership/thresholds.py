"""Attacks that need only the model: members have a lower loss and a higher confidence.

Yeom et al. 2018 (loss); Gu, Bai, Xu 2022 (confidences over the rounds of a federated run, averaged here).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic.dataclasses import dataclass

from fedveil.attacks.membership.threat_model import (
    MembershipView,
    log_probabilities,
    losses,
    register_membership,
)
from fedveil.methods.fields import STRICT

if TYPE_CHECKING:
    from torch import Tensor


@register_membership("loss-threshold", "a low loss, or a high confidence, discloses a member")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class LossThreshold:
    """Scores by the mean over all observed models; "confidence" uses the largest probability and needs no label."""

    statistic: Literal["loss", "confidence"] = "loss"
    """The statistic: the loss, or the largest probability, which needs no label."""

    def __call__(self, view: MembershipView, rng: np.random.Generator) -> Tensor:
        if self.statistic == "confidence":
            return log_probabilities(view.task, view.models, view.asked).amax(-1).mean(0)
        return -losses(view.task, view.models, view.asked).mean(0)
