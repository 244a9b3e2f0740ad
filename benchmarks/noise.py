"""What exact noise and exact sums cost, against floating-point noise and sums, interleaved in one run, as ratios.

    python benchmarks/noise.py [--repeats 15]

W1: a round of udp-fedavg with 10 clients x 600 examples of 784 features, MLP-2, batch 64, 30 epochs.
DP-SGD: one epoch of record-level DP-SGD on 512 images 3x32x32, LeNet-5, batch 64, in one client.
The other side draws `value + std * normal` in float32 and sums in float32. It is not private: docs/noise.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

import fedveil
from fedveil.data.client_data import ArrayClients
from fedveil.methods import user_level
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.privacy import noise
from fedveil.privacy.mechanisms import gaussian
from fedveil.privacy.private_sum import NoisySum
from fedveil.streams import ClientStreams, Stream, normal
from fedveil.task import Task
from fedveil.training.layer_gradients import ChannelsLast, Explicit, Outer
from fedveil.training.private_sgd import PoissonBatches, StepStreams, private_sgd
from fedveil.tree import Params, add, flat_rows, with_axis
from simulator import WORKLOADS, OurRounds, make_data

TARGETS = {"W1": 1.15, "DP-SGD": 1.3}


def float_noise(value: Params, std: float, streams: Sequence[Stream], _step: float | None = None) -> Params:
    singles = {name: leaf.float() for name, leaf in value.items()}
    return {name: leaf + std * normal(streams, leaf.shape[1:], leaf) for name, leaf in singles.items()}


def float_models(
    upload: Callable[..., Params], start: Params, update: Params, streams: Sequence[Stream], lr: float
) -> Params:
    return add(start, upload(update, streams), scale=lr)


def float_sum(
    uploads: Params, _like: Params, present: int, *_: object, start: Params, **__: object
) -> NoisySum:
    total = {name: leaf.sum(0, keepdim=True) - present * start[name] for name, leaf in uploads.items()}
    return NoisySum(total, present)


def explicit_sum(part: Explicit, factors: Tensor) -> Params:
    return {
        name: torch.mv(flat_rows(leaf).mT, factors.float()).reshape(leaf.shape[1:])
        for name, leaf in part.leaves.items()
    }


def outer_sum(part: Outer, factors: Tensor) -> Params:
    return {part.name: (part.outputs * factors[:, None].float()).mT @ part.inputs}


def channels_last_sum(part: ChannelsLast, factors: Tensor) -> Params:
    summed = torch.mv(part.leaf.flatten(1).mT, factors.float())
    return {part.name: summed.reshape(part.leaf.shape[1:]).permute(0, 3, 1, 2)}


@contextmanager
def in_floating_point() -> Iterator[None]:
    """Straightforward noise and sums, in floating point."""
    with (
        patch.object(noise, "add_gaussian", float_noise),
        patch.object(user_level, "noisy_models", float_models),
        patch.object(user_level, "private_sum", float_sum),
        patch.object(Explicit, "weighted_sum", explicit_sum),
        patch.object(Outer, "weighted_sum", outer_sum),
        patch.object(ChannelsLast, "weighted_sum", channels_last_sum),
    ):
        yield


def private_rounds() -> OurRounds:
    """Rounds of udp-fedavg in the simulator."""
    workload = WORKLOADS["W1"]
    method = UDPFedAvg(lr=0.1, epochs=workload.epochs, batch_size=64)
    rounds = OurRounds(workload, make_data(workload), method=method)
    rounds()  # forks the workers, which keep the noise functions patched now
    return rounds


def dp_sgd() -> Callable[[], object]:
    """One epoch of DP-SGD on LeNet-5."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(512, 3, 32, 32, generator=generator), torch.arange(512) % 10
    data = ArrayClients.from_arrays([(x, y)]).load([0])
    task = Task(lambda: fedveil.make_model("lenet-5", (3, 32, 32), 10))
    start, batches = with_axis(task.init(0)), PoissonBatches.of_epochs([512], 64, 1)
    mechanism = gaussian(1.0, 1.1)
    torch.set_num_threads(1)  # as in a worker
    return lambda: private_sgd(
        task, start, data, StepStreams.of(ClientStreams(0, 1, (0,))), batches, mechanism, lr=0.1
    )


def compare(name: str, exact: Callable[[], object], floating: Callable[[], object], repeats: int) -> None:
    times: dict[str, list[float]] = {"exact": [], "float": []}

    def timed(side: str) -> None:
        began = time.perf_counter()
        if side == "exact":
            exact()
        else:
            with in_floating_point():
                floating()
        times[side].append(time.perf_counter() - began)

    for side in times:
        timed(side)
        times[side].clear()
    for number in range(repeats):
        for side in ("exact", "float") if number % 2 == 0 else ("float", "exact"):
            timed(side)
    ratios = sorted(e / f for e, f in zip(times["exact"], times["float"], strict=True))
    medians = {side: statistics.median(found) for side, found in times.items()}
    print(
        f"{name:7s} float {medians['float']:.3f} s  exact {medians['exact']:.3f} s  "
        f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.2f}-{ratios[-1]:.2f}), at most {TARGETS[name]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    exact = private_rounds()
    with in_floating_point():
        floating = private_rounds()
    compare("W1", exact, floating, repeats)
    exact.close()
    floating.close()
    step = dp_sgd()
    compare("DP-SGD", step, step, repeats)


if __name__ == "__main__":
    main()
