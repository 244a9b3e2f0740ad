"""Denoising of the displacement from the public initial model: updates are low-rank, privacy noise is not."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic.dataclasses import dataclass

from fedveil.lazy_torch import torch
from fedveil.methods.fields import STRICT, PositiveFinite
from fedveil.methods.wrappers.wrapper import Memory, Rule, Step, wrapper
from fedveil.tree import Params

if TYPE_CHECKING:
    from torch import Tensor


@wrapper(
    "displacement-denoise", "shrinks the singular values of what training changed at the edge of the noise"
)
@dataclass(frozen=True, kw_only=True, config=STRICT)
class DisplacementDenoise(Rule):
    """`w(0) + shrink(w(t) - w(0))` for every weight matrix; vectors are unchanged.

    Noise of standard deviation s in every entry of a d x h matrix has singular values up to the edge
    (sqrt(d) + sqrt(h)) s. `soft` lowers every singular value by the edge; `optimal` by the expected contribution of
    the noise (Gavish, Donoho: Optimal Shrinkage of Singular Values. IEEE Trans. Inf. Theory 2017, Frobenius loss).
    `noise` is s after one round (it grows with the root of the rounds), or is estimated from the median singular
    value. `resume` lets training continue from the denoised model; otherwise only the released model is denoised.
    """

    noise: PositiveFinite | Literal["estimate"] = "estimate"
    """Standard deviation of the noise after one round, or "estimate" from the singular values."""
    shrinkage: Literal["soft", "optimal"] = "soft"
    """How singular values shrink: "soft" by the edge of the noise, "optimal" by its expected contribution."""
    resume: bool = False
    """Whether training continues from the denoised model; otherwise only the released model is denoised."""

    def start(self, params: Params) -> Memory:
        return dict(params)

    def step(self, round: int, memory: Memory, before: Params, after: Params) -> Step:
        released = {
            name: leaf if leaf.dim() < 2 else memory[name] + self._shrink(leaf - memory[name], round)
            for name, leaf in after.items()
        }
        return Step(memory, released, resume=released if self.resume else None)

    def _shrink(self, moved: Tensor, round: int) -> Tensor:
        matrix = moved.flatten(1).double()
        small, large = sorted(matrix.shape)
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        if self.noise == "estimate":
            std = float(values.median()) / math.sqrt(large * marchenko_pastur_median(small / large))
        else:
            std = self.noise * math.sqrt(round)
        if std == 0:
            return moved
        if self.shrinkage == "soft":
            kept = (values - std * (math.sqrt(small) + math.sqrt(large))).clamp_min(0)
        else:
            kept = optimal_singular_values(values / (std * math.sqrt(large)), small / large)
            kept = kept * std * math.sqrt(large)
        shrunk: Tensor = (left * kept) @ right
        return shrunk.reshape(moved.shape).to(moved.dtype)


def optimal_singular_values(values: Tensor, ratio: float) -> Tensor:
    """The shrunk singular values, in units of s sqrt(longer side): zero up to the edge 1 + sqrt(ratio)."""
    inside = (values.square() - ratio - 1).square() - 4 * ratio
    shrunk: Tensor = inside.clamp_min(0).sqrt() / values.clamp_min(torch.finfo(values.dtype).tiny)
    return torch.where(values > 1 + math.sqrt(ratio), shrunk, torch.zeros_like(values))


@lru_cache(maxsize=64)
def marchenko_pastur_median(ratio: float) -> float:
    """The median eigenvalue of the Gram matrix of pure noise, in units of s^2 times the longer side."""
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    # With x = middle - radius cos(angle) the density is smooth up to both ends.
    angle = torch.linspace(0, math.pi, 20_001, dtype=torch.float64)
    x = (low + high) / 2 - (high - low) / 2 * torch.cos(angle)
    density = torch.sin(angle).square() / x.clamp_min(1e-300)
    mass = torch.cumulative_trapezoid(density, angle)
    middle = int(torch.searchsorted(mass, mass[-1] / 2))
    return float(x[middle + 1])
