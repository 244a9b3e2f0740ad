"""Bounds on what one client or one example can contribute: the sensitivity that all noise derives from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedveil.errors import DivergedError, InputError
from fedveil.privacy.releases import GaussianNoise, Release
from fedveil.streams import Stream
from fedveil.tree import Params, flat_rows

# Rounding a scaled row to float32 may lengthen it by 2^-23 of its length; this much is taken off beforehand.
_MARGIN = {torch.float64: 2.0**-50, torch.float32: 2.0**-22, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
_SMALLEST_FACTOR = 1e-30
_HIDDEN: ContextVar[list[int] | None] = ContextVar("hidden divergence", default=None)


@contextmanager
def hidden_divergence() -> Iterator[list[int]]:
    """Within, a contribution that is not finite counts as zero instead of raising `DivergedError`.

    Whoever asked would learn from the error something of the data that no noise hides, and a server can choose a model
    that makes it happen. Zero is within every clip. The list tells the owner of the data how often it happened.
    """
    happened: list[int] = []
    token = _HIDDEN.set(happened)
    try:
        yield happened
    finally:
        _HIDDEN.reset(token)


def hide(not_finite: int) -> bool:
    """Whether so many contributions that are not finite shall count as zero; false: they are an error."""
    happened = _HIDDEN.get()
    if happened is None:
        return False
    happened.append(not_finite)
    return True


def _finite(params: Params) -> Params:
    """`params`, its rows (of all leaves together) zero where they must count as zero."""
    if _HIDDEN.get() is None:
        return params
    whole = torch.stack([flat_rows(leaf).isfinite().all(-1) for leaf in params.values()]).all(0)
    if bool(whole.all()):
        return params
    hide(int((~whole).sum()))
    return {
        name: leaf.where(whole.reshape(-1, *(1 for _ in leaf.shape[1:])), 0) for name, leaf in params.items()
    }


def check_clip(clip: float) -> float:
    if not (math.isfinite(clip) and clip > 0):
        raise InputError("clip", clip, "is not a bound", "Use a positive finite number.")
    return clip


def row_norms(leaves: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each row of all leaves together, in float64.

    Neither huge nor denormal values overflow or vanish: rows are scaled by their largest value where needed.
    """
    flat = [flat_rows(leaf.detach()) for leaf in leaves]
    norm = torch.stack([part.double().square().sum(-1) for part in flat]).sum(0).sqrt()
    if bool(((norm > 1e-150) & (norm < 1e150)).all()):
        return norm
    largest = torch.stack([part.abs().amax(-1).double() for part in flat]).amax(0)
    if not bool(torch.isfinite(largest).all()):
        raise DivergedError("a client's update is not finite: it cannot be clipped, so it is not released")
    unit = torch.where(largest > 0, largest, torch.ones_like(largest))
    squares = [(part.double() / unit.unsqueeze(-1)).square().sum(-1) for part in flat]
    return torch.stack(squares).sum(0).sqrt() * largest


def _shrink(leaf: Tensor, norm: Tensor, clip: float) -> Tensor:
    """`leaf` scaled so that rows of `norm` above `clip` come to at most `clip`; others stay as they are."""
    if bool((norm <= clip).all()):
        return leaf
    factor = torch.where(norm > clip, clip / norm * (1 - _MARGIN[leaf.dtype]), torch.ones_like(norm))
    shape = factor.shape + (1,) * (leaf.dim() - factor.dim())
    if bool((factor < _SMALLEST_FACTOR).any()):  # the factor itself would be denormal in float32
        return (leaf.double() * factor.reshape(shape)).to(leaf.dtype)
    return leaf * factor.to(leaf.dtype).reshape(shape)


def clip_rows(params: Params, clip: float) -> Params:
    """Each client's parameters `[K, ...]`, taken as one vector, to an L2 norm of at most `clip`.

    Rows within the bound are returned bit by bit; the others end within a millionth below it, never above.
    """
    params = _finite(params)
    norm = row_norms(list(params.values()))
    return {name: _shrink(leaf, norm, check_clip(clip)) for name, leaf in params.items()}


def clip_rows_l1(params: Params, clip: float) -> Params:
    """Each client's parameters, taken as one vector, to an L1 norm of at most `clip`."""
    params = _finite(params)
    norm = torch.stack([flat_rows(leaf.detach()).double().abs().sum(1) for leaf in params.values()]).sum(0)
    if not bool(torch.isfinite(norm).all()):
        raise DivergedError("a client's update is not finite: it cannot be clipped, so it is not released")
    return {name: _shrink(leaf, norm, check_clip(clip)) for name, leaf in params.items()}


@dataclass(frozen=True)
class AdaptiveClip:
    """A clip that follows a quantile of the clients' norms (Andrew et al. 2021), with its cost charged.

    Each client also sends whether its norm is within the clip, as +-1/2, so a client moves the sum by 1/2;
    the sum of the cohort gets noise of `bit_std`. The clip is then multiplied by
    exp(-`step` * (noisy fraction within - `quantile`)).
    """

    clip: float
    bit_std: float
    quantile: float = 0.5
    step: float = 0.2

    def __post_init__(self) -> None:
        check_clip(self.clip)
        if not 0 < self.quantile < 1:
            raise InputError("quantile", self.quantile, "is not between 0 and 1", "Use 0.5 for the median.")
        if not self.bit_std > 0:
            raise InputError("bit_std", self.bit_std, "gives no protection", "Use a twentieth of the cohort.")

    def bits(self, params: Params) -> Tensor:
        """+1/2 for the clients within the clip, -1/2 for the others, `[K]`."""
        return (row_norms(list(params.values())) <= self.clip).double() - 0.5

    def updated(self, bits: Tensor, expected_cohort: float, stream: Stream) -> AdaptiveClip:
        """The clip of the next round, from the noisy sum of the bits over the expected cohort."""
        noisy = float(bits.sum()) + self.bit_std * float(stream.standard_normal(1)[0])
        fraction = noisy / expected_cohort + 0.5
        return replace(self, clip=self.clip * math.exp(-self.step * (fraction - self.quantile)))

    def release(self) -> Release:
        """The disclosure of the bits, to be declared beside the update's own."""
        return Release(
            "the noisy count of clients within the clip",
            "client",
            ("observer", "client"),
            GaussianNoise(self.bit_std / 0.5),
            participation="hidden",
        )

    def update_multiplier(self, total: float) -> float:
        """The update's multiplier for which update and bits together cost as one Gaussian of `total`."""
        left = total**-2 - (self.bit_std / 0.5) ** -2
        if left <= 0:
            raise InputError(
                "bit_std",
                self.bit_std,
                "the bits alone cost more than the total",
                f"Use above {total / 2:g}.",
            )
        return 1 / math.sqrt(left)


def add_rows(params: Params, noise: Tensor) -> Params:
    """`params` plus the rows `[K, d]` of flat noise, leaf by leaf."""
    out: Params = {}
    start = 0
    for name, leaf in params.items():
        size = leaf[0].numel()
        out[name] = leaf + noise[:, start : start + size].reshape(leaf.shape).to(leaf)
        start += size
    return out
