"""Means and deviations of bounded columns, from sums with privacy noise.

Every client sums each column's value v and its square over its records, with v scaled by the column's public bounds to
[-1, 1], and adds Gaussian noise to the sums. Where cells may be missing, it also counts those that are present. Means
and deviations are computed from the noisy sums and the public number of records.

A record's contribution to a client's sums has at most the norm C = sqrt(b d) (d columns, b sums of each), which is the
sensitivity under zero-out. Under replace-one the sums change by at most 2 C.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedveil.lazy_torch import torch
from fedveil.privacy.mechanisms import Gaussian
from fedveil.privacy.releases import ADVERSARIES, Release
from fedveil.streams import Stream

if TYPE_CHECKING:
    from torch import Tensor

_GRID = 2.0**20
"""Contributions are multiples of 1 / _GRID, so that their sums in float64 are exact before noise is added."""
_LEAST_VARIANCE = 1e-4
"""Smallest variance of v; the noisy estimate may be zero or negative."""


@dataclass(frozen=True)
class BoundedMoments:
    """The sums of columns with these bounds, and their noise in units of the sensitivity.

    Guarantees: no record, within or outside the bounds, with any cells missing, contributes more than `mechanism.clip`
    to the sums (`test_no_record_moves_the_sums_by_more_than_the_clip`); they are exact before noise is added
    (`test_sums_of_parts_are_exact_in_any_order`).
    """

    bounds: tuple[tuple[float, float], ...]
    noise: float
    missing: bool = False

    @property
    def mechanism(self) -> Gaussian:
        return Gaussian(math.sqrt((3 if self.missing else 2) * len(self.bounds)), self.noise)

    def release(self) -> Release:
        """The release of the sums to the server and to everybody who sees the schema, before the first round."""
        return Release(
            "each client's noisy sums of bounded columns",
            "record",
            ADVERSARIES,
            self.mechanism.protection(),
            participation="charged",
            once=True,
        )

    def parts(self, values: Tensor) -> Tensor:
        """Each record's contribution `[n, sums]` for values `[n, columns]`; NaN is a missing cell."""
        low, high = torch.tensor(self.bounds, dtype=torch.float64).T
        there = ~torch.isnan(values)
        scaled = ((values.double() - (low + high) / 2) / ((high - low) / 2)).clamp(-1, 1)
        v = torch.where(there, scaled, 0.0)
        blocks = [v, v.square(), *([there.double()] if self.missing else [])]
        return (torch.cat(blocks, 1) * _GRID).round() / _GRID

    def noisy_sums(self, values: Tensor, stream: Stream) -> Tensor:
        """One client's sums, with its noise."""
        total = {"sums": self.parts(values).sum(0, keepdim=True)}
        return self.mechanism.perturb(total, [stream])["sums"][0]

    def moments(self, sums: Sequence[Tensor], records: int) -> list[tuple[float, float]]:
        """The mean and the standard deviation of each column, from all clients' noisy sums over so many records."""
        total = torch.stack(list(sums)).sum(0).reshape(-1, len(self.bounds))
        count = total[2].clamp(min=1.0) if self.missing else torch.full_like(total[0], max(1, records))
        mean = (total[0] / count).clamp(-1, 1)
        variance = (total[1] / count - mean.square()).clamp(_LEAST_VARIANCE, 1.0)
        found = []
        for (low, high), m, var in zip(self.bounds, mean.tolist(), variance.tolist(), strict=True):
            half = (high - low) / 2
            found.append(((low + high) / 2 + half * m, half * math.sqrt(var)))
        return found
