"""Releases: what a client discloses, to whom it is visible, and how it is protected.

A method declares every disclosure as a `Release`. A disclosure without protection has infinite epsilon, and one that
cannot be accounted for is an error: accounting never guesses.

Examples::

    # the upload of a clipped update with noise sigma * C / sqrt(K), visible to the server with its sender
    Release("the noisy update", "client", ("server",), GaussianNoise(sigma / sqrt(K)))
    # the sum of the cohort, noise sigma * C, whose participants are not disclosed
    Release("the noisy sum", "client", ("observer", "client"), GaussianNoise(sigma), participation="hidden")
    # two hundred noisy gradients of Poisson batches in each participation
    Release("gradients", "record", ADVERSARIES, GaussianNoise(1.0), accesses=200, rate=256 / 10_000)
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedveil.errors import InputError, whole_number

Unit = Literal["record", "client"]
Adversary = Literal["server", "observer", "client"]
Sampler = Literal["fixed", "poisson", "all"]
Adjacency = Literal["add-remove", "replace-one", "zero-out"]
Participation = Literal["seen", "hidden", "charged"]

UNITS: tuple[Unit, ...] = ("record", "client")
ADVERSARIES: tuple[Adversary, ...] = ("server", "observer", "client")
SAMPLERS: tuple[Sampler, ...] = ("fixed", "poisson", "all")
ADJACENCIES: tuple[Adjacency, ...] = ("add-remove", "replace-one", "zero-out")
PARTICIPATIONS: tuple[Participation, ...] = ("seen", "hidden", "charged")

# Limits of accounting: far beyond any run, and small enough for counts and squares to stay exact.
MOST_CLIENTS = 10**7
MOST_ROUNDS = 10**9
MOST_RECORDS = 10**12
LEAST_RATE = 1e-12
LEAST_LEVEL = 2.0**-100


@dataclass(frozen=True)
class Plan:
    """The outline of a run that accounting needs; independent of the data.

    Args:
        clients: Number of clients.
        cohort: Clients in a round; for the Poisson sampler their expected number.
        sampler: "fixed", "poisson" or "all".
        rounds: Number of rounds.
        records_per_client: Number of records of the smallest client, taken as public.
        largest_client: Number of records of the largest client, taken as public.
    """

    clients: int
    cohort: int
    sampler: Sampler
    rounds: int
    records_per_client: int = 1
    largest_client: int = 1

    def __post_init__(self) -> None:
        """Refuse a plan that no run could follow."""
        if self.sampler not in SAMPLERS:
            raise InputError(
                "sampler", self.sampler, "is not a sampler", f"Use one of {', '.join(SAMPLERS)}."
            )
        whole_number("clients", self.clients, 1, MOST_CLIENTS)
        if not 1 <= self.cohort <= self.clients:
            raise InputError(
                "cohort", self.cohort, "is not a part of the clients", f"Use 1 to {self.clients} clients."
            )
        whole_number("rounds", self.rounds, 0, MOST_ROUNDS)
        whole_number("records_per_client", self.records_per_client, 0, MOST_RECORDS)
        whole_number("largest_client", self.largest_client, 0, MOST_RECORDS)

    @property
    def rate(self) -> float:
        """The probability that a given client participates in a round."""
        return 1.0 if self.sampler == "all" else self.cohort / self.clients


def _check_level(field: str, value: float) -> None:
    """Refuse a noise level or an epsilon whose square overflows or underflows."""
    if not LEAST_LEVEL <= value <= 1 / LEAST_LEVEL:  # also refuses NaN
        raise InputError(
            field, value, "is out of range", "Use a number from 2^-100 to 2^100 (about 1e-30 to 1e30)."
        )


@dataclass(frozen=True)
class Protection(ABC):
    """How a value is protected. Each kind has its own name in the ledger."""

    kind: ClassVar[str] = ""

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @abstractmethod
    def in_words(self) -> str:
        """The protection in words for a privacy officer."""


@dataclass(frozen=True)
class GaussianNoise(Protection):
    """Gaussian noise of `multiplier` times the L2 sensitivity under zero-out (the clip).

    Args:
        multiplier: Standard deviation of the noise, in units of the sensitivity.
    """

    multiplier: float
    kind: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        _check_level("multiplier", self.multiplier)

    def in_words(self) -> str:
        return f"Gaussian noise of {self.multiplier:.3g} times the clip"


@dataclass(frozen=True)
class RandomGaussianNoise(Protection):
    """Gaussian noise whose multiplier is drawn in each round, independently of the data.

    The adversary observes the draw: `multipliers[i]` with probability `weights[i]`, given that the unit participated.
    If the weights sum to less than 1, the difference (at most 1e-9) is a failure probability (below 1e-15: rounding).
    """

    multipliers: tuple[float, ...]
    weights: tuple[float, ...]
    kind: ClassVar[str] = "random-gaussian"

    def __post_init__(self) -> None:
        object.__setattr__(self, "multipliers", tuple(self.multipliers))
        object.__setattr__(self, "weights", tuple(self.weights))
        for multiplier in self.multipliers:
            _check_level("multipliers", multiplier)
        if len(self.weights) != len(self.multipliers) or not self.weights or min(self.weights) <= 0:
            raise InputError(
                "weights", self.weights, "do not match the multipliers", "Give a positive one for each."
            )
        if not abs(math.fsum(self.weights) - 1) <= 1e-9:
            raise InputError("weights", self.weights, "are not probabilities", "Let them sum to 1.")

    @property
    def failure(self) -> float:
        missing = 1 - math.fsum(self.weights)
        return missing if missing > 1e-15 else 0.0

    def in_words(self) -> str:
        low, high = min(self.multipliers), max(self.multipliers)
        return f"Gaussian noise of {low:.3g} to {high:.3g} times the clip, depending on how many participated"


@dataclass(frozen=True)
class LaplaceNoise(Protection):
    """Laplace noise of scale (L1 sensitivity) / `epsilon`."""

    epsilon: float
    kind: ClassVar[str] = "laplace"

    def __post_init__(self) -> None:
        _check_level("epsilon", self.epsilon)

    def in_words(self) -> str:
        return f"Laplace noise of epsilon {self.epsilon:.3g}"


@dataclass(frozen=True)
class PureDP(Protection):
    """Any mechanism with a proof of epsilon-DP (sparse vector, randomised response).

    Args:
        epsilon: The epsilon of one access.
    """

    epsilon: float
    kind: ClassVar[str] = "pure-dp"

    def __post_init__(self) -> None:
        _check_level("epsilon", self.epsilon)

    def in_words(self) -> str:
        return f"a mechanism of epsilon {self.epsilon:.3g}"


@dataclass(frozen=True)
class ApproximateDP(Protection):
    """Any mechanism with a proof of (epsilon, delta)-DP (the binomial mechanism).

    Args:
        epsilon: The epsilon of one access.
        delta: The delta of one access.
    """

    epsilon: float
    delta: float
    kind: ClassVar[str] = "approximate-dp"

    def __post_init__(self) -> None:
        _check_level("epsilon", self.epsilon)
        if not 0 <= self.delta < 1:
            raise InputError("delta", self.delta, "is not a probability below 1", "Use 0 <= delta < 1.")

    def in_words(self) -> str:
        return f"a mechanism of epsilon {self.epsilon:.3g}, delta {self.delta:.3g}"


@dataclass(frozen=True)
class ZeroConcentratedDP(Protection):
    """Any mechanism with a proof of rho-zCDP (discrete Gaussian, Gumbel selection)."""

    rho: float
    kind: ClassVar[str] = "zcdp"

    def __post_init__(self) -> None:
        _check_level("rho", self.rho)

    def in_words(self) -> str:
        return f"a mechanism of {self.rho:.3g}-zCDP"


@dataclass(frozen=True)
class RenyiCurve(Protection):
    """Any mechanism with a proven curve: Renyi divergence at most `values[i]` at `orders[i]`."""

    orders: tuple[float, ...]
    values: tuple[float, ...]
    kind: ClassVar[str] = "renyi"

    def __post_init__(self) -> None:
        object.__setattr__(self, "orders", tuple(self.orders))
        object.__setattr__(self, "values", tuple(self.values))
        if len(self.orders) != len(self.values) or not self.orders or min(self.orders) <= 1:
            raise InputError(
                "orders", self.orders, "do not match the values", "Give one value for each order above 1."
            )
        if min(self.values) < 0 or not all(map(math.isfinite, self.values)):
            raise InputError("values", self.values, "are not divergences", "Use finite numbers from 0.")

    def in_words(self) -> str:
        return "a mechanism of a proven Renyi curve"


@dataclass(frozen=True)
class Unprotected(Protection):
    """No protection: no epsilon can be proven against adversaries to whom the value is visible.

    Args:
        reason: The reason, for the statement.
    """

    reason: str
    kind: ClassVar[str] = "unprotected"

    def in_words(self) -> str:
        return "no protection"


@dataclass(frozen=True)
class PostProcessing(Protection):
    """Computed only from other declared releases visible to the same adversary, or from public values.

    Args:
        reason: What it is computed from, for the statement.
    """

    reason: str
    kind: ClassVar[str] = "post-processing"

    def in_words(self) -> str:
        return "computed from other releases listed here"


_KINDS: dict[str, Callable[..., Protection]] = {
    cls.kind: cls
    for cls in (
        GaussianNoise,
        RandomGaussianNoise,
        LaplaceNoise,
        PureDP,
        ApproximateDP,
        ZeroConcentratedDP,
        RenyiCurve,
        Unprotected,
        PostProcessing,
    )
}


def protection_from_json(data: Mapping[str, Any]) -> Protection:
    """The inverse of `Protection.to_json`."""
    values = dict(data)
    kind = values.pop("kind", None)
    if kind not in _KINDS:
        raise InputError("protection", kind, "is not a kind of protection", f"Use one of {sorted(_KINDS)}.")
    try:
        return _KINDS[kind](**values)
    except TypeError as error:
        raise InputError("protection", data, str(error), "Use the fields of this kind.") from error


@dataclass(frozen=True)
class Release:
    """One disclosure: what is disclosed, about which unit, to whom, with what protection and how often.

    Args:
        what: A description, for the statement.
        unit: The unit whose protection is stated: "client" or "record".
        visible_to: The adversaries to whom it is visible.
        protection: How it is protected against them.
        participation: What the adversary knows about participation. "seen": each round's cohort is visible; a round is
            charged to its participants only. "hidden": the cohort is not visible, and its sampling amplifies privacy
            where a theorem applies. "charged": every round is charged as if the client had participated.
        accesses: Number of values that one participation discloses.
        rate: Each value is computed from a fresh Poisson batch that contains a given record with this probability.
        first_rate: The same for the first value, where it differs.
        every: I: released in rounds I, 2I, and so on.
        except_every: I: released in all other rounds.
        following: Restricts `except_every` to the rounds right after I, 2I, ... (True) or to the others (False).
        adjacency: Derived from sampler and participation unless given.
        insider: The protection against a participant, which knows its own contribution, such as its share of the
            noise; `protection` is against everybody else.
        assumptions: Assumptions of the protection beyond the method's own code; rows that use it list them.
        once: Released once, before the first round; round 0 in the ledger.
    """

    what: str
    unit: Unit
    visible_to: tuple[Adversary, ...]
    protection: Protection
    participation: Participation = "seen"
    accesses: int = 1
    rate: float = 1.0
    first_rate: float | None = None
    every: int = 1
    except_every: int = 0
    following: bool | None = None
    adjacency: Adjacency | None = None
    insider: Protection | None = None
    assumptions: tuple[str, ...] = ()
    once: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "visible_to", tuple(self.visible_to))
        object.__setattr__(self, "assumptions", tuple(self.assumptions))
        self._check_one_of("unit", self.unit, UNITS)
        self._check_one_of("participation", self.participation, PARTICIPATIONS)
        for adversary in self.visible_to:
            self._check_one_of("visible_to", adversary, ADVERSARIES)
        if self.adjacency is not None:
            self._check_one_of("adjacency", self.adjacency, ADJACENCIES)
        if not self.visible_to:
            raise InputError(
                "visible_to", (), "this release is visible to nobody", f"Name some of {ADVERSARIES}."
            )
        whole_number("accesses", self.accesses, 1, MOST_RECORDS)
        whole_number("every", self.every, 1, MOST_ROUNDS)
        whole_number("except_every", self.except_every, 0, MOST_ROUNDS)
        if self.except_every and self.every != 1:
            raise InputError("every", self.every, "excludes except_every", "Give only one of the two.")
        if self.following is not None and not self.except_every:
            raise InputError("following", self.following, "follows no round", "Give except_every too.")
        for field in ("rate", "first_rate"):
            value = getattr(self, field)
            if value is not None and not LEAST_RATE <= value <= 1:
                remedy = (
                    f"Use a number from {LEAST_RATE:g} to 1: larger batches, or fewer records per client."
                )
                raise InputError(field, value, "is not a sampling rate", remedy)
        if self.insider is not None and any(
            isinstance(p, PostProcessing) for p in (self.protection, self.insider)
        ):
            raise InputError(
                "insider",
                self.insider,
                "post-processing has the same protection against everybody",
                "Leave it out.",
            )
        if self.unit == "client" and (self.rate != 1 or self.first_rate is not None):
            raise InputError("rate", self.rate, "batches hide records, not clients", 'Use unit = "record".')

    @staticmethod
    def _check_one_of(field: str, value: str, allowed: Sequence[str]) -> None:
        if value not in allowed:
            raise InputError(field, value, "is not known", f"Use one of {', '.join(allowed)}.")

    def happens_in(self, round_: int) -> bool:
        """Whether round `round_` (from 1; 0 is before the first) makes this release."""
        if self.once or round_ == 0:
            return self.once and round_ == 0
        if self.except_every:
            follows = round_ > 1 and (round_ - 1) % self.except_every == 0
            return round_ % self.except_every != 0 and self.following in (None, follows)
        return round_ % self.every == 0

    @property
    def costs(self) -> bool:
        return not isinstance(self.protection, PostProcessing)

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        insider = None if self.insider is None else self.insider.to_json()
        protection = self.protection.to_json()
        own = {"visible_to": list(self.visible_to), "protection": protection, "insider": insider}
        assumptions, once = values.pop("assumptions"), values.pop("once")
        rare = {"assumptions": list(assumptions)} if assumptions else {}
        return {**values, **own, **rare, **({"once": True} if once else {})}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Release:
        try:
            values = dict(data)
            values["protection"] = protection_from_json(values["protection"])
            if values.get("insider") is not None:
                values["insider"] = protection_from_json(values["insider"])
            values["visible_to"] = tuple(values["visible_to"])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise InputError("release", data, f"is not a release: {error}", "Use Release.to_json.") from error
