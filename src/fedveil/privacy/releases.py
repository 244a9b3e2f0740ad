"""What leaves a client, who sees it, and how it is protected: the words accounting is written in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["record", "client"]
Adversary = Literal["server", "observer", "client"]
Sampler = Literal["fixed", "poisson", "all"]

ADVERSARIES: tuple[Adversary, ...] = ("server", "observer", "client")


@dataclass(frozen=True)
class Plan:
    """What accounting needs to know of a run; no data.

    `cohort` is the number of clients in a round, for the Poisson sampler its expectation.
    `records_per_client` is the smallest client's number of records, taken as public.
    """

    clients: int
    cohort: int
    sampler: Sampler
    rounds: int
    records_per_client: int = 1
    largest_client: int = 1

    @property
    def rate(self) -> float:
        """The probability that a given client takes part in a round."""
        return 1.0 if self.sampler == "all" else self.cohort / self.clients
