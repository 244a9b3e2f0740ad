"""How long accounting takes: run `python benchmarks/accounting.py`. Times are of this machine; ratios travel."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import dp_accounting
import torch
from dp_accounting.pld import PLDAccountant

import fedveil
from fedveil.data.client_data import ArrayClients
from fedveil.engines.simulation import Simulation
from fedveil.methods.method import At
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.privacy.accounting import account, epsilon_by_round
from fedveil.privacy.calibrate import calibrate
from fedveil.privacy.ledger import Budget, BudgetKeeper, Ledger
from fedveil.privacy.releases import Plan, Release, Sampler

DELTA = 1e-5
ROUNDS = 300


def releases(sigma: float, sampler: Sampler = "poisson") -> list[Release]:
    return list(UDPFedAvg(noise_multiplier=sigma).releases(Plan(100, 10, sampler, ROUNDS)))


def timed(name: str, work: Callable[[], object], limit: float | None = None) -> float:
    start = time.process_time()  # of the processor: the same on a busy machine
    work()
    seconds = time.process_time() - start
    print(f"{name:66s} {seconds:8.3f} s" + (f"   (limit {limit:g} s)" if limit else ""))
    return seconds


def library(sigma: float) -> float:
    """The same observer row by dp-accounting's own accountant at its default grid."""
    accountant = PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(sigma))
    accountant.compose(event, ROUNDS)
    return float(accountant.get_epsilon(DELTA))


def charges(folder: Path, rounds: int) -> list[float]:
    """The seconds that the budget check and the ledger take before each round."""
    plan = Plan(100, 10, "poisson", ROUNDS)
    declared = releases(1.0)
    ledger = Ledger(folder / "ledger.jsonl")
    keeper = BudgetKeeper(Budget(1e6, DELTA, "observer", "client"), ledger, "run", declared, plan)
    found = []
    for t in range(1, rounds + 1):
        began = time.perf_counter()
        if keeper.allows(t, replay_safe=True):
            ledger.charge("run", t, declared, plan, replay_safe=True)
        found.append(time.perf_counter() - began)
    return found


def w1_rounds(count: int) -> list[float]:
    """The seconds of rounds of W1: 10 clients x 600 x 784, MLP-2, batch 64, 30 epochs, in the simulator."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6000, 784, generator=generator)
    y = torch.randint(0, 47, (6000,), generator=generator)
    clients = ArrayClients(x, y, list(torch.arange(6000).reshape(10, -1)))
    task = fedveil.Task(lambda: fedveil.make_model("mlp-2", (784,), 47))
    method = UDPFedAvg(lr=0.1, epochs=30, batch_size=64)
    plan = fedveil.make_plan(clients, rounds=ROUNDS, sampler="all")
    engine = Simulation(task, clients, method, plan, seed=0)
    server = method.init_server(task.init(0), plan)
    found = []
    try:
        for t in range(1, count + 2):
            began = time.perf_counter()
            at = At(plan, t)
            engine.exchange(range(10), method.broadcast(at, server, range(10)), at)
            found.append(time.perf_counter() - began)
    finally:
        engine.close()
    return found[1:]


def main() -> None:
    samplers: tuple[Sampler, ...] = ("poisson", "fixed")
    for sampler in samplers:
        plan = Plan(100, 10, sampler, ROUNDS)
        timed(
            f"all adversaries, {ROUNDS} rounds, {sampler}",
            partial(account, releases(1.01, sampler), plan, DELTA),
            1,
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
    with tempfile.TemporaryDirectory() as folder:
        each = charges(Path(folder), ROUNDS)
    rounds_of_w1 = w1_rounds(3)
    charge, training = statistics.median(each[1:]), statistics.median(rounds_of_w1)
    print(f"{'budget check and ledger, a round (median)':66s} {1000 * charge:8.3f} ms")
    print(f"{'  the first, which looks ahead for the whole budget':66s} {1000 * each[0]:8.3f} ms")
    print(f"{'a round of W1 (median)':66s} {1000 * training:8.1f} ms")
    print(f"{'charge / round':66s} {charge / training:8.2%}   (limit 5 %)")


if __name__ == "__main__":
    main()
