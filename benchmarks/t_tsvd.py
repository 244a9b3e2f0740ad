"""T-tSVD against a complex SVD of every frequency slice, interleaved in one run.

    python benchmarks/t_tsvd.py [--rounds 5] [--threads 2] [--large]

The stack is a shared low-rank part plus independent noise per client, in float32. "edge" is a threshold just
above the noise's singular values, where smoothing removes the noise; "small" is a thousandth of the largest
singular value, where nearly everything is kept. Times are medians; the spread is
(slowest - fastest) / median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedveil.linalg import slice_singular_values, t_tsvd

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


def seconds(work: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--large", action="store_true", help="also 1600x512x100 (minutes)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds")
    print(
        f"{'stack':>14} {'threshold':>9} {'ours ms':>9} {'spread':>6} {'full ms':>9} {'thin ms':>9}", end=""
    )
    print(f" {'full/ours':>9} {'thin/ours':>9} {'error':>8}")
    for d, h, clients in [*SIZES, *([LARGE] if arguments.large else [])]:
        stack, thresholds = example(d, h, clients)
        for label, threshold in thresholds.items():
            contenders: dict[str, Callable[[], Tensor]] = {
                "ours": partial(t_tsvd, stack, threshold),
                "full": partial(by_svd, stack, threshold, full=True),
                "thin": partial(by_svd, stack, threshold, full=False),
            }
            plain = contenders["thin"]()
            error = float((t_tsvd(stack, threshold) - plain).norm() / plain.norm())
            times: dict[str, list[float]] = {name: [] for name in contenders}
            for _ in range(arguments.rounds):
                for name, work in contenders.items():
                    times[name].append(seconds(work))
            ours, full, thin = (1e3 * statistics.median(times[name]) for name in ("ours", "full", "thin"))
            spread = 1e3 * (max(times["ours"]) - min(times["ours"])) / ours
            name = f"{d}x{h}x{clients}"
            print(f"{name:>14} {label:>9} {ours:9.1f} {spread:6.0%} {full:9.1f} {thin:9.1f}", end="")
            print(f" {full / ours:8.1f}x {thin / ours:8.1f}x {error:8.0e}", flush=True)


if __name__ == "__main__":
    main()
