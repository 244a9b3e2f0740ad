"""Does an uploaded gradient point where the example's own gradient points?

A server that sees one client's upload takes the gradient of each example in question at the model it had sent,
and its cosine with what came back: a member has added its own. Against methods that noise some coordinates only,
`trust_below` makes it adaptive: a clipped gradient has no coordinate that large, so larger ones are noise and
are left out; what remains of DP-FedAGS's upload is the bare gradient.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedveil.attacks.membership.view import MembershipView, register_membership
from fedveil.errors import InputError
from fedveil.methods.fields import STRICT
from fedveil.training.per_example import per_example_gradients
from fedveil.tree import Params, flatten, without_axis

_CHUNK = 64


@register_membership("gradient-alignment", "the cosine of an upload with each example's own gradient")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class GradientAlignment:
    trust_below: Annotated[float, Field(gt=0)] | None = None

    def __call__(self, view: MembershipView, rng: np.random.Generator) -> Tensor:
        if view.sent is None or view.start is None:
            raise InputError(
                "target", "model", "this attack reads a client's upload", 'Use target = "upload".'
            )
        sent = flatten(view.sent)[0].double()
        trusted = (
            torch.ones_like(sent, dtype=torch.bool)
            if self.trust_below is None
            else sent.abs() <= self.trust_below
        )
        kept = torch.where(trusted, sent, 0.0)
        scores = []
        w: Params = without_axis(view.start)
        for i in range(0, len(view.asked), _CHUNK):
            part = view.asked.take(torch.arange(i, min(i + _CHUNK, len(view.asked))))
            own = flatten(
                per_example_gradients(view.task.module, w, part.x, part.y, loss=view.task.example_loss)
            )
            own = torch.where(trusted, own.double(), 0.0)
            norm = (torch.linalg.vector_norm(own, dim=1) * torch.linalg.vector_norm(kept)).clamp(min=1e-300)
            scores.append((own @ kept) / norm)
        return torch.cat(scores)
