"""A node's own privacy policy: the runs it accepts, enforced on the node independently of the server.

The node accounts for every round itself, from the method's releases, as a round in which it participated: it cannot
check how the server draws cohorts, so it claims no amplification by sampling. A round is charged to the node's own
ledger, and confirmed by its disk, before anything is computed. A repeated round draws fresh noise and is charged again.

The meaning of a limit depends on the adversary. Against the `server` the node trusts nobody. Against an `observer` or
another `client` it trusts the server to publish only the aggregate, over as many clients as it announced.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from fedveil.atomic_files import write_atomically
from fedveil.errors import FedveilError, InputError, LedgerError
from fedveil.methods import METHODS
from fedveil.methods.method import AnyMethod
from fedveil.privacy.accounting import Cohort, Guarantee, Round, Rounds, account_rounds
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.releases import Adversary, Plan, Release, Unit
from fedveil.secure_sum.settings import DEFAULT_COLLUDERS
from fedveil.validation import Section


class Limit(Section):
    """The largest (epsilon, delta) for one `unit` of this node against `adversary`, over all runs."""

    unit: Unit
    adversary: Adversary
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    delta: Annotated[float, Field(gt=0, lt=1)]

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g} at delta {self.delta:g} ({self.unit} level, against the {self.adversary})"


class Policy(Section):
    """`policy.toml`. A method that proves nothing against a limit's adversary exceeds that limit."""

    methods: Annotated[tuple[str, ...], Field(min_length=1)]
    """The names of the methods that this node accepts."""
    minimum_cohort: Annotated[int, Field(ge=1)] = 2
    """The smallest cohort, this node included, in which the node participates."""
    maximum_message: Annotated[int, Field(ge=1)] = 256 << 20
    """The limit, in bytes, for messages that the node reads, models that it builds, and memory that a method's fields
    require."""
    maximum_steps: Annotated[int, Field(ge=1)] = 5_000_000
    """The largest number of training steps of one exchange, and the largest whole number in a configuration."""
    colluders: Annotated[int, Field(ge=0)] = DEFAULT_COLLUDERS
    """The number of clients colluding with the server that a secure sum must tolerate at least."""
    limit: tuple[Limit, ...] = ()

    @field_validator("methods")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in METHODS:
                raise InputError(
                    "methods", name, "no such method", f"Use some of: {', '.join(sorted(METHODS))}."
                )
        return names


class RefusedError(FedveilError):
    """A node refuses a round because of a rule of its policy.

    `node` is its name, `field` the key of the rule, `limit` the rule in words, `would` the epsilon including this round
    (None where the rule is not about epsilon or nothing would be proven).
    """

    def __init__(
        self, node: str, what: str, field: str, limit: str, problem: str, would: float | None = None
    ) -> None:
        super().__init__(f"node {node} refuses {what}: {problem}. Its policy: {limit}.", field=field)
        self.node = node
        self.limit = limit
        self.would = would


@dataclass(frozen=True)
class Spent:
    """The spent part of one limit; epsilon None: a release without a guarantee against its adversary was made."""

    limit: Limit
    epsilon: float | None


class PolicyGuard:
    """Admits rounds that the policy allows, and records them persistently. Safe for concurrent processes."""

    def __init__(self, node: str, policy: Policy, state: Path, records: int) -> None:
        """Open the ledger in the folder `state`; `records` is the node's number of examples."""
        self.node = node
        self.policy = policy
        self._records = records
        self._progress = state / "progress.json"
        self._lock = state / "guard.lock"
        self.ledger = Ledger(state / "ledger.jsonl")

    def admit(
        self,
        run: str,
        round: int,
        method: AnyMethod,
        plan: Plan,
        *,
        exchange: int = 0,
        announced: int = 0,
        seed: int = 0,
    ) -> None:
        """Charge round `round` (from 1) of `run` to this node, or raise `RefusedError` and charge nothing.

        Call it before each exchange with the method, plan and seed that the node will use. `announced` is the size of
        the cohort in the server's message, 0 if it has none. The exchanges of a round are charged with its first; an
        exchange that does not follow the last admitted one starts the round again.
        """
        what = f"round {round} of run {run} ({method.name})"
        self._check(what, round, method, plan, exchange, announced)
        priced = _as_participant(plan, announced)
        due = [
            replace(release, participation="charged")
            for release in method.releases(priced)
            if release.happens_in(round)
        ]
        with self._locked():
            self.ledger.refresh()
            progress = self._read_progress()
            known = progress.get(run)
            # The seed decides in which exchange of a round a record is used: with another it would be used twice.
            digest = hashlib.sha256(f"{method!r}\x1f{plan!r}\x1f{seed}".encode()).hexdigest()
            if known is not None and known["digest"] != digest:
                raise RefusedError(
                    self.node,
                    what,
                    "plan",
                    "a run keeps its initial method, plan and seed",
                    "the server changed the plan, the method's fields or the seed",
                )
            follows = known is not None and known["round"] == round and known["exchange"] < exchange
            if follows and known is not None and known["cohort"] != priced.cohort:
                raise RefusedError(
                    self.node,
                    what,
                    "cohort",
                    "the cohort of a round keeps its size",
                    f"the server announced {priced.cohort} clients after {known['cohort']}",
                )
            if not follows:
                self._require_budget(what, due, priced)
                self.ledger.charge(run, round, due, priced, replay_safe=False)
            progress[run] = {
                "digest": digest,
                "round": round,
                "exchange": exchange,
                "cohort": priced.cohort,
            }
            write_atomically(self._progress, (json.dumps(progress) + "\n").encode())

    def spent(self) -> tuple[Spent, ...]:
        """The part of each limit spent by all runs so far."""
        self.ledger.refresh()
        rounds = self.ledger.rounds()
        return tuple(
            Spent(limit, self._cost(rounds, limit).epsilon if rounds else 0.0) for limit in self.policy.limit
        )

    def _check(
        self, what: str, round: int, method: AnyMethod, plan: Plan, exchange: int, announced: int
    ) -> None:
        """Check the rules that need no ledger."""
        base = method.name.split("+")[0]  # a wrapped method's name starts with the inner method's
        policy = self.policy
        problem: tuple[str, str, str] | None = None
        if base not in policy.methods:
            problem = "methods", f"methods = {list(policy.methods)}", f"{base} is not among the methods"
        elif not 1 <= round <= plan.rounds or not 0 <= exchange < method.exchanges(plan):
            problem = (
                "exchange",
                f"the plan has {plan.rounds} rounds of {method.exchanges(plan)} exchanges",
                f"there is no exchange {exchange} in round {round}",
            )
        elif plan.cohort < policy.minimum_cohort or 0 < announced < policy.minimum_cohort:
            cohort = announced or plan.cohort
            problem = (
                "minimum_cohort",
                f"minimum_cohort = {policy.minimum_cohort}",
                f"the cohort has {cohort} clients",
            )
        elif announced > (plan.clients if plan.sampler == "poisson" else plan.cohort):
            problem = (
                "cohort",
                f"the plan has {plan.clients} clients, {plan.cohort} in a cohort",
                f"the server announced {announced}, which would reduce the noise",
            )
        elif not plan.records_per_client <= self._records <= plan.largest_client:
            problem = (
                "records",
                f"the plan is for {plan.records_per_client} to {plan.largest_client} records per client",
                f"this node has {self._records}, so the plan's epsilon would not apply to it",
            )
        if problem is not None:
            raise RefusedError(self.node, what, *problem)

    def _require_budget(self, what: str, due: Sequence[Release], plan: Plan) -> None:
        if not due:
            return
        total = self.ledger.rounds() + Counter([Round(tuple(due), Cohort.of(plan))])
        for limit in self.policy.limit:
            row = self._cost(total, limit)
            if row.epsilon is None:
                raise RefusedError(
                    self.node, what, "limit", str(limit), f"nothing would be proven: {row.reason}"
                )
            if row.epsilon > limit.epsilon:
                problem = f"its epsilon would be {row.epsilon:.4g} with this round"
                raise RefusedError(self.node, what, "limit", str(limit), problem, row.epsilon)

    @staticmethod
    def _cost(rounds: Rounds, limit: Limit) -> Guarantee:
        (row,) = account_rounds(rounds, limit.delta, pairs=[(limit.unit, limit.adversary)])
        return row

    def _read_progress(self) -> dict[str, dict[str, Any]]:
        try:
            progress: dict[str, dict[str, Any]] = json.loads(self._progress.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise LedgerError(
                f"{self._progress}: damaged. Restore it from a copy.", field="progress"
            ) from error
        if progress and not len(self.ledger):
            raise LedgerError(
                f"{self.ledger.path}: the privacy ledger has disappeared. Restore it from a copy.",
                field="ledger",
            )
        return progress

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Make admission atomic, so that two processes cannot both spend the rest of a limit."""
        try:
            self._lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise LedgerError(
                f"{self._lock}: the node's state cannot be written: {error.strerror}. Fix its folder.",
                field="file",
                value=error.strerror,
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _as_participant(plan: Plan, announced: int) -> Plan:
    """The plan of a participating node, with the cohort size that determines the noise of its upload."""
    if plan.sampler != "poisson":
        return plan
    return replace(plan, sampler="fixed", cohort=max(announced, plan.cohort))
