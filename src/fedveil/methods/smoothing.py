"""FedCEO's smoothing as fields of a method: when, how strongly, and which layers (Eq. 2, Theorem 3.1).

Layers are reshaped to stacks `[K, d, h]`: a linear weight directly, a convolution as o x (i kh kw). Vectors have no
matrix structure: they are averaged, or reshaped to n x 1. Layers that are not chosen are averaged.

`lam = "auto"` sets the threshold of each layer to the edge of its noise. With noise of standard deviation s in every
entry of an upload, the DFT over K slots adds K of them, so that the entries of every frequency slice have variance
K s^2, and the singular values of such a d x h matrix end at (sqrt(d) + sqrt(h)) s sqrt(K).
"""

from __future__ import annotations

import math
import re
from typing import Literal

from pydantic.dataclasses import dataclass

from fedveil.errors import InputError
from fedveil.linalg import t_tsvd
from fedveil.methods.fields import STRICT
from fedveil.tree import Params


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Smoothing:
    """Symbols: I `interval`, lambda `lam`, theta `theta`, t the round."""

    interval: int = 10
    """Rounds between two smoothings, at least 1."""
    lam: float | Literal["auto"] = "auto"
    """Strength of smoothing: a larger value smooths less; "auto" sets the threshold to the edge of the noise."""
    theta: float = 1.0
    """Factor by which the threshold grows from one smoothing to the next, at least 1."""
    layers: str | list[str] = "all"
    """Which layers are smoothed: "all", "last:2" or a list of names; the others are averaged."""
    biases: Literal["average", "fold"] = "average"
    """Whether vectors are averaged, or smoothed as matrices of one column."""

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise InputError(
                "interval", self.interval, "must be at least 1", "Use 1 to smooth in every round."
            )
        if self.lam != "auto" and not (math.isfinite(self.lam) and self.lam > 0):
            raise InputError(
                "lam", self.lam, "must be positive and finite", 'Use "auto", or a positive number.'
            )
        if not (math.isfinite(self.theta) and self.theta >= 1):
            raise InputError("theta", self.theta, "must be at least 1", "Use 1 for a constant threshold.")
        if isinstance(self.layers, str) and not re.fullmatch(r"all|last:[1-9]\d*", self.layers):
            raise InputError(
                "layers", self.layers, "selects no layer", 'Use "all", "last:2" or a list of layer names.'
            )

    def smooth(self, stack: Params, round: int, noise_std: float, of: int | None = None) -> Params:
        """The minimiser of Eq. 2 layer by layer: one model per slot of the stack `[K, ...]`.

        A stack of one is the mean of `of` uploads and gives the mean of their minimiser, which depends only on
        frequency 0, the sum of the stack.
        """
        chosen = self.smoothed_layers(stack)
        slots = of or len(next(iter(stack.values())))
        out: Params = {}
        for name, leaf in stack.items():
            vector = leaf.dim() <= 2
            if name not in chosen or (vector and self.biases == "average"):
                out[name] = leaf.mean(0, keepdim=True).expand_as(leaf).contiguous()
                continue
            folded = leaf.reshape(len(leaf), -1, 1) if vector else leaf.flatten(2)
            threshold = self.threshold(round, noise_std, slots, *folded.shape[1:]) * len(leaf) / slots
            out[name] = t_tsvd(folded, threshold).reshape(leaf.shape)
        return out

    def refuse_folding_nothing(self, params: Params) -> None:
        """Refuse `biases = "fold"` if no chosen layer has a vector."""
        chosen = self.smoothed_layers(params)
        if self.biases == "fold" and all(leaf.dim() > 1 for name, leaf in params.items() if name in chosen):
            raise InputError(
                "method.biases",
                self.biases,
                "no smoothed layer of this model has a vector",
                "Leave it out, or choose other layers.",
            )

    def threshold(self, round: int, noise_std: float, slots: int, d: int, h: int) -> float:
        """`1 / (2 tau)` with `tau = lambda / theta^(t/I)`; in "auto" the noise's edge replaces `1 / (2 lambda)`."""
        try:
            growth: float = self.theta ** (round / self.interval)
        except OverflowError:  # beyond any singular value
            growth = 1e300
        if self.lam != "auto":
            return growth / (2 * self.lam)
        return growth * (math.sqrt(d) + math.sqrt(h)) * noise_std * math.sqrt(slots)

    def smoothed_layers(self, params: Params) -> set[str]:
        """The names of the parameters in the chosen layers."""
        wanted = list(dict.fromkeys(_layer(name) for name in params))
        if isinstance(self.layers, list):
            unknown = [name for name in self.layers if name not in wanted]
            if unknown or not self.layers:
                raise InputError(
                    "layers", self.layers, "are not layers of the model", f"Use some of {', '.join(wanted)}."
                )
            wanted = self.layers
        elif self.layers != "all":
            wanted = wanted[-int(self.layers.removeprefix("last:")) :]
        return {name for name in params if _layer(name) in wanted}


def _layer(name: str) -> str:
    """The layer of a parameter: `fc1` for `fc1.weight`."""
    return name.rpartition(".")[0] or name
