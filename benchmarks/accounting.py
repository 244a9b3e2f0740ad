"""How long accounting takes: run `python benchmarks/accounting.py`. Times are of this machine; ratios travel."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import dp_accounting
from dp_accounting.pld import PLDAccountant

from fedveil.privacy.accounting import RoundAccountant, account, epsilon_by_round
from fedveil.privacy.calibrate import calibrate
from fedveil.privacy.ledger import Budget, BudgetKeeper, Ledger
from fedveil.privacy.releases import GaussianNoise, Plan, Release, Sampler

DELTA = 1e-5
ROUNDS = 300


def releases(sigma: float) -> list[Release]:
    return [
        Release("each upload", "client", ("server",), GaussianNoise(sigma / math.sqrt(10))),
        Release(
            "the noisy mean", "client", ("observer", "client"), GaussianNoise(sigma), participation="hidden"
        ),
    ]


def timed(name: str, work: Callable[[], object], limit: float | None = None) -> float:
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    print(f"{name:66s} {seconds:8.3f} s" + (f"   (limit {limit:g} s)" if limit else ""))
    return seconds


def library(sigma: float) -> float:
    """The same observer row by dp-accounting's own accountant at its default grid."""
    accountant = PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(sigma))
    accountant.compose(event, ROUNDS)
    return float(accountant.get_epsilon(DELTA))


def ledger_loop(folder: Path) -> None:
    plan = Plan(100, 10, "poisson", ROUNDS)
    declared = releases(1.0)
    ledger = Ledger(folder / "ledger.jsonl")
    keeper = BudgetKeeper(Budget(1e6, DELTA, "observer", "client"), ledger, "run", declared, plan)
    for t in range(1, ROUNDS + 1):
        if keeper.allows(t, replay_safe=True):
            ledger.charge("run", t, declared, plan, replay_safe=True)


def main() -> None:
    samplers: tuple[Sampler, ...] = ("poisson", "fixed")
    for sampler in samplers:
        plan = Plan(100, 10, sampler, ROUNDS)
        timed(
            f"all adversaries, {ROUNDS} rounds, {sampler}", partial(account, releases(1.01), plan, DELTA), 1
        )
    plan = Plan(100, 10, "poisson", ROUNDS)
    sigmas = [1 + 0.1 * i for i in range(20)]
    timed(
        "twenty noise levels, all adversaries",
        lambda: [account(releases(s), plan, DELTA) for s in sigmas],
        10,
    )
    observer = [releases(1.02)[1]]
    ours = timed("observer row", lambda: account(observer, plan, DELTA))
    theirs = timed("the same by dp-accounting's accountant", lambda: library(1.02))
    print(f"{'ratio':66s} {theirs / ours:8.1f} x")
    timed(
        "calibration to epsilon 8 against the server",
        lambda: calibrate(releases, plan, DELTA, 8.0, "server", "client"),
    )
    timed("curve of 24 points, all adversaries", lambda: epsilon_by_round(releases(1.0), plan, DELTA))
    rounds = RoundAccountant(releases(1.0), plan, DELTA, "observer", "client")
    timed("rounds within a budget of 5", lambda: rounds.rounds_within(5.0))
    with tempfile.TemporaryDirectory() as folder:
        seconds = timed(f"budget check and ledger, {ROUNDS} rounds", lambda: ledger_loop(Path(folder)))
    print(f"{'  per round':66s} {1000 * seconds / ROUNDS:8.3f} ms")


if __name__ == "__main__":
    main()
