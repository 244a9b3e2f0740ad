"""`engine = "ray"` beside the local pool and Flower's Ray simulation, interleaved in one run.

    make peers        # also writes benchmarks/peers/ray.json and the tables of it in README and docs/speed.md

All three train the same model on the same data with FedAvg on this machine's cores, ours on a Ray cluster of one
machine. The workers of both clusters have the priority of their programs, as the pool's have; Ray by itself would give
them way to everything else. A ratio is of two times in the same turn; the table gives medians and ranges. Start-up is
left out. Where a round of Flower takes longer than `--limit` seconds (a minute more with its start-up), the limit
counts as its time: the ratio is then a lower bound.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from flower_rounds import FlowerRounds
from measuring import Ratio, machine, steady
from recording import record
from table import RAY_HEADER, ray_line
from workloads import WORKLOADS

from fedveil.engines.simulation import cores
from simulator import OurRounds, make_data

TARGETS = {"W1": {"overhead": 1.3}, "W5-200": {"flower": 30.0}, "W5-2000": {"flower": 30.0}}


_START_UP = 60.0  # seconds that a start of Ray and Flower may take


def measure(name: str, turns: int, limit: float) -> dict[str, Any]:
    workload = WORKLOADS[name]
    clients = make_data(workload)
    pool = OurRounds(workload, clients)  # forks, so it comes before Ray's threads
    pool()
    ray.init("local", num_cpus=cores(), include_dashboard=False, log_to_driver=False)
    cluster = OurRounds(workload, clients, "auto")
    cluster()
    flower = FlowerRounds(name)
    finished = flower.within(limit + _START_UP) is not None
    times: dict[str, list[float]] = {"pool": [], "ray": [], "flower": []}
    for _ in range(turns):
        times["pool"].append(steady(pool))
        times["ray"].append(steady(cluster))
        took = flower.within(limit) if finished else None
        finished = took is not None
        times["flower"].append(limit if took is None else took)
    if finished:
        flower.close()
    cluster.close()
    pool.close()
    ray.shutdown()
    return {
        "what": name,
        "seconds": {kind: statistics.median(found) for kind, found in times.items()},
        "overhead": asdict(Ratio.of(times["ray"], times["pool"])),
        "flower": asdict(Ratio.of(times["flower"], times["ray"])),
        "flower_finished": finished,
        "targets": TARGETS[name],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--limit", type=float, default=30.0)
    parser.add_argument("--only", default=",".join(TARGETS))
    parser.add_argument("--json", type=Path, help="where the results are written, workload by workload")
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")
    print(RAY_HEADER, flush=True)
    for name in arguments.only.split(","):
        found = measure(name, arguments.turns, arguments.limit)
        print(ray_line(found), flush=True)
        if arguments.json is not None:
            record(arguments.json, machine(), arguments.turns, [found])


if __name__ == "__main__":
    main()
