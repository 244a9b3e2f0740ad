"""Inverting Gradients: cosine distance, total variation, signed Adam within the pixel range.

Geiping, Bauermeister, Dröge, Moeller: Inverting Gradients: How easy is it to break privacy in federated learning?
NeurIPS 2020.

Deviations: restarts and uploads run as one stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.attacks.inversion.labels import known_or_inferred
from fedveil.attacks.inversion.leakage import Restarts
from fedveil.attacks.inversion.matching import WithGradient, closed_gradient, total_variation, upload_cosine
from fedveil.attacks.inversion.optimise import stacked_adam
from fedveil.attacks.inversion.restarts import Clock, Named, best_images, make_rows
from fedveil.attacks.registry import register_attack
from fedveil.attacks.view import Finding, ServerView, StepCallback
from fedveil.methods.fields import STRICT

if TYPE_CHECKING:
    from torch import Tensor

Steps = Annotated[int, Field(ge=1, description="steps of Adam")]
Weight = Annotated[float, Field(ge=0)]


@register_attack(
    "inverting-gradients", "cosine distance of gradients and total variation, signed Adam in the pixel box"
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class InvertingGradients(Named):
    steps: Steps = 1600
    restarts: Restarts = 1
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Step size of Adam, in units of the pixel range."""
    tv: Weight = 1e-4
    """Weight of total variation, which prefers smooth images."""
    signed: bool = True
    """Whether steps follow the sign of the gradient."""
    decay: bool = True
    """Whether the step size is cut to a tenth at 3/8, 5/8 and 7/8 of the steps."""

    def __call__(
        self, view: ServerView, rng: np.random.Generator, callback: StepCallback | None = None
    ) -> Finding:
        clock = Clock()
        labels, notes = known_or_inferred(view, rng)
        rows = make_rows(view, self.restarts, labels)
        distance = upload_cosine(view, rows.observed, rows.labels, rows.orders)
        smooth = self.tv / view.unit if len(view.input_shape) == 3 else 0.0

        def objective(variables: Sequence[Tensor]) -> Tensor:
            x = variables[0]
            return distance(x) + smooth * total_variation(x) if smooth else distance(x)

        found = stacked_adam(
            [rows.noise(rng)],
            objective,
            steps=self.steps,
            lr=self.lr * view.unit,
            with_gradient=_with_variation(closed_gradient(distance), smooth),
            signed=self.signed,
            box=view.box,
            decay=self.decay,
            callback=callback,
        )
        return best_images(self, rows, found, steps=self.steps, clock=clock, notes=notes)


def _with_variation(distance: WithGradient | None, smooth: float) -> WithGradient | None:
    """The distance plus `smooth` times the total variation, with its gradient; None if the distance has none."""
    if distance is None or not smooth:
        return distance

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        from fedveil.attacks.inversion.closed_form import variation_with_gradient

        loss, along = distance(x)
        variation, of_variation = variation_with_gradient(x)
        return loss.add_(variation, alpha=smooth), along.add_(of_variation, alpha=smooth)

    return both
