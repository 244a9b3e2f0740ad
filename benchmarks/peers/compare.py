"""Ours beside its peers, interleaved in one run: one table of ratios, start-up apart.

    make peers

Every contender trains the same model on the same data from the same start with FedAvg: Apple's pfl, Flower's Ray
simulation with one actor per core, and a plain PyTorch loop with the thread count that suits it best. Clipped
per-example gradients stand beside Opacus, T-tSVD beside a complex SVD of every slice. In a turn each runs for half a
second, but at least one round. A ratio is the peer's time per round over ours in the same turn; the table gives the
median and the range over the turns. Start-up is everything from nothing to the end of the first round (processes,
Ray, data, warming up), for the peer and for ours.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from flower_rounds import FlowerRounds
from pfl_rounds import PflRounds
from workloads import WORKLOADS

from fedveil import make_model
from fedveil.linalg import t_tsvd
from per_example import contender
from simulator import OurRounds, make_data, plain_round
from t_tsvd import by_svd, example

Round = Callable[[], object]

EXPECTED = {("W1", "pfl"): 4, ("W1", "flower"): 3, ("W5", "pfl"): 6, ("W5-200", "flower"): 50}


def seconds(work: Round) -> float:
    """How long it took; a contender in another process says so itself."""
    began = time.perf_counter()
    told = work()
    return told if isinstance(told, float) else time.perf_counter() - began


def steady(work: Round, at_least: float = 0.5) -> float:
    """Seconds of a round, the mean of as many as take this long: one short round alone measures who ran before it."""
    took = [seconds(work)]
    while sum(took) < at_least:
        took.append(seconds(work))
    return statistics.mean(took)


def table_row(
    what: str, peer: str, ours: list[float], theirs: list[float], starts: tuple[float, float]
) -> None:
    ratios = sorted(t / o for o, t in zip(ours, theirs, strict=True))
    expected = EXPECTED.get((what, peer))
    print(
        f"| {what} | {peer} | {statistics.median(theirs):.3g} s | {statistics.median(ours):.3g} s "
        f"| {statistics.median(ratios):.1f} ({ratios[0]:.1f}-{ratios[-1]:.1f}) "
        f"| {'' if expected is None else f'{expected}'} | {starts[0]:.1f} s | {starts[1]:.1f} s |",
        flush=True,
    )


@dataclass(frozen=True)
class Contender:
    round: Round
    start_up: float

    @classmethod
    def started(cls, begin: Callable[[], Round]) -> Contender:
        """What `begin` makes, after its first round; nothing else runs meanwhile."""
        began = time.perf_counter()
        work = begin()
        work()
        return cls(work, time.perf_counter() - began)


def interleaved(what: str, contenders: dict[str, Contender], turns: int) -> None:
    """One row for every contender but ours."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, one in contenders.items():
            times[name].append(steady(one.round))
    ours = contenders["ours"]
    for name, peer in contenders.items():
        if peer is not ours:
            table_row(what, name, times["ours"], times[name], (peer.start_up, ours.start_up))
    for one in contenders.values():
        if isinstance(one.round, (OurRounds, FlowerRounds)):
            one.round.close()
    gc.collect()


def plain_with(threads: int, work: Round) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        work()
    finally:
        torch.set_num_threads(before)


def best_threads(work: Round) -> int:
    """The thread count with which this is fastest."""
    counts = range(1, (os.cpu_count() or 1) + 1)
    return min(counts, key=lambda n: min(seconds(partial(plain_with, n, work)) for _ in range(2)))


def simulate(name: str, peers: list[str], turns: int) -> None:
    """Flower starts last: thread counts must not be tried while Ray is starting."""
    workload = WORKLOADS[name]
    clients = make_data(workload)
    contenders = {"ours": Contender.started(lambda: OurRounds(workload, clients))}
    if "plain" in peers:

        def plain() -> Round:
            model = make_model(workload.model, workload.input_shape, workload.classes, seed=0)
            return partial(plain_round, model, clients, workload.epochs)

        threads = best_threads(plain())
        started = Contender.started(lambda: partial(plain_with, threads, plain()))
        contenders[f"plain, {threads} thread{'s' if threads > 1 else ''}"] = started
    if "pfl" in peers:
        best = best_threads(PflRounds(workload))
        contenders["pfl"] = Contender.started(lambda: partial(plain_with, best, PflRounds(workload)))
    if "flower" in peers:
        contenders["flower"] = Contender.started(lambda: FlowerRounds(name))
    interleaved(name, contenders, turns)


def per_example(turns: int) -> None:
    names = ["ours", "opacus hooks", "opacus ghost", "opacus ew"]
    for model in ("lenet-5", "convnet"):
        work = {name: Contender.started(partial(contender, name, model, 64)) for name in names}
        interleaved(f"per-example gradients, {model}", work, turns)


def smoothing(turns: int) -> None:
    for d, h, clients in ((784, 64, 10), (512, 512, 10)):
        stack, thresholds = example(d, h, clients)
        ways: dict[str, Round] = {
            "ours": partial(t_tsvd, stack, thresholds["edge"]),
            "SVD of every slice": partial(by_svd, stack, thresholds["edge"], full=True),
        }
        work = {name: Contender(way, seconds(way)) for name, way in ways.items()}
        interleaved(f"T-tSVD {d}x{h}x{clients}", work, turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--only", default="W1,W5,W5-200,W2,per-example,t-tsvd")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    only = arguments.only.split(",")
    described = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in described if line.startswith("model name")]
    processor = names[0] if names else platform.processor()
    print(f"{os.cpu_count()} cores of {processor}, torch {torch.__version__}, {arguments.turns} turns\n")
    print(
        "| what | peer | peer | ours | ratio: median (range) | expected at least | peer's start-up | our start-up |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    peers = {"W1": ["plain", "pfl", "flower"], "W5": ["plain", "pfl"], "W5-200": ["pfl", "flower"]}
    peers["W2"] = ["plain", "pfl", "flower"]
    for name, found in peers.items():
        if name in only:
            simulate(name, found, arguments.turns)
    if "per-example" in only:
        per_example(arguments.turns)
    if "t-tsvd" in only:
        smoothing(arguments.turns)


if __name__ == "__main__":
    main()
