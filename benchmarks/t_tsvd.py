"""T-tSVD against a complex SVD of every frequency slice, interleaved in one run.

    python benchmarks/t_tsvd.py [--rounds 5] [--threads 2] [--large]

The stack is a shared low-rank part plus independent noise per client, in float32. "edge" is a threshold just
above the noise's singular values, where smoothing removes the noise; "small" is a thousandth of the largest
singular value, where nearly everything is kept. Times are medians; the spread is
(slowest - fastest) / median.

At the end: smoothing a whole LeNet-5 of ten clients against one local epoch of the same ten clients (500 images
each), on the same cores in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedveil import ArrayClients, At, Task, make_model, make_plan
from fedveil.engines.simulation import Simulation
from fedveil.linalg import slice_singular_values, t_tsvd
from fedveil.methods.fedceo import FedCEO, NoisyModel

SIZES = [(784, 64, 10), (512, 512, 10), (1600, 512, 10)]
LARGE = (1600, 512, 100)


def by_svd(stack: Tensor, threshold: float, full: bool) -> Tensor:
    """What the theorem says, slice by slice, without any of its symmetries."""
    spectrum = torch.fft.fft(stack, dim=0)
    for j in range(stack.shape[0]):
        left, sigma, right = torch.linalg.svd(spectrum[j], full_matrices=full)
        rank = sigma.shape[0]
        kept = (sigma - threshold).clamp_min(0).to(left.dtype)
        spectrum[j] = (left[:, :rank] * kept) @ right[:rank]
    back: Tensor = torch.fft.ifft(spectrum, dim=0).real
    return back


def example(d: int, h: int, clients: int) -> tuple[Tensor, dict[str, float]]:
    """A stack of noisy clients and its two thresholds."""
    generator = torch.Generator().manual_seed(d + h + clients)
    shared = torch.randn(d, 8, generator=generator) @ torch.randn(8, h, generator=generator)
    noise = torch.randn(clients, d, h, generator=generator)
    stack = 0.02 * shared + 0.02 * noise
    first = slice_singular_values(stack[:1] * clients)[0]
    edge = 0.02 * clients**0.5 * (d**0.5 + h**0.5)  # Gaussian matrices end there
    return stack, {"edge": 1.02 * edge, "small": 1e-3 * float(first[0])}


def timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def smoothing_against_training(rounds: int, threads: int) -> None:
    """One FedCEO smoothing step of LeNet-5, K = 10, over one epoch of the cohort; both on `threads` cores."""
    clients, images = 10, 500
    task = Task(partial(make_model, "lenet-5", (3, 32, 32), 10))
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(images, 3, 32, 32, generator=generator), torch.arange(images) % 10)
        for _ in range(clients)
    ]
    data = ArrayClients.from_arrays(pairs)
    plan = make_plan(data, rounds=1)
    method = FedCEO(lr=0.1, epochs=1, batch_size=64, interval=1)
    engine = Simulation(task, data, method, plan, seed=0, workers=threads)
    at, everyone = At(plan, 1), tuple(range(clients))
    down = method.broadcast(at, method.init_server(task.init(0), plan), everyone)
    learned = FedCEO(interval=1, lam=10.0)
    times: dict[str, list[float]] = {"epoch": [], "edge": [], "small": []}
    try:
        for _ in range(rounds):
            start = time.perf_counter()
            up = engine.exchange(everyone, down, at).up
            times["epoch"].append(time.perf_counter() - start)
            assert isinstance(up, NoisyModel)
            stack = {name: leaf.clone() for name, leaf in up.params.items()}
            for label, chosen in (("edge", method), ("small", learned)):
                start = time.perf_counter()
                chosen.smooth(stack, 1, method.noise_std(at))
                times[label].append(time.perf_counter() - start)
    finally:
        engine.close()
    epoch = statistics.median(times["epoch"])
    print(f"LeNet-5, K = {clients}: one local epoch of the cohort {1e3 * epoch:.0f} ms")
    for label, note in (("edge", 'lam = "auto"'), ("small", "lam = 10")):
        step = statistics.median(times[label])
        print(f"  smoothing step, {note}: {1e3 * step:.0f} ms = {step / epoch:.2f} of the epoch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--large", action="store_true", help="only 1600x512x100 (minutes)")
    parser.add_argument("--step", action="store_true", help="only the whole smoothing step against an epoch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds")
    print(
        f"{'stack':>14} {'threshold':>9} {'ours ms':>9} {'spread':>6} {'full ms':>9} {'thin ms':>9}", end=""
    )
    print(f" {'full/ours':>9} {'thin/ours':>9} {'error':>8}")
    sizes = [LARGE] if arguments.large else [] if arguments.step else SIZES
    for d, h, clients in sizes:
        stack, thresholds = example(d, h, clients)
        for label, threshold in thresholds.items():
            contenders: dict[str, Callable[[], Tensor]] = {
                "ours": partial(t_tsvd, stack, threshold),
                "full": partial(by_svd, stack, threshold, full=True),
                "thin": partial(by_svd, stack, threshold, full=False),
            }
            times: dict[str, list[float]] = {name: [] for name in contenders}
            results: dict[str, Tensor] = {}
            for _ in range(arguments.rounds):
                for name, work in contenders.items():
                    results[name], taken = timed(work)
                    times[name].append(taken)
            ours, full, thin = (1e3 * statistics.median(times[name]) for name in ("ours", "full", "thin"))
            error = float((results["ours"] - results["thin"]).norm() / results["thin"].norm())
            spread = 1e3 * (max(times["ours"]) - min(times["ours"])) / ours
            name = f"{d}x{h}x{clients}"
            print(f"{name:>14} {label:>9} {ours:9.1f} {spread:6.0%} {full:9.1f} {thin:9.1f}", end="")
            print(f" {full / ours:8.1f}x {thin / ours:8.1f}x {error:8.0e}", flush=True)
    if not arguments.large:
        smoothing_against_training(arguments.rounds, arguments.threads)


if __name__ == "__main__":
    main()
