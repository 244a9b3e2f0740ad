"""Is an uploaded gradient made up of the example's own gradient?

A server that sees one client's upload takes the gradient of each example in question at the model it had sent.
"least-squares" writes the upload as a combination of them all: members get weights near 1 / n_k, others near zero.
"cosine" compares each example alone. Against methods that noise some coordinates only, `trust_below` makes the
attack adaptive: clipping leaves no coordinate that large, so larger ones are noise and are left out; what remains
of DP-FedAGS's upload is the bare gradient.
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


@register_membership("gradient-alignment", "whether an upload is made up of the example's own gradient")
@dataclass(frozen=True, kw_only=True, config=STRICT)
class GradientAlignment:
    fit: Literal["least-squares", "cosine"] = "least-squares"
    """Whether the upload is written as a combination of all examples' gradients, or compared with each alone."""
    trust_below: Annotated[float, Field(gt=0)] | None = None
    """Coordinates of at least this size count as noise and are left out; none if not given."""
    ridge: Annotated[float, Field(gt=0)] = 1e-3
    """Regularisation of the least squares."""

    def __call__(self, view: MembershipView, rng: np.random.Generator) -> Tensor:
        if view.sent is None or view.start is None:
            raise InputError(
                "target", "model", "this attack reads a client's upload", 'Use target = "upload".'
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
