"""Rounds per second and peak memory against the number of clients, the cohort and the size of the model.

    python benchmarks/scale.py [--rounds 5] [--figure docs/figures/scale.png]

Clients exist only while they take part: their examples are made when they are asked for. Every point is a run of
`fedveil.run` in a process of its own. What is fitted is `time ~ x^a` over each axis by least squares of the
logarithms, and the bytes of memory that one more client, cohort member or parameter costs.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

import fedveil
from fedveil.data.client_data import LazyClients
from fedveil.methods.fedavg import FedAvg
from fedveil.session.loop import Callback, RoundEnd


@dataclass(frozen=True)
class Point:
    clients: int = 10_000
    cohort: int = 50
    hidden: int = 64
    sampler: str = "fixed"

    @property
    def parameters(self) -> int:
        return 784 * self.hidden + self.hidden * 10


BASE = Point()
AXES = {
    "clients": [replace(BASE, clients=n) for n in (100, 1000, 10_000, 100_000)],
    "clients, Poisson": [replace(BASE, clients=n, sampler="poisson") for n in (100, 1000, 10_000, 100_000)],
    "cohort": [replace(BASE, cohort=k) for k in (10, 30, 100, 300, 1000)],
    "parameters": [replace(BASE, hidden=h) for h in (16, 64, 256, 1024)],
}


class _Clock(Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def round_ends(self, end: RoundEnd) -> None:
        self.ends.append(time.perf_counter())


def make_client(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    return torch.randn(20, 784, generator=generator), torch.randint(0, 10, (20,), generator=generator)


def run_point(point: Point, rounds: int) -> None:
    """Prints seconds per round and peak memory in bytes, this process and its workers together."""
    clients = LazyClients([20] * point.clients, make_client)
    task = fedveil.Task(lambda: fedveil.make_model("mlp-2", (784,), 10, hidden=point.hidden))
    clock = _Clock()
    fedveil.run(
        task,
        clients,
        FedAvg(lr=0.1, epochs=1, batch_size=20),
        rounds=rounds + 2,
        cohort=point.cohort,
        sampler=point.sampler,  # type: ignore[arg-type]
        score_clients=False,
        callbacks=[clock],
    )
    taken = np.diff(clock.ends)[1:]  # the first rounds take the memory that later ones use again
    memory = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    )
    print(json.dumps({"seconds": statistics.median(taken.tolist()), "memory": memory * 1024}))


def measure(point: Point, rounds: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--point", json.dumps(asdict(point)), "--rounds", str(rounds)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found: dict[str, float] = json.loads(lines[-1])
    return found


def place(axis: str, point: Point) -> int:
    return int(getattr(point, axis.split(",")[0]))


def draw(found: dict[str, list[tuple[int, float, float]]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, len(found), figsize=(3.2 * len(found), 5), sharey="row")
    for column, (axis, points) in enumerate(found.items()):
        x = [p[0] for p in points]
        panels[0][column].loglog(x, [1 / p[1] for p in points], marker="o")
        panels[1][column].semilogx(x, [p[2] / 2**20 for p in points], marker="o")
        panels[1][column].set_xlabel(axis)
    # Panels of a row share their scale: only now are all points on it.
    panels[1][0].set_ylim(0, 1.1 * max(p[2] for points in found.values() for p in points) / 2**20)
    panels[0][0].set_ylabel("rounds per second")
    panels[1][0].set_ylabel("peak memory, MiB")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figure", default=None)
    parser.add_argument("--point", default=None, help="measure this point here (used by the processes)")
    arguments = parser.parse_args()
    if arguments.point is not None:
        run_point(Point(**json.loads(arguments.point)), arguments.rounds)
        return
    found: dict[str, list[tuple[int, float, float]]] = {}
    for axis, points in AXES.items():
        rows = []
        for point in points:
            result = measure(point, arguments.rounds)
            rows.append((place(axis, point), result["seconds"], result["memory"]))
            print(
                f"{axis:>16} {rows[-1][0]:>8}  {1 / result['seconds']:8.1f} rounds/s  "
                f"{result['memory'] / 2**20:7.0f} MiB",
                flush=True,
            )
        found[axis] = rows
        x, seconds, memory = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
        exponent = np.polyfit(np.log(x), np.log(seconds), 1)[0]
        last = np.log(seconds[-1] / seconds[-2]) / np.log(x[-1] / x[-2])
        each = np.polyfit(x, memory, 1)[0]
        print(
            f"{axis:>16}: time ~ {axis.split(',')[0]}^{exponent:.2f} (last step ^{last:.2f}), "
            f"{each:.0f} bytes of memory each\n",
            flush=True,
        )
    if arguments.figure is not None:
        draw(found, arguments.figure)


if __name__ == "__main__":
    main()
