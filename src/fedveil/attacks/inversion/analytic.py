"""The input of a first linear layer, computed from its gradient.

For one example, row i of the weight's gradient is `g_i x` and entry i of the bias' gradient is `g_i`: their quotient
is x (Aono et al. 2017; Geiping et al. 2020, Proposition 3.1).

Against a known defence the rows are combined by least squares without the coordinates that it removed, since other
rows may still have them. A pixel without any coordinate left is replaced by that of the mean public image.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np
from pydantic.dataclasses import dataclass

from fedveil.attacks.inversion.labels import known_or_inferred
from fedveil.attacks.inversion.restarts import Clock, Named, best_of, make_rows
from fedveil.attacks.registry import register_attack
from fedveil.attacks.view import Finding, ServerView, StepCallback
from fedveil.errors import InputError
from fedveil.lazy_torch import nn, torch
from fedveil.methods.disclosure import Adaptation
from fedveil.methods.fields import STRICT

if TYPE_CHECKING:
    from torch import Tensor


@register_attack(
    "analytic", "divides the first linear layer's gradient by its bias' gradient: exact for one example"
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Analytic(Named):
    def __call__(
        self, view: ServerView, rng: np.random.Generator, callback: StepCallback | None = None
    ) -> Finding:
        clock = Clock()
        weight, bias = first_linear(view)
        if view.examples != 1:
            raise InputError(
                "examples",
                view.examples,
                "the quotient mixes the examples of a batch",
                "Attack single examples.",
            )
        dw, db = view.observed[weight].double(), view.observed[bias].double()
        blank = (
            torch.zeros(dw.shape[2]).to(dw) if view.public is None else view.public.to(dw).mean(0).flatten()
        )
        if view.adaptation.kind == "none":
            x = _quotient(dw, db, blank)
        else:
            x = _least_squares(dw, db, view.adaptation, blank)
        labels, notes = known_or_inferred(view, rng)
        rows = make_rows(view, 1, labels)
        images = x.reshape(view.targets, 1, *view.input_shape)
        if callback is not None:
            callback(1, 1, 0.0)
        return best_of(
            self,
            rows,
            images,
            torch.zeros(view.targets),
            labels,
            [(1, images)],
            steps=1,
            clock=clock,
            notes=notes,
        )


def _quotient(dw: Tensor, db: Tensor, blank: Tensor) -> Tensor:
    """The row of the largest bias gradient, `[T, pixels]`; `blank` where no bias has a gradient."""
    t, largest = torch.arange(len(db), device=db.device), db.abs().argmax(1)
    divisor = db[t, largest, None]
    return torch.where(divisor != 0, dw[t, largest] / divisor, blank)


def _least_squares(dw: Tensor, db: Tensor, known: Adaptation, blank: Tensor) -> Tensor:
    """`sum_i dW_ij db_i / sum_i db_i^2` over the remaining coordinates of pixel j; `blank` if there are none."""
    bare, kept = torch.ones_like(dw), torch.ones_like(db)
    if known.kind in ("mask", "small"):
        bare, kept = (_bare(leaf, known).to(leaf) for leaf in (dw, db))
    weight = db * kept
    total = (bare * weight.square().unsqueeze(-1)).sum(1)
    along = (bare * dw * weight.unsqueeze(-1)).sum(1)
    return torch.where(total > 0, along / total.clamp(min=1e-300), blank)


def _bare(leaf: Tensor, known: Adaptation) -> Tensor:
    return leaf != 0 if known.kind == "mask" else leaf.abs() <= known.limit


def first_linear(view: ServerView) -> tuple[str, str]:
    """The names of weight and bias of the layer that reads the image itself."""
    for name, layer in view.task.module.named_modules():
        if next(layer.parameters(recurse=False), None) is None:
            continue
        reads_image = isinstance(layer, nn.Linear) and layer.in_features == prod(view.input_shape)
        if reads_image and layer.bias is not None:
            prefix = f"{name}." if name else ""
            return f"{prefix}weight", f"{prefix}bias"
        break
    raise InputError(
        "attack",
        "analytic",
        "the model does not begin with a linear layer with bias that reads the whole image",
        "Use inverting-gradients or idlg.",
    )
