"""One image update of FedLAP against the straightforward way to compute it, interleaved in one run.

    python benchmarks/gradient_matching.py [--rounds 3] [--images 100] [--clients 10] [--models convnet,mlp-2]
        [--shape 3,32,32] [--cores 1]

The update is the gradient of the matching distance with respect to a client's synthetic images. Straightforward:
`create_graph` on the whole image batch, client after client. "In pieces": the same on as many images at a time as fit
the cache, the best that is known of plain autograd (networks of convolutions only).

With one core times are processor seconds of one thread, so that a busy machine does not decide. With `--cores N`, N
clients are updated at once, one in each of N processes of one thread, and times are wall time; the straightforward way
may also take N threads in one process, client after client. As in fedveil's workers, freed memory stays in its process
and is not returned to the system (`keep_freed_memory`); the straightforward way is measured with and without that.

Memory (Linux) is the peak of a process of its own that does one update. All must give the same images: the largest
difference is printed, relative to the largest gradient.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.engines.processes import keep_freed_memory
from fedveil.models.registry import make_model
from fedveil.task import Task
from fedveil.training.gradient_matching import Distance, matching_gradient, matching_loss, weighted_gradient
from fedveil.tree import Params, expand, with_axis

Step = Callable[[], Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """Updates of so many clients' images."""

    model: str
    images: int
    clients: int
    shape: Shape = (3, 32, 32)

    @property
    def ways(self) -> list[str]:
        return (
            ["fedveil", "in pieces", "straightforward"]
            if self.convolutions
            else ["fedveil", "straightforward"]
        )

    @property
    def convolutions(self) -> bool:
        return self.model.startswith("convnet")


class Unrecognised(nn.Sequential):
    """A network that fedveil leaves to autograd."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def contender(way: str, work: Work) -> Step:
    """One update of all clients' images."""

    def build() -> nn.Module:
        model = make_model(work.model, work.shape, 10)
        return Unrecognised(OrderedDict(model.named_children())) if way == "in pieces" else model

    task = Task(build)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(work.clients, work.images, *work.shape, generator=generator)
    y = (torch.arange(work.images) % 10).expand(work.clients, work.images)
    weights = torch.full((work.clients, work.images), 1 / work.images)
    w = expand(with_axis(task.init(0)), work.clients)
    # The target only has to be some gradient: that of sixteen other images.
    other = torch.randn(work.clients, 16, *work.shape, generator=generator)
    real = weighted_gradient(task, w, other, y[:, :16], torch.full((work.clients, 16), 1 / 16))
    if way == "straightforward":
        return lambda: torch.stack([plain(task, w, real, x, y, k) for k in range(work.clients)])
    return lambda: matching_gradient(task, w, real, x, y, weights, Distance())


def plain(task: Task, w: Params, real: Params, x: Tensor, y: Tensor, k: int) -> Tensor:
    leaves = {name: leaf[k].clone().requires_grad_() for name, leaf in w.items()}
    images = x[k].clone().requires_grad_()
    loss = nn.functional.cross_entropy(functional_call(task.module, leaves, (images,)), y[k])
    found = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    target = {name: leaf[k] for name, leaf in real.items()}
    distance = matching_loss(target, dict(zip(leaves, found, strict=True)))
    return torch.autograd.grad(distance, images)[0]


def peak(way: str, work: Work, answers: multiprocessing.SimpleQueue[float]) -> None:
    torch.set_num_threads(1)
    if way == "fedveil":
        keep_freed_memory()
    contender(way, work)()
    # Not getrusage, whose peak a process inherits from the one that started it.
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    answers.put(int(line.split()[1]) / 1024)


def peak_memory(way: str, work: Work) -> float:
    """MiB of a whole process that does one client's update."""
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.SimpleQueue[float] = context.SimpleQueue()
    one = Work(work.model, work.images, 1, work.shape)
    process = context.Process(target=peak, args=(way, one, answers))
    process.start()
    process.join()
    return answers.get()


def serve(way: str, work: Work, threads: int, keeps: bool, orders: Connection) -> None:
    torch.set_num_threads(threads)
    if keeps:
        keep_freed_memory()
    step = contender(way, work)
    step()
    orders.send(True)
    while orders.recv():
        step()
        orders.send(True)


class Crew:
    """Processes that wait, and do one update each at a time."""

    def __init__(self, way: str, work: Work, processes: int, threads: int, keeps: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends = []
        for _ in range(processes):
            here, there = context.Pipe()
            context.Process(target=serve, args=(way, work, threads, keeps, there), daemon=True).start()
            self._ends.append(here)
        self._wait()

    def step(self) -> None:
        for end in self._ends:
            end.send(True)
        self._wait()

    def close(self) -> None:
        for end in self._ends:
            end.send(False)

    def _wait(self) -> None:
        for end in self._ends:
            end.recv()


def measured(
    steps: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            began = clock()
            step()
            times[name].append(clock() - began)
    return times


def print_times(times: dict[str, list[float]], memory: dict[str, float]) -> None:
    peaks = {name: f"peak of a process {size:5.0f} MiB" for name, size in memory.items()}
    for name, values in times.items():
        ratios = [other / own for other, own in zip(values, times["fedveil"], strict=True)]
        print(
            f"  {name:28} {statistics.median(values):8.3f} s   / fedveil {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f})   {peaks.get(name, '')}"
        )


def on_one_core(work: Work, rounds: int) -> None:
    torch.set_num_threads(1)
    steps = {way: contender(way, work) for way in work.ways}
    results = {way: step() for way, step in steps.items()}  # warm up
    expected = results["straightforward"]
    apart = float((results["fedveil"] - expected).abs().max() / expected.abs().max())
    print(
        f"{work.model}, {work.clients} clients x {work.images} images of {work.shape}, apart by {apart:.1e}:"
    )
    times = measured(dict(steps), rounds, time.process_time)
    print_times(times, {way: peak_memory(way, work) for way in work.ways})


def on_cores(work: Work, rounds: int, cores: int) -> None:
    one = Work(work.model, work.images, 1, work.shape)
    crews = {way: Crew(way, one, cores, 1, keeps=way == "fedveil") for way in work.ways}
    crews["straightforward, memory kept"] = Crew("straightforward", one, cores, 1, keeps=True)
    crews[f"straightforward, {cores} threads"] = Crew(
        "straightforward", Work(work.model, work.images, cores, work.shape), 1, cores
    )
    times = measured({name: crew.step for name, crew in crews.items()}, rounds, time.perf_counter)
    for crew in crews.values():
        crew.close()
    print(f"{work.model}, {cores} clients at once x {work.images} images of {work.shape}:")
    print_times(times, {way: peak_memory(way, one) for way in work.ways})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--models", default="convnet,mlp-2")
    parser.add_argument("--shape", default="3,32,32")
    parser.add_argument("--cores", type=int, default=1)
    chosen = parser.parse_args()
    shape = tuple(int(part) for part in chosen.shape.split(","))
    for model in chosen.models.split(","):
        work = Work(model, chosen.images, chosen.clients, shape)
        if work.convolutions:  # which gain nothing by stacking
            work = Work(model, chosen.images, 1, shape)
        if chosen.cores > 1:
            on_cores(work, chosen.rounds, chosen.cores)
        else:
            on_one_core(work, chosen.rounds)


if __name__ == "__main__":
    main()
