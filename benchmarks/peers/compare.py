"""Ours beside its peers, interleaved in one run: one table of ratios, start-up apart.

    make peers        # also writes benchmarks/peers/results.json and the tables of it in README and docs/speed.md

Every contender trains the same model on the same data from the same start with FedAvg: Apple's pfl, Flower's Ray
simulation with one actor per core, and a plain PyTorch loop with the thread count that suits it best. Clipped
per-example gradients, and whole rounds of record-level DP-SGD, stand beside Opacus, FedSGD on small batches and rounds
of an LSTM on texts beside a plain loop, T-tSVD beside a complex SVD of every slice. In a turn each runs for half a
second, but at least one round. A ratio is the peer's time per round over ours in the same turn; the table gives the
median and the range over the turns. Start-up is everything from nothing to the end of the first round (processes,
Ray, data, warming up), for the peer and for ours.
"""

from __future__ import annotations

import argparse
import gc
import os
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from cases import CASES, MethodRounds
from flower_rounds import FlowerRounds
from measuring import HEADER, Contender, Round, Row, interleaved, machine, seconds
from recording import record
from workloads import WORKLOADS

from fedveil import make_model
from fedveil.linalg import t_tsvd
from per_example import contender
from simulator import OurRounds, make_data, plain_round
from t_tsvd import by_svd, example

EXPECTED = {
    ("W1", "pfl"): 4.0,
    ("W1", "flower"): 3.0,
    ("W5", "pfl"): 6.0,
    ("W5-200", "flower"): 50.0,
    ("FedSGD, 4 clients x 8 images, LeNetZhu", "plain"): 1.5,
}


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


def simulate(name: str, peers: list[str], turns: int) -> list[Row]:
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
        from pfl_rounds import PflRounds

        best = best_threads(PflRounds(workload))
        contenders["pfl"] = Contender.started(lambda: partial(plain_with, best, PflRounds(workload)))
    if "flower" in peers:
        contenders["flower"] = Contender.started(lambda: FlowerRounds(name))
    rows = interleaved(name, contenders, turns, EXPECTED)
    for one in contenders.values():
        if isinstance(one.round, (OurRounds, FlowerRounds)):
            one.round.close()
    gc.collect()
    return rows


def per_example(turns: int) -> list[Row]:
    rows = []
    names = ["ours", "opacus hooks", "opacus ghost", "opacus ew"]
    for model in ("lenet-5", "convnet"):
        work = {name: Contender.started(partial(contender, name, model, 64)) for name in names}
        rows += interleaved(f"per-example gradients, {model}", work, turns, EXPECTED)
    return rows


def smoothing(turns: int) -> list[Row]:
    rows = []
    for d, h, clients in ((784, 64, 10), (512, 512, 10)):
        stack, thresholds = example(d, h, clients)
        ways: dict[str, Round] = {
            "ours": partial(t_tsvd, stack, thresholds["edge"]),
            "SVD of every slice": partial(by_svd, stack, thresholds["edge"], full=True),
        }
        work = {name: Contender(way, seconds(way)) for name, way in ways.items()}
        rows += interleaved(f"T-tSVD {d}x{h}x{clients}", work, turns, EXPECTED)
    return rows


def beside_plain(key: str, turns: int) -> list[Row]:
    """Whole rounds of a method other than FedAvg beside a straightforward loop."""
    case = CASES[key]
    ours = Contender.started(case.ours)
    try:
        threads = best_threads(case.plain())
        name = f"{case.peer}, {threads} thread{'s' if threads > 1 else ''}"
        peer = Contender.started(lambda: partial(plain_with, threads, case.plain()))
        return interleaved(case.what, {"ours": ours, name: peer}, turns, EXPECTED)
    finally:
        assert isinstance(ours.round, MethodRounds)
        ours.round.close()


def sections(turns: int) -> dict[str, Callable[[], list[Row]]]:
    """What can be measured, by name, in the table's order."""
    peers = {"W1": ["plain", "pfl", "flower"], "W5": ["plain", "pfl"], "W5-200": ["pfl", "flower"]}
    peers["W2"] = ["plain", "pfl", "flower"]
    rounds = {name: partial(simulate, name, names, turns) for name, names in peers.items()}
    cases = {key: partial(beside_plain, key, turns) for key in CASES}
    return {
        **rounds,
        "per-example": partial(per_example, turns),
        **cases,
        "t-tsvd": partial(smoothing, turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", help="sections, separated by commas; all of them by default")
    parser.add_argument("--json", type=Path, help="where the results are written, section by section")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    known = sections(arguments.turns)
    only = list(known) if arguments.only is None else arguments.only.split(",")
    if unknown := set(only) - known.keys():
        parser.error(f"--only: {sorted(unknown)} is none of {list(known)}")
    found = machine()
    print(
        f"{found['cores']} cores of {found['processor']}, torch {found['torch']}, {arguments.turns} turns\n"
    )
    print(HEADER, flush=True)
    failed = []
    for name in only:
        try:
            rows = [asdict(row) for row in known[name]()]
        except Exception:  # one peer that does not start must not cost the others' numbers
            traceback.print_exc()
            failed.append(name)
            continue
        if arguments.json is not None:
            record(arguments.json, found, arguments.turns, rows)
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
