"""`engine = "ray"` beside the local pool and Flower's Ray simulation, interleaved in one run.

    PYTHONPATH=benchmarks python benchmarks/peers/ray_cluster.py --json ray.json

All three train the same model on the same data with FedAvg on this machine's cores, ours on a Ray cluster of one
machine. A ratio is of two times in the same turn; the table gives medians and ranges. Start-up is left out. Where a
round of Flower takes longer than `--limit` seconds, the limit counts as its time: the ratio is then a lower bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from flower_rounds import FlowerRounds
from measuring import steady
from workloads import WORKLOADS

from fedveil.engines.simulation import cores
from simulator import OurRounds, make_data

TARGETS = {"W1": {"overhead": 1.3}, "W5-200": {"flower": 30.0}, "W5-2000": {"flower": 30.0}}


def _ratio(times: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    ratios = sorted(a / b for a, b in zip(times, other, strict=True))
    return {"median": statistics.median(ratios), "lowest": ratios[0], "highest": ratios[-1]}


def measure(name: str, turns: int, limit: float) -> dict[str, Any]:
    workload = WORKLOADS[name]
    clients = make_data(workload)
    pool = OurRounds(workload, clients)  # forks, so it comes before Ray's threads
    pool()
    ray.init("local", num_cpus=cores(), include_dashboard=False, log_to_driver=False)
    cluster = OurRounds(workload, clients, "auto")
    cluster()
    flower: FlowerRounds | None = FlowerRounds(name)
    finished = flower.within(10 * limit) is not None if flower is not None else False
    times: dict[str, list[float]] = {"pool": [], "ray": [], "flower": []}
    for _ in range(turns):
        times["pool"].append(steady(pool))
        times["ray"].append(steady(cluster))
        took = flower.within(limit) if flower is not None and finished else None
        finished = took is not None
        times["flower"].append(limit if took is None else took)
    if finished and flower is not None:
        flower.close()
    cluster.close()
    pool.close()
    ray.shutdown()
    seconds = {kind: statistics.median(found) for kind, found in times.items()}
    overhead, gain = _ratio(times["ray"], times["pool"]), _ratio(times["flower"], times["ray"])
    return {
        "workload": name,
        "seconds": seconds,
        "overhead": overhead,
        "flower": gain,
        "flower_finished": finished,
        "targets": TARGETS[name],
    }


def row(found: dict[str, Any]) -> str:
    seconds, overhead, gain = found["seconds"], found["overhead"], found["flower"]
    bound = "" if found["flower_finished"] else "at least "
    return (
        f"| {found['workload']} | {seconds['pool']:.3g} s | {seconds['ray']:.3g} s | {seconds['flower']:.3g} s "
        f"| {overhead['median']:.2f} ({overhead['lowest']:.2f}-{overhead['highest']:.2f}) "
        f"| {bound}{gain['median']:.1f} ({gain['lowest']:.1f}-{gain['highest']:.1f}) "
        f"| {', '.join(f'{key} {value:g}' for key, value in found['targets'].items())} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--only", default="W1,W5-200,W5-2000")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print("| what | pool | ray | Flower | ray / pool: median (range) | Flower / ray | target |")
    print("|---|---|---|---|---|---|---|", flush=True)
    found = []
    for name in arguments.only.split(","):
        found.append(measure(name, arguments.turns, arguments.limit))
        print(row(found[-1]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
