"""The noise of a secure sum: each client's share, its encoding in integers, and the guarantee of the sum.

A client clips its update, adds a share of Gaussian noise and rounds to a grid of step h, a power of two. The integers
are summed modulo 2^32, where masks cancel, and the server multiplies the sum by h. At record level the update is a sum
of clipped gradients, of which a record changes one. Proofs: docs/secure-aggregation.md.

Symbols: C `clip`, sigma `multiplier` of the sum, n, t, c of the group; a share has variance (sigma C)^2 / (t - c).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fedveil.errors import InputError
from fedveil.lazy_torch import torch
from fedveil.privacy.mechanisms import SumMechanism, Unnoised, gaussian
from fedveil.privacy.releases import ADVERSARIES, UNITS, Adversary, Plan, Release, Unprotected
from fedveil.secure_sum.settings import Group, SecureSum
from fedveil.streams import Stream
from fedveil.tree import Params

MODULUS_BITS = 32
_FINENESS = 8
"""A share's standard deviation is 2^8 to 2^9 steps of the grid: docs/secure-aggregation.md, claim 2."""
_FAR = 8
"""The number of standard deviations of the noise that fit into the range of the sum."""
LARGEST_NORM = 64.0
"""The clip of methods that do not clip: a sum modulo 2^32 needs a bound."""


def group_of(settings: SecureSum, plan: Plan) -> Group:
    """The group of a round of this plan.

    Raises:
        InputError: The plan or the settings rule out a secure sum.
    """
    if plan.sampler == "poisson":
        raise InputError(
            "run.sampler",
            plan.sampler,
            "a secure sum discloses the number of participants, which accounting of Poisson cohorts does not allow",
            'Use "all" or "fixed".',
        )
    everybody = plan.sampler == "all" or plan.cohort == plan.clients
    nodes = plan.clients if everybody else plan.cohort
    return settings.group(nodes, "partition.clients" if everybody else "run.cohort")


@dataclass(frozen=True)
class RecordBatch:
    """What a client sums at record level: a Poisson batch of this rate, from at most so many records."""

    rate: float
    largest: int


@dataclass(frozen=True)
class SecureNoise:
    """Gaussian noise on a secure sum, added by the clients in shares.

    Guarantees:
        Every revealed sum has at least the noise of `mechanism` that is unknown to server and colluders
        (`test_a_sum_of_shares_has_the_declared_noise`).
        A sum of shares is distributed as a rounded Gaussian plus a few uniform numbers
        (`test_a_sum_of_shares_is_post_processing_of_one_gaussian`).

    Args:
        mechanism: Bounds each unit's contribution and protects the sum against the server; `Unnoised` for no noise.
        records: The batch where the unit is a record; None where it is a client.

    Raises:
        InputError: The sum could exceed the modulus.
    """

    mechanism: SumMechanism
    group: Group
    records: RecordBatch | None = None

    def __post_init__(self) -> None:
        if math.isinf(self.clip):
            raise InputError(
                "method.clip", self.clip, "a sum modulo 2^32 needs a bound", "Use a finite number."
            )
        largest = self.group.nodes * (self.longest / self.step + 1)
        largest += _FAR * math.sqrt(self.group.nodes) * self.share.std / self.step
        if largest >= 2 ** (MODULUS_BITS - 1):
            raise InputError(
                "method.noise_multiplier",
                self.multiplier,
                f"its grid is so fine that a sum of {self.group.nodes} uploads could exceed 2^{MODULUS_BITS}",
                "Use more noise, 0 for none, or fewer clients in a round.",
            )

    @property
    def clip(self) -> float:
        if self.records is not None:
            return self.mechanism.clip
        return min(self.mechanism.clip, LARGEST_NORM) if self.mechanism.std == 0 else self.mechanism.clip

    @property
    def longest(self) -> float:
        """The largest norm of a client's contribution: at record level that of a batch of all its records."""
        return self.clip * (1 if self.records is None else self.records.largest)

    @property
    def multiplier(self) -> float:
        """sigma: the standard deviation of the sum's noise in units of the clip."""
        return self.mechanism.std / self.mechanism.clip

    def worth(self, shares: int) -> SumMechanism:
        """The noise of so many shares together."""
        if self.mechanism.std == 0:
            return Unnoised(self.clip, getattr(self.mechanism, "reason", "no noise is added"))
        return gaussian(self.clip, self.multiplier * math.sqrt(shares / self.group.honest), _FINENESS)

    @cached_property
    def share(self) -> SumMechanism:
        """The mechanism that each client applies to its update."""
        return self.worth(1)

    @property
    def step(self) -> float:
        """h: with noise, between std / 2^9 and std / 2^8 of a share; without noise, as fine as the modulus allows."""
        if self.share.step:
            return self.share.step
        room = 2 ** (MODULUS_BITS - 1) - 2 * self.group.nodes
        return 2.0 ** math.ceil(math.log2(self.group.nodes * self.longest / room))

    def encode(self, value: Params, streams: Sequence[Stream]) -> Params:
        """The uploads before masking: integers modulo 2^32, as int32 `[K, ...]`."""
        wide = {name: leaf.detach().cpu().double() for name, leaf in self._clipped(value).items()}
        noisy = self.share.perturb(wide, streams)
        return {name: _modular((leaf / self.step).round()) for name, leaf in noisy.items()}

    def _clipped(self, value: Params) -> Params:
        """The clipped update; at record level each gradient was clipped before summation."""
        return Unnoised(self.clip)(value, ()) if self.records is None else value

    def decode(self, total: Params) -> Params:
        """The noisy sum in float64, from a sum modulo 2^32 as int32."""
        return {name: leaf.double() * self.step for name, leaf in total.items()}

    def releases(self, what: str, plan: Plan) -> tuple[Release, ...]:
        """The releases of a run: the sum of each round and nothing else.

        Server and clients know who participates. An observer does not, assuming that nobody colludes with it.
        """
        protection = self.worth(self.group.honest).protection()
        if isinstance(protection, Unprotected):
            return tuple(
                Release(what, unit, (who,), protection, assumptions=self.assumptions(who, plan))
                for unit in UNITS
                for who in ADVERSARIES
            )

        def release(who: Adversary) -> Release:
            by_client = self.records is None
            hidden: Literal["hidden", "seen"] = "hidden" if who == "observer" and by_client else "seen"
            known = self.worth(self.group.honest - 1).protection() if who == "client" else None
            return Release(
                what,
                "client" if by_client else "record",
                (who,),
                protection,
                participation=hidden,
                rate=1.0 if self.records is None else self.records.rate,
                insider=known,
                assumptions=self.assumptions(who, plan),
            )

        return tuple(release(who) for who in ADVERSARIES)

    def assumptions(self, adversary: Adversary, plan: Plan) -> tuple[str, ...]:
        """The assumptions of the row against this adversary."""
        n, t, c = self.group.nodes, self.group.threshold, self.group.colluders
        who = {"server": "the server", "observer": "the observer", "client": "the client"}[adversary]
        sampled = adversary == "observer" and n < plan.clients
        colluders = (
            "no client may collude" if sampled else f"at most {c} {_clients(c, adversary)} may collude"
        )
        found = [
            f"threshold: a sum is revealed only if at least {t} of {n} clients answer",
            f"colluders: {colluders} with {who}",
            "keys: every client holds the same roster of public keys, compared out of band",
            "protocol: honest clients clip and add their share of the noise; a masked upload cannot be checked",
        ]
        if self.multiplier:
            unknown = self.group.honest - (adversary == "client")
            found.append(
                f"noise: each share is {self._of(1)} times the clip; {who} does not know at least {unknown} shares of "
                f"every sum, {self._of(unknown)} times the clip, of {self._of(n)} times the clip if all {n} answer"
            )
        return tuple(found)

    def actual_noise(self, answered: int) -> str:
        """The noise of a run in which at least so many clients answered in every completed round."""
        n, c = self.group.nodes, self.group.colluders
        return (
            f"actual noise: at least {answered} of {n} clients answered in every completed round, so "
            f"every sum had noise of at least {self._of(answered)} times the clip, of which colluders do not know "
            f"{self._of(answered - c)}"
        )

    def _of(self, shares: int) -> str:
        return f"{self.multiplier * math.sqrt(shares / self.group.honest):.4g}"


def _clients(count: int, adversary: Adversary) -> str:
    return f"{'other ' if adversary == 'client' else ''}client{'' if count == 1 else 's'}"


def modular_sum(values: Params) -> Params:
    """The sum over the client axis modulo 2^32, int32 `[1, ...]`."""
    return {name: _modular(leaf.sum(0, keepdim=True, dtype=torch.int64)) for name, leaf in values.items()}


def _modular(whole: torch.Tensor) -> torch.Tensor:
    """Integers modulo 2^32, between -2^31 and 2^31 - 1."""
    return whole.to(torch.int64).to(torch.int32)
