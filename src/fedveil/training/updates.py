"""One step of SGD as an in-place update of tensors.

`w <- w - lr * (gradient + weight_decay * w + proximal * (w - w0) + correction)`, optionally with momentum. It is linear
in the gradient, so if the gradient is a product of two factors, product and update are one operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedveil.tree import Params

if TYPE_CHECKING:
    from torch import Tensor

AddGradient = Callable[["Tensor", float, float], object]
"""`add(target, keep, scale)` makes `target` in place `keep * target + scale * gradient`."""


@dataclass(frozen=True)
class Running:
    """The tensors that a step reads and writes, all in the same order of clients."""

    w: Params
    anchor: Params
    velocity: Params | None
    shift: Params | None

    @property
    def count(self) -> int:
        return next(iter(self.w.values())).shape[0]

    def first(self, active: int) -> Running:
        """Views of the clients that have not finished."""

        def cut(tree: Params) -> Params:
            return {name: leaf[:active] for name, leaf in tree.items()}

        return Running(
            cut(self.w),
            cut(self.anchor),
            None if self.velocity is None else cut(self.velocity),
            None if self.shift is None else cut(self.shift),
        )


@dataclass(frozen=True)
class Update:
    lr: float
    momentum: float
    weight_decay: float
    proximal: float
    trainable: frozenset[str]

    def apply(self, state: Running, name: str, add_gradient: AddGradient) -> None:
        """One step of this parameter, in place."""
        w = state.w[name]
        pull = self.weight_decay + self.proximal
        if state.velocity is None:
            add_gradient(w, 1 - self.lr * pull, -self.lr)
            target, scale = w, -self.lr
        else:
            target, scale = state.velocity[name], 1.0
            add_gradient(target, self.momentum, 1.0)
            if pull:
                target.add_(w, alpha=pull)
        if self.proximal:
            target.sub_(state.anchor[name], alpha=scale * self.proximal)
        if state.shift is not None:
            target.add_(state.shift[name], alpha=scale)
        if state.velocity is not None:
            w.sub_(target, alpha=self.lr)


def adding(gradient: Tensor) -> AddGradient:
    """The operation that adds an explicit gradient."""

    def add(target: Tensor, keep: float, scale: float) -> None:
        if keep != 1:
            target.mul_(keep)
        target.add_(gradient, alpha=scale)

    return add


def adding_sum(g: Tensor) -> AddGradient:
    """The operation that adds the gradient `g.sum(1)`, reading `g` when it is called."""

    def add(target: Tensor, keep: float, scale: float) -> None:
        adding(g.sum(1))(target, keep, scale)

    return add


def adding_product(g_transposed: Tensor, a: Tensor) -> AddGradient:
    """The operation that adds the gradient `g_transposed @ a` without forming it, reading both when it is called."""

    def add(target: Tensor, keep: float, scale: float) -> None:
        target.baddbmm_(g_transposed, a, beta=keep, alpha=scale)

    return add
