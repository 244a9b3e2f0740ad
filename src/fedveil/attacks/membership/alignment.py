"""Membership from the alignment of an uploaded gradient with an example's own gradient.

A server that observes one client's upload computes the gradient of each candidate at the model that it sent.
"least-squares" fits the upload as a combination of all of them: members get weights near 1 / n_k, non-members near
zero. "cosine" compares each example separately. Against methods that add noise to some coordinates only, `trust_below`
makes the attack adaptive: clipped coordinates are smaller, so larger ones are noise and are left out; the rest of
DP-FedAGS's upload is the gradient without noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.attacks.membership.threat_model import Examples, MembershipView, register_membership
from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.methods.fields import STRICT
from fedveil.task import Task
from fedveil.training.per_example import per_example_gradients
from fedveil.tree import Params, flatten, without_axis

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 64


@register_membership("gradient-alignment", "whether an upload contains the example's own gradient")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class GradientAlignment:
    fit: Literal["least-squares", "cosine"] = "least-squares"
    """Whether the upload is fitted by all examples' gradients together, or compared with each separately."""
    trust_below: Annotated[float, Field(gt=0)] | None = None
    """Coordinates of at least this magnitude count as noise and are left out; default: none."""
    ridge: Annotated[float, Field(gt=0)] = 1e-3
    """Regularisation of the least squares."""

    def __call__(self, view: MembershipView, rng: np.random.Generator) -> Tensor:
        if view.sent is None or view.start is None:
            raise InputError(
                "target", "model", "this attack needs a client's upload", 'Use target = "upload".'
            )
        sent = flatten(view.sent)[0]
        trusted = torch.arange(len(sent))
        if self.trust_below is not None:
            trusted = (sent.abs() <= self.trust_below).nonzero()[:, 0]
        kept = sent[trusted].double()
        own = _gradients(view.task, view.start, view.asked, trusted)
        along = own.double() @ kept
        if self.fit == "cosine":
            norms: Tensor = torch.linalg.vector_norm(own.double(), dim=1) * torch.linalg.vector_norm(kept)
            return along / norms.clamp(min=1e-300)
        gram = (own @ own.T).double()
        level = self.ridge * gram.diagonal().mean().clamp(min=1e-300)
        weights: Tensor = torch.linalg.solve(gram + level * torch.eye(len(gram), dtype=torch.float64), along)
        return weights


def _gradients(task: Task, start: Params, examples: Examples, places: Tensor) -> Tensor:
    """Each example's own gradient at these coordinates, `[n, len(places)]`."""
    w = without_axis(start)
    found = []
    for i in range(0, len(examples), _CHUNK):
        part = examples.take(torch.arange(i, min(i + _CHUNK, len(examples))))
        whole = flatten(per_example_gradients(task.module, w, part.x, part.y, loss=task.example_loss))
        found.append(whole.index_select(1, places))
    return torch.cat(found)
