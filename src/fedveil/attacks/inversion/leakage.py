"""DLG and iDLG: L-BFGS on the squared distance of gradients.

Zhu, Liu, Han: Deep Leakage from Gradients. NeurIPS 2019. Zhao, Mopuri, Bilen: iDLG. 2020.

Deviations: restarts run as one stack in double precision, and the best point on the way is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from fedveil.attacks.inversion.labels import known_or_inferred
from fedveil.attacks.inversion.matching import candidate_gradients, squared_distance
from fedveil.attacks.inversion.optimise import Optimised, stacked_lbfgs
from fedveil.attacks.inversion.restarts import Clock, Named, Rows, best_images, best_of, make_rows
from fedveil.attacks.registry import register_attack
from fedveil.attacks.view import Finding, ServerView, StepCallback
from fedveil.lazy_torch import torch
from fedveil.methods.fields import STRICT

if TYPE_CHECKING:
    from torch import Tensor

Restarts = Annotated[int, Field(ge=1, le=256, description="starts for each upload, run as one stack")]


def _run(rows: Rows, start: Tensor, soft: bool, attack: Leakage, callback: StepCallback | None) -> Optimised:
    local = rows.view.local
    distance = squared_distance(rows.observed, rows.view.adaptation, None if local is None else local.clip)
    orders = rows.orders
    pixels = start[0].numel() - (rows.view.examples * rows.view.classes if soft else 0)

    def objective(flat: Tensor) -> Tensor:
        x = flat[:, :pixels].reshape(rows.shape)
        y = rows.labels
        if soft:
            y = torch.softmax(flat[:, pixels:].reshape(rows.count, rows.view.examples, -1), dim=-1)
        return distance(candidate_gradients(rows.view, x, y, orders))

    return stacked_lbfgs(
        start,
        objective,
        iterations=attack.steps,
        lr=attack.lr,
        target=attack.target,
        groups=rows.view.targets,
        callback=callback,
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Leakage(Named):
    steps: Annotated[int, Field(ge=1, description="iterations of L-BFGS")] = 600
    restarts: Restarts = 4
    lr: Annotated[float, Field(gt=0)] = 1.0
    """Step size of L-BFGS."""
    target: Annotated[
        float, Field(ge=0, description="squared distance at which an upload counts as solved")
    ] = 1e-12


@register_attack(
    "dlg", "L-BFGS on the squared distance of gradients; images and soft labels are both guessed"
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class DLG(Leakage):
    def __call__(
        self, view: ServerView, rng: np.random.Generator, callback: StepCallback | None = None
    ) -> Finding:
        clock = Clock()
        view = view.double()
        rows = make_rows(view, self.restarts, torch.zeros(view.targets, view.examples, dtype=torch.long))
        logits = rows.spread(rng, view.examples * view.classes)
        found = _run(rows, torch.cat([rows.noise(rng).flatten(1), logits], dim=1), True, self, callback)
        flat = found.variables[0]
        pixels = flat.shape[1] - logits.shape[1]
        labels = flat[:, pixels:].reshape(rows.count, view.examples, -1).argmax(-1)
        path = [(step, x[:, :pixels]) for step, x in found.path]
        return best_of(
            self,
            rows,
            flat[:, :pixels],
            found.loss,
            labels,
            path,
            steps=self.steps,
            clock=clock,
            notes=("labels guessed with the images",),
        )


@register_attack(
    "idlg", "L-BFGS on the squared distance of gradients; labels are known or read off the last layer"
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class IDLG(Leakage):
    def __call__(
        self, view: ServerView, rng: np.random.Generator, callback: StepCallback | None = None
    ) -> Finding:
        clock = Clock()
        view = view.double()
        labels, notes = known_or_inferred(view, rng)
        rows = make_rows(view, self.restarts, labels)
        found = _run(rows, rows.noise(rng).flatten(1), False, self, callback)
        return best_images(self, rows, found, steps=self.steps, clock=clock, notes=notes)
