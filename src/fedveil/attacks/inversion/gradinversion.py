"""GradInversion: gradient matching with priors on images, on batch-norm statistics and among restarts.

Yin, Mallya, Vahdat, Alvarez, Kautz, Molchanov: See through Gradients: Image Batch Recovery via GradInversion.
CVPR 2021.

Deviations: cosine distance and signed steps in place of the l2 distance with noise; the restarts agree on their
pixel-wise mean, without registration of shifted images. Batch-norm statistics are used where the model has them:
such models can be attacked (`Task(..., frozen_statistics=True)`), fedveil does not train them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.attacks.inversion.inverting_gradients import Steps, Weight
from fedveil.attacks.inversion.labels import known_or_inferred
from fedveil.attacks.inversion.leakage import Restarts
from fedveil.attacks.inversion.matching import total_variation, upload_cosine
from fedveil.attacks.inversion.optimise import stacked_adam
from fedveil.attacks.inversion.restarts import Clock, Named, best_images, make_rows
from fedveil.attacks.registry import register_attack
from fedveil.attacks.view import Finding, ServerView, StepCallback
from fedveil.lazy_torch import nn, torch
from fedveil.methods.fields import STRICT

if TYPE_CHECKING:
    from torch import Tensor


def batch_norm_distance(view: ServerView) -> Callable[[Tensor], Tensor] | None:
    """The distance of the candidates' batch statistics from the stored ones, `[N]`, for candidates `[N, B, ...]`.

    None if the model keeps no such statistics.
    """
    module = view.task.module
    layers = [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    layers = [layer for layer in layers if layer.running_mean is not None]
    if not layers:
        return None

    def distance(x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        hooks = [
            layer.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
            for layer in layers
        ]
        try:
            torch.func.functional_call(module, view.params, (x.flatten(0, 1),))
        finally:
            for hook in hooks:
                hook.remove()
        total = x.new_zeros(x.shape[0])
        for layer, inputs in zip(layers, seen, strict=True):
            values = inputs.reshape(*x.shape[:2], inputs.shape[1], -1).transpose(1, 2).flatten(2)
            assert layer.running_mean is not None
            assert layer.running_var is not None
            mean = values.mean(2) - layer.running_mean
            spread = values.var(2, correction=0) - layer.running_var
            total = total + mean.norm(dim=1) + spread.norm(dim=1)
        return total

    return distance


def group_distance(x: Tensor, restarts: int) -> Tensor:
    """The mean squared distance of each row from the mean of the restarts of its upload."""
    groups = x.reshape(-1, restarts, *x.shape[1:])
    centre = groups.detach().mean(1, keepdim=True)
    return (groups - centre).square().flatten(2).mean(2).reshape(-1)


@register_attack(
    "gradinversion", "Inverting Gradients with batch-norm statistics and restarts that must agree"
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class GradInversion(Named):
    steps: Steps = 1600
    restarts: Restarts = 4
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Step size of Adam, in units of the pixel range."""
    tv: Weight = 1e-4
    """Weight of total variation, which prefers smooth images."""
    l2: Weight = 1e-6
    """Weight of the squared norm of the images."""
    batch_norm: Weight = 1e-2
    """Weight of the distance from stored batch-norm statistics."""
    group: Weight = 1e-2
    """Weight of the distance from the mean of all restarts."""
    group_from: Annotated[
        float, Field(ge=0, le=1, description="part of the steps before restarts must agree")
    ] = 0.5

    def __call__(
        self, view: ServerView, rng: np.random.Generator, callback: StepCallback | None = None
    ) -> Finding:
        clock = Clock()
        labels, notes = known_or_inferred(view, rng)
        rows = make_rows(view, self.restarts, labels)
        distance = upload_cosine(view, rows.observed, rows.labels, rows.orders)
        statistics = batch_norm_distance(view)
        image = len(view.input_shape) == 3
        step = 0

        def objective(variables: Sequence[Tensor]) -> Tensor:
            nonlocal step
            step += 1
            x = variables[0]
            loss = distance(x)
            if image:
                loss = loss + self.tv / view.unit * total_variation(x)
            loss = loss + self.l2 * x.square().flatten(1).sum(1)
            if statistics is not None:
                loss = loss + self.batch_norm * statistics(x)
            if self.restarts > 1 and self.group_from * self.steps <= step <= self.steps:
                loss = loss + self.group * group_distance(x, self.restarts)
            return loss

        found = stacked_adam(
            [rows.noise(rng)],
            objective,
            steps=self.steps,
            lr=self.lr * view.unit,
            signed=True,
            box=view.box,
            callback=callback,
        )
        used = (
            "batch-norm statistics used"
            if statistics is not None
            else "the model has no batch-norm statistics"
        )
        return best_images(self, rows, found, steps=self.steps, clock=clock, notes=(*notes, used))
