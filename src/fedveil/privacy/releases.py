"""What leaves a client, who sees it, and how it is protected: the words accounting is written in.

A method declares every disclosure as a `Release`. A disclosure without protection is infinite, and one that
cannot be priced is an error: accounting never guesses.

Examples::

    # the upload of a clipped update with noise sigma * C / sqrt(K), which the server sees with its sender
    Release("the noisy update", "client", ("server",), GaussianNoise(sigma / sqrt(K)))
    # the sum of the cohort, noise sigma * C, whose members the reader does not learn
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

# What is accounted for at most. Far beyond any run, and small enough for counts and squares to stay exact.
MOST_CLIENTS = 10**7
MOST_ROUNDS = 10**9
MOST_RECORDS = 10**12
LEAST_RATE = 1e-12
LEAST_LEVEL = 2.0**-100


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
        """The probability that a given client takes part in a round."""
        return 1.0 if self.sampler == "all" else self.cohort / self.clients


def _check_level(field: str, value: float) -> None:
    """Refuse noise or an epsilon whose square leaves the range of floating point."""
    if not LEAST_LEVEL <= value <= 1 / LEAST_LEVEL:  # neither is NaN
        raise InputError(
            field, value, "is out of range", "Use a number from 2^-100 to 2^100 (about 1e-30 to 1e30)."
        )


@dataclass(frozen=True)
class Protection(ABC):
    """How a value is protected. Each kind knows its own name on the ledger."""

    kind: ClassVar[str] = ""

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @abstractmethod
    def in_words(self) -> str:
        """The protection as a privacy officer reads it."""


@dataclass(frozen=True)
class GaussianNoise(Protection):
    """Gaussian noise of `multiplier` times the L2 sensitivity under zero-out (the clip)."""

    multiplier: float
    kind: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        _check_level("multiplier", self.multiplier)

    def in_words(self) -> str:
        return f"Gaussian noise {self.multiplier:.3g} C"


@dataclass(frozen=True)
class RandomGaussianNoise(Protection):
    """Gaussian noise whose multiplier is drawn anew in each round, independently of the data.

    The adversary learns the draw: `multipliers[i]` with probability `weights[i]`, given that the unit took part.
    Weight missing to 1, at most 1e-9, counts as a failure of the protection (below 1e-15 as rounding).
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
        return f"Gaussian noise {low:.3g} C to {high:.3g} C, depending on how many took part"


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
    """Any mechanism with a proof of epsilon-DP (sparse vector, randomised response)."""

    epsilon: float
    kind: ClassVar[str] = "pure-dp"

    def __post_init__(self) -> None:
        _check_level("epsilon", self.epsilon)

    def in_words(self) -> str:
        return f"a mechanism of epsilon {self.epsilon:.3g}"


@dataclass(frozen=True)
class ApproximateDP(Protection):
    """Any mechanism with a proof of (epsilon, delta)-DP (the binomial mechanism)."""

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
    """Nothing hides the value: against those who see it, no epsilon can be proven."""

    reason: str
    kind: ClassVar[str] = "unprotected"

    def in_words(self) -> str:
        return "no protection"


@dataclass(frozen=True)
class PostProcessing(Protection):
    """Computed only from other declared releases that the same adversary sees, or from public values."""

    reason: str
    kind: ClassVar[str] = "post-processing"

    def in_words(self) -> str:
        return "computed from what is listed here already"


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
    """The protection of `Protection.to_json`."""
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
    """One disclosure: what leaves, of which unit, to whom, how protected and how often.

    `participation` says what the adversary learns of who took part:
      seen     it knows each round's cohort; a round costs only those who were in it
      hidden   it does not know: the cohort's sampling amplifies privacy, where a theorem says so
      charged  every round is charged as if the client had taken part
    `accesses`, `rate`, `first_rate` count what one participation discloses: `accesses` values, each on a
    fresh Poisson batch that holds a given record with probability `rate` (the first with `first_rate`).
    `every` = I releases it in rounds I, 2I, ...; `except_every` = I in all other rounds, of which `following` keeps
    those right after one of these rounds (I + 1, 2I + 1, ...), or where it is False those that are not.
    `adjacency` is chosen from sampler and participation unless it is given.
    `insider` is what protects it against a `client` that was in the cohort itself and knows what it contributed,
    such as its share of the noise; `protection` is against everybody else.
    `assumptions` are what the protection relies on besides the method's own code; rows that use it name them.
    `once`: it is released once, before the first round; that is round 0 on the ledger.
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
            raise InputError("visible_to", (), "nobody sees this release", f"Name some of {ADVERSARIES}.")
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
                "what is only post-processing is the same to everybody",
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
