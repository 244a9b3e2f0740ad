"""One image update of FedLAP against the straightforward way to compute it, interleaved in one run.

    python benchmarks/gradient_matching.py [--rounds 3] [--images 100] [--clients 10] [--models convnet,mlp-2]
        [--shape 3,32,32]

The update is the gradient of the matching distance with respect to a client's synthetic images. Straightforward:
`create_graph` on the whole image batch, client after client. Times are processor seconds of one thread, so that a
busy machine does not decide; the median of the rounds. Memory (Linux) is the peak of a process of its own that does
one update.
Both must give the same images: the largest difference is printed, relative to the largest gradient.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.models.registry import make_model
from fedveil.task import Task
from fedveil.training.gradient_matching import Distance, matching_gradient, matching_loss, weighted_gradient
from fedveil.tree import Params, expand, with_axis

Step = Callable[[], Tensor]
Shape = tuple[int, ...]


def contender(name: str, model: str, images: int, clients: int, shape: Shape = (3, 32, 32)) -> Step:
    """One update of all clients' images."""
    task = Task(lambda: make_model(model, shape, 10))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients, images, *shape, generator=generator)
    y = (torch.arange(images) % 10).expand(clients, images)
    weights = torch.full((clients, images), 1 / images)
    w = expand(with_axis(task.init(0)), clients)
    # The target only has to be some gradient: that of sixteen other images.
    other = torch.randn(clients, 16, *shape, generator=generator)
    real = weighted_gradient(task, w, other, y[:, :16], torch.full((clients, 16), 1 / 16))
    if name == "ours":
        return lambda: matching_gradient(task, w, real, x, y, weights, Distance())
    return lambda: torch.stack([plain(task, w, real, x, y, k) for k in range(clients)])


def plain(task: Task, w: Params, real: Params, x: Tensor, y: Tensor, k: int) -> Tensor:
    leaves = {name: leaf[k].clone().requires_grad_() for name, leaf in w.items()}
    images = x[k].clone().requires_grad_()
    loss = nn.functional.cross_entropy(functional_call(task.module, leaves, (images,)), y[k])
    found = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    target = {name: leaf[k] for name, leaf in real.items()}
    distance = matching_loss(target, dict(zip(leaves, found, strict=True)))
    return torch.autograd.grad(distance, images)[0]


def peak(
    name: str, model: str, images: int, shape: Shape, answers: multiprocessing.SimpleQueue[float]
) -> None:
    torch.set_num_threads(1)
    contender(name, model, images, 1, shape)()
    # Not getrusage, whose peak a process inherits from the one that started it.
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    answers.put(int(line.split()[1]) / 1024)


def peak_memory(name: str, model: str, images: int, shape: Shape) -> float:
    """MiB of a whole process that does one client's update."""
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.SimpleQueue[float] = context.SimpleQueue()
    process = context.Process(target=peak, args=(name, model, images, shape, answers))
    process.start()
    process.join()
    return answers.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--models", default="convnet,mlp-2")
    parser.add_argument("--shape", default="3,32,32")
    chosen = parser.parse_args()
    shape = tuple(int(part) for part in chosen.shape.split(","))
    torch.set_num_threads(1)
    for model in chosen.models.split(","):
        clients = (
            1 if model.startswith("convnet") else chosen.clients
        )  # convolutions gain nothing by stacking
        steps = {
            name: contender(name, model, chosen.images, clients, shape)
            for name in ("ours", "straightforward")
        }
        results = {name: step() for name, step in steps.items()}  # warm up
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(chosen.rounds):
            for name, step in steps.items():
                began = time.process_time()
                step()
                times[name].append(time.process_time() - began)
        medians = {name: statistics.median(values) for name, values in times.items()}
        apart = (results["ours"] - results["straightforward"]).abs().max()
        largest = results["straightforward"].abs().max()
        print(f"{model}, {clients} clients x {chosen.images} images of {shape}:")
        for name, seconds in medians.items():
            memory = peak_memory(name, model, chosen.images, shape)
            print(f"  {name:16} {seconds:8.3f} s   peak of the process {memory:7.0f} MiB")
        print(f"  ratio {medians['straightforward'] / medians['ours']:.2f}x, apart by {apart / largest:.1e}")


if __name__ == "__main__":
    main()
