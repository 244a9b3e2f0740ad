"""Exchanges of FedSGD and FedEM on small batches, against a plain PyTorch loop and against another version.

    python benchmarks/peers/small_batches.py --before ../fedveil-before

4 clients x 3000 images of 28x28, batches of 8, LeNetZhu; all contenders take turns in one run. `--before` is a work
tree of another version (`git worktree add`): it runs in a process of its own and is asked for one turn at a time.
Processor time of one process and one thread, so that other programs disturb little.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cases import BATCH, LR, MethodRounds, images, plain_fedsgd
from measuring import Ratio
from torch import nn

import fedveil
from fedveil import ArrayClients, Task
from fedveil.methods.fedem import FedEM
from fedveil.methods.fedsgd import FedSGD

STEPS, SHAPE = 15, (1, 28, 28)
REPEATS = {"fedsgd": 30, "fedem": 2}


def ours(name: str) -> Callable[[], object]:
    task = Task(lambda: fedveil.make_model("lenet-zhu", SHAPE, 10))
    method = FedSGD(lr=LR, batch_size=BATCH) if name == "fedsgd" else FedEM(lr=LR, batch_size=BATCH)
    return MethodRounds(task, images(4, 3000, SHAPE), method, workers=1)


class PlainFedEM:
    """Algorithm 1 as a script has it: a copy of the model for each client's perturbation, autograd for everything."""

    def __init__(self) -> None:
        self.clients: ArrayClients = images(4, 3000, SHAPE)
        self.model = fedveil.make_model("lenet-zhu", SHAPE, 10, seed=0)
        self.copy = fedveil.make_model("lenet-zhu", SHAPE, 10, seed=0)
        self.method = FedEM(lr=LR, batch_size=BATCH)
        self.deltas = [self.inside(torch.randn(BATCH, *SHAPE)) for _ in self.clients.parts]
        self.done = 0

    def inside(self, delta: torch.Tensor) -> torch.Tensor:
        norms = delta.flatten(1).norm(dim=1).clamp(min=1e-12).reshape(-1, 1, 1, 1)
        inside: torch.Tensor = delta * (self.method.rho_max / norms).clamp(max=1)
        return inside

    def __call__(self) -> None:
        start = BATCH * (self.done % (3000 // BATCH))
        self.done += 1
        mean = [torch.zeros_like(p) for p in self.model.parameters()]
        for k, part in enumerate(self.clients.parts):
            index = part[start : start + BATCH]
            x, y, delta = self.clients.x[index], self.clients.y[index], self.deltas[k]
            self.copy.load_state_dict(self.model.state_dict())
            weights = list(self.copy.parameters())
            for step in range(STEPS):
                moved = (x + delta).requires_grad_()
                (ascent,) = torch.autograd.grad(nn.functional.cross_entropy(self.copy(moved), y), moved)
                delta = self.inside(delta - self.method.perturbation_lr * ascent.sign())
                if step + 1 < STEPS:
                    loss = nn.functional.cross_entropy(self.copy(x + delta), y)
                    with torch.no_grad():
                        for p, g in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                            p.sub_(LR * g)
            self.deltas[k] = delta
            loss = nn.functional.cross_entropy(self.model(x + delta), y)
            for total, g in zip(mean, torch.autograd.grad(loss, list(self.model.parameters())), strict=True):
                total += g / len(self.deltas)
        with torch.no_grad():
            for p, g in zip(self.model.parameters(), mean, strict=True):
                p.sub_(LR * g)


class Before:
    """The same exchanges by another version, in a process that is asked for turns."""

    def __init__(self, tree: Path, name: str) -> None:
        command = [sys.executable, __file__, "--serve", name]
        paths = f"{tree.resolve() / 'src'}{os.pathsep}{Path(__file__).parent}"
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )

    def turn(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def seconds(work: Callable[[], object], name: str) -> float:
    """Processor time of one exchange, the mean of some."""
    began = time.process_time()
    for _ in range(REPEATS[name]):
        work()
    return (time.process_time() - began) / REPEATS[name]


def serve(name: str) -> None:
    work = ours(name)
    work()
    for _ in sys.stdin:
        print(seconds(work, name), flush=True)


def compare(name: str, turns: int, tree: Path | None) -> None:
    plain = plain_fedsgd() if name == "fedsgd" else PlainFedEM()
    contenders: dict[str, Callable[[], float]] = {
        "ours": _turns(ours(name), name),
        "plain": _turns(plain, name),
    }
    before = None if tree is None else Before(tree, name)
    if before is not None:
        before.turn()
        contenders["before"] = before.turn
    times: dict[str, list[float]] = {who: [] for who in contenders}
    for _ in range(turns):
        for who, turn in contenders.items():
            times[who].append(turn())
    if before is not None:
        before.close()
    told = ", ".join(f"{who} {1e3 * sorted(took)[turns // 2]:.2f} ms" for who, took in times.items())
    print(f"{name}: {told}")
    for who in times.keys() - {"ours"}:
        print(f"  {who} / ours: {Ratio.of(times[who], times['ours']).text()}")


def _turns(work: Callable[[], object], name: str) -> Callable[[], float]:
    work()
    return lambda: seconds(work, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--methods", default="fedsgd,fedem")
    parser.add_argument("--before", type=Path, help="a work tree of another version")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.serve:
        serve(arguments.serve)
        return
    for name in arguments.methods.split(","):
        compare(name, arguments.turns, arguments.before)


if __name__ == "__main__":
    main()
