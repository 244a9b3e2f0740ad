"""Whether public examples share records with private ones, beyond coincidences.

Records of few categories coincide by chance. By Good and Turing, a new record from the population of n records equals
one of them with a probability of about 1 - n_1 / n, where n_1 of them occur once (Good: The Population Frequencies of
Species and the Estimation of Population Parameters. Biometrika 1953). Two standard deviations are added, from the
numbers n_2 and n_3 of records that occur two and three times. A public set with more coincidences than such records
would have in all but one of `_RARE` cases is refused, and so is a copy of all records. Where no record of the data
occurs twice, one shared record is too many.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_RARE = 1000
PRIVATE_STOP = "the time of stopping would disclose information about them that no epsilon covers"
REMOVE = "Remove these records from the public set or from the clients' data, or leave early stopping out."


def shared_records(public: Tensor, *own: Tensor) -> str | None:
    """How many public inputs `[n, ...]` are among the run's own, in words; None if few enough.

    Args:
        public: The inputs of the public examples; their labels may differ from those of the same private records.
        own: The inputs of the run's own examples, in parts; a copy of one part is refused, too.
    """
    if any(public.shape[1:] != part.shape[1:] for part in own):
        return None
    counts = [Counter(_records(part)) for part in own]
    there, ours = Counter(_records(public)), sum(counts, Counter[bytes]())
    shared = sum(count for record, count in there.items() if record in ours)
    if there in (*counts, ours):
        return f"all {shared} records are the run's own"
    by_chance = _chance(Counter(ours.values()), ours.total())
    from scipy.special import bdtrc  # loaded when needed

    if not shared or bdtrc(shared - 1, there.total(), by_chance) >= 1 / _RARE:
        return None
    expected = f"{by_chance * there.total():.0f}"
    return f"{shared} of {there.total()} records are also the run's own, where about {expected} would be by chance"


def _chance(occurring: Mapping[int, int], total: int) -> float:
    """An upper estimate of the probability that a new record is among `total`, of which so many occur k times."""
    repeated, spread = total - occurring[1], math.sqrt(4 * occurring[2] + 9 * occurring[3])
    return min(1.0, (repeated + 2 * spread) / max(1, total))


def _records(inputs: Tensor) -> list[bytes]:
    return [hashlib.blake2b((row + 0).tobytes(), digest_size=16).digest() for row in inputs.cpu().numpy()]
