"""Optimisers over a stack of candidates. Rows are independent: a stack gives the results of single runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedveil.attacks.view import StepCallback
from fedveil.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

_SNAPSHOTS = 6
_BETAS, _EPSILON = (0.9, 0.999), 1e-8
_DECAYS = (3 / 8, 5 / 8, 7 / 8)  # shares of the steps after which the learning rate is divided by ten


@dataclass(frozen=True)
class Optimised:
    """The final variables, each row's loss `[N]`, and (step, first variable) at intermediate steps."""

    variables: list[Tensor]
    loss: Tensor
    path: tuple[tuple[int, Tensor], ...]


def snapshot_steps(steps: int) -> set[int]:
    """The steps of snapshots: the start, the end, and evenly spaced steps between."""
    return {round(part * steps / (_SNAPSHOTS - 1)) for part in range(_SNAPSHOTS)}


def stacked_adam(
    variables: Sequence[Tensor],
    objective: Callable[[Sequence[Tensor]], Tensor],
    *,
    steps: int,
    lr: float,
    with_gradient: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    signed: bool = False,
    box: tuple[Tensor, Tensor] | None = None,
    decay: bool = True,
    callback: StepCallback | None = None,
) -> Optimised:
    """Adam on every row; `signed` keeps only the signs of gradients; `box` bounds the first variable.
    Without `decay` the learning rate is constant. `with_gradient` has the objective and its gradient with respect to
    the only variable; without it the objective is differentiated.

    A gradient that is not finite counts as zero, since repeated local training may diverge.
    """
    leaves = [variable.detach().clone().requires_grad_(with_gradient is None) for variable in variables]
    moments = [_Moments(leaf) for leaf in leaves]
    milestones = [int(steps * part) for part in _DECAYS] if decay else []
    wanted = snapshot_steps(steps)
    path = [(0, leaves[0].detach().clone())]
    loss = torch.zeros(leaves[0].shape[0])
    for step in range(1, steps + 1):
        if with_gradient is None:
            loss = objective(leaves)
            # Rows share no variables, so the gradient of the sum has each row's own gradient.
            found = torch.autograd.grad(loss.sum(), leaves)
        else:
            loss, along = with_gradient(leaves[0])
            found = (along,)
        length = lr * 0.1 ** sum(step > milestone for milestone in milestones)
        with torch.no_grad():
            for leaf, moment, g in zip(leaves, moments, found, strict=True):
                finite = torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0)
                moment.move(leaf, finite.sign_() if signed else finite, length)
            if box is not None:
                leaves[0].clamp_(box[0], box[1])
        if step in wanted:
            path.append((step, leaves[0].detach().clone()))
        if callback is not None:
            callback(step, steps, float(loss.detach().min()))
    return Optimised([leaf.detach() for leaf in leaves], objective(leaves).detach(), tuple(path))


class _Moments:
    """Adam's moments of one variable, and its step, with the arithmetic of `torch.optim.Adam`.

    Attacks take thousands of steps on variables of a few hundred numbers, where the bookkeeping of torch's optimiser
    takes as long as its arithmetic.
    """

    def __init__(self, leaf: Tensor) -> None:
        self._mean = torch.zeros_like(leaf, requires_grad=False)
        self._square = torch.zeros_like(self._mean)
        self._steps = 0

    def move(self, leaf: Tensor, g: Tensor, lr: float) -> None:
        self._steps += 1
        self._mean.lerp_(g, 1 - _BETAS[0])
        self._square.mul_(_BETAS[1]).addcmul_(g, g, value=1 - _BETAS[1])
        root = math.sqrt(1 - _BETAS[1] ** self._steps)
        size = self._square.sqrt().div_(root).add_(_EPSILON)
        leaf.addcdiv_(self._mean, size, value=-lr / (1 - _BETAS[0] ** self._steps))


def stacked_lbfgs(
    start: Tensor,
    objective: Callable[[Tensor], Tensor],
    *,
    iterations: int,
    lr: float = 1.0,
    history: int = 100,
    target: float = 0.0,
    groups: int = 1,
    callback: StepCallback | None = None,
) -> Optimised:
    """L-BFGS without line search on every row of `start [N, d]`; the best point of each row is kept.

    Rows that diverge keep their best point. Ends early when each group of `N / groups` consecutive rows has one with
    a loss of at most `target`.
    """
    x = start.detach().clone()
    best, best_loss = x.clone(), x.new_full((x.shape[0],), torch.inf)
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []
    scale = x.new_ones(x.shape[0], 1)
    before: Tensor | None = None
    moved = torch.zeros_like(x)
    wanted = snapshot_steps(iterations)
    path = [(0, x.clone())]
    for step in range(1, iterations + 1):
        point = x.detach().requires_grad_()
        loss = objective(point)
        (g,) = torch.autograd.grad(loss.sum(), point)
        loss = loss.detach()
        alive = torch.isfinite(loss) & torch.isfinite(g).all(1)
        better = alive & (loss < best_loss)
        best = torch.where(better[:, None], x, best)
        best_loss = torch.where(better, loss, best_loss)
        if callback is not None:
            callback(step, iterations, float(best_loss.min()))
        if bool((best_loss.reshape(groups, -1).amin(1) <= target).all()):
            break
        g = torch.where(alive[:, None], g, torch.zeros_like(g))
        if before is None:
            length = lr * torch.minimum(torch.ones_like(loss), 1 / g.abs().sum(1).clamp(min=1e-30))
        else:
            change = g - before
            product = (change * moved).sum(1, keepdim=True)
            sound = alive[:, None] & (product > 1e-10)
            inverse = torch.where(sound, 1 / product.clamp(min=1e-10), torch.zeros_like(product))
            pairs = [*pairs[-history + 1 :], (moved, change, inverse)]
            curvature = product / change.square().sum(1, keepdim=True).clamp(min=1e-30)
            scale = torch.where(sound, curvature, scale)
            length = torch.full_like(loss, lr)
        direction = _two_loops(-g, pairs, scale)
        moved = torch.where(alive[:, None], direction * length[:, None], torch.zeros_like(x))
        before = g
        x = x + moved
        if step in wanted:
            path.append((step, best.clone()))
    return Optimised([best], best_loss, tuple(path))


def _two_loops(direction: Tensor, pairs: Sequence[tuple[Tensor, Tensor, Tensor]], scale: Tensor) -> Tensor:
    """The inverse Hessian of the pairs (step, change of gradient, 1 / their product) times the direction."""
    factors = []
    for moved, change, inverse in reversed(pairs):
        factor = (moved * direction).sum(1, keepdim=True) * inverse
        direction = direction - factor * change
        factors.append(factor)
    direction = direction * scale
    for (moved, change, inverse), factor in zip(pairs, reversed(factors), strict=True):
        back = (change * direction).sum(1, keepdim=True) * inverse
        direction = direction + moved * (factor - back)
    return direction
