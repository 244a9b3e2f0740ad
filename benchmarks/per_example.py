"""Clipped per-example gradients against the other ways to get them, interleaved in one run.

    python benchmarks/per_example.py [--rounds 7] [--batch 64] [--threads 1] [--models lenet-5,convnet]

Every contender computes the clipped sum of per-example gradients of one batch (the plain step: the ordinary
gradient), all but Opacus ew in the memory layout that the model prefers. Times are medians, relative
to the plain step; the spread is (slowest - fastest) / median. Memory is the growth of the process's peak over
one step, each in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedveil.models.registry import make_model
from fedveil.training.per_example import clipped_gradient_sum

Step = Callable[[], object]
CLIP = 1.0


def clip_samples(module: nn.Module) -> list[Tensor]:
    """The clipped sum of the samples that Opacus leaves on the parameters."""
    samples: list[Tensor] = [leaf.grad_sample for leaf in module.parameters()]  # type: ignore[attr-defined]
    norms = torch.stack([sample.flatten(1).norm(dim=1) for sample in samples]).norm(dim=0)
    factors = (CLIP / (norms + 1e-6)).clamp(max=1.0)
    sums = [torch.einsum("b,b...->...", factors, sample) for sample in samples]
    for leaf in module.parameters():
        leaf.grad_sample = None  # type: ignore[attr-defined]
        leaf.grad = None
    return sums


def contender(name: str, model: str, batch: int) -> Step:
    """One step of this contender on this model."""
    module = make_model(model, (3, 32, 32), 10)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 3, 32, 32, generator=generator)
    y = torch.randint(0, 10, (batch,), generator=generator)
    if getattr(module, "channels_last", False) and name != "opacus ew":  # which cannot view that layout
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.contiguous(memory_format=torch.channels_last)
    loss = nn.functional.cross_entropy
    params = {key: leaf.detach() for key, leaf in module.named_parameters()}
    if name == "ours":
        return lambda: clipped_gradient_sum(module, params, x, y, CLIP)
    if name == "plain step":
        leaves = list(module.parameters())
        return lambda: torch.autograd.grad(loss(module(x), y, reduction="sum"), leaves)
    if name == "vmap(grad)":

        def one(leaves: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
            return loss(functional_call(module, leaves, (a[None],)), b[None])

        mapped = vmap(grad(one), in_dims=(None, 0, 0))

        def step() -> list[Tensor]:
            samples = mapped(params, x, y).values()
            norms = torch.stack([sample.flatten(1).norm(dim=1) for sample in samples]).norm(dim=0)
            factors = (CLIP / norms).clamp(max=1.0)
            return [torch.einsum("b,b...->...", factors, sample) for sample in samples]

        return step
    return opacus_step(name, module, x, y)


def opacus_step(name: str, module: nn.Module, x: Tensor, y: Tensor) -> Step:
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.grad_sample.gsm_exp_weights import GradSampleModuleExpandedWeights

    loss = nn.functional.cross_entropy
    if name == "opacus ghost":
        ghost = GradSampleModuleFastGradientClipping(
            module, max_grad_norm=CLIP, use_ghost_clipping=True, loss_reduction="sum"
        )

        def ghost_step() -> object:
            losses = loss(ghost(x), y, reduction="none")
            torch.autograd.backward(losses.sum(), retain_graph=True)
            factors = ghost.get_clipping_coef().detach()
            ghost.zero_grad()
            ghost.disable_hooks()
            torch.autograd.backward((factors * losses).sum())
            ghost.enable_hooks()
            sums = [leaf.grad for leaf in ghost.parameters()]
            ghost.zero_grad()
            return sums

        return ghost_step
    wrap = GradSampleModule if name == "opacus hooks" else GradSampleModuleExpandedWeights
    wrapped = wrap(module, loss_reduction="sum")

    def step() -> list[Tensor]:
        torch.autograd.backward(loss(wrapped(x), y, reduction="sum"))
        return clip_samples(module)

    return step


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure_memory(name: str, model: str, batch: int, answer: multiprocessing.SimpleQueue[float]) -> None:
    """Peak growth in MB of one step after a warm-up on one example."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    contender(name, model, 2)()
    step = contender(name, model, batch)
    before = peak = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    step()
    done.set()
    watcher.join()
    answer.put((peak - before) / 2**20)


def memory(name: str, model: str, batch: int) -> float:
    context = multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()
    process = context.Process(target=measure_memory, args=(name, model, batch, answer))
    process.start()
    process.join()
    return float(answer.get()) if process.exitcode == 0 else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", default="lenet-5,convnet")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")  # Opacus warns about its hooks
    names = ["ours", "plain step", "vmap(grad)", "opacus hooks", "opacus ew", "opacus ghost"]
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), batch {arguments.batch}")
    for model in arguments.models.split(","):
        steps = {name: contender(name, model, arguments.batch) for name in names}
        for step in steps.values():
            step()
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(arguments.rounds):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - start)
        plain, ours = statistics.median(times["plain step"]), statistics.median(times["ours"])
        print(f"{model:>14} {'ms':>8} {'spread':>6} {'/ plain':>8} {'/ ours':>8} {'MB':>8}")
        for name in names:
            middle = statistics.median(times[name])
            spread = (max(times[name]) - min(times[name])) / middle
            used = memory(name, model, arguments.batch)
            print(f"{name:>14} {1e3 * middle:8.1f} {spread:6.0%} {middle / plain:7.2f}x", end="")
            print(f" {middle / ours:7.2f}x {used:8.0f}", flush=True)


if __name__ == "__main__":
    main()
