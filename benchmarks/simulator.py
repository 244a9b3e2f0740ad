"""The simulator against a plain per-client PyTorch loop, interleaved in one run, as ratios.

W1: 10 clients x 600 examples of 784 features, MLP-2, batch 64, 30 epochs.
W5: 1000 clients x 60 examples, MLP-2, batch 64, one epoch.
W2: LeNet-5, 10 clients x 500 images 3x32x32, batch 64, one epoch.
Both sides train the same model with dropout from the same start and average the result. For networks of linear layers
a third side does the products of these shapes and nothing else, on memory in the cache, one process per core: no
simulator can be faster, and what it reaches of the peak of large products is what the shapes allow.

`--breakdown` shows instead where the time goes that a worker spends on a client, part by part.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

import fedveil
from fedveil.data.client_data import ArrayClients
from fedveil.engines.shared_memory import SharedMemory
from fedveil.engines.simulation import Simulation, cores
from fedveil.engines.upload_tables import Expected, UploadTables
from fedveil.engines.worker import ClientWorker
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.method import AnyMethod, At
from fedveil.methods.shared_model import averaging_weights
from fedveil.streams import ClientStreams, ServerStreams
from fedveil.task import Task
from fedveil.training import local_sgd
from fedveil.training.linear_sgd import LinearSteps
from fedveil.tree import weighted_sum


@dataclass(frozen=True)
class Workload:
    name: str
    model: str
    input_shape: tuple[int, ...]
    classes: int
    clients: int
    examples: int
    epochs: int
    target: float

    def multiply_adds(self) -> float:
        """Of one round: forward, gradients of weights, gradients of activations (not of the input)."""
        model = fedveil.make_model(self.model, self.input_shape, self.classes, seed=0)
        return 2.0 * layer_work(model, self.input_shape) * self.clients * self.examples * self.epochs


def layer_work(model: nn.Module, shape: tuple[int, ...]) -> float:
    """Multiply-adds of one example's step: three products per layer, two for the first."""
    sizes: list[float] = []

    def measure(layer: nn.Module, _inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if isinstance(layer, nn.Linear):
            sizes.append(float(layer.weight.numel()))
        elif isinstance(layer, nn.Conv2d):
            sizes.append(float(layer.weight.numel() * output.shape[2] * output.shape[3]))

    hooks = [layer.register_forward_hook(measure) for layer in model.modules()]
    model(torch.zeros(1, *shape))
    for hook in hooks:
        hook.remove()
    return 3 * sum(sizes) - sizes[0]


WORKLOADS = {
    "W1": Workload("W1", "mlp-2", (784,), 47, 10, 600, 30, 4.0),
    "W5": Workload("W5", "mlp-2", (784,), 47, 1000, 60, 1, 6.0),
    "W2": Workload("W2", "lenet-5", (3, 32, 32), 10, 10, 500, 1, 1.3),
}


def make_data(workload: Workload) -> ArrayClients:
    """The same examples for every contender."""
    generator = torch.Generator().manual_seed(0)
    count = workload.clients * workload.examples
    x = torch.randn(count, *workload.input_shape, generator=generator)
    y = torch.randint(0, workload.classes, (count,), generator=generator)
    return ArrayClients(x, y, list(torch.arange(count).reshape(workload.clients, -1)))


def train_plainly(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int) -> None:
    """Straightforward local SGD."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        order = torch.randperm(len(y))
        for begin in range(0, len(y), 64):
            index = order[begin : begin + 64]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[index]), y[index])
            loss.backward()
            optimizer.step()


def plain_round(model: nn.Module, clients: ArrayClients, epochs: int) -> dict[str, torch.Tensor]:
    """Straightforward FedAvg: one client after the other, one optimizer each, default threads."""
    start = {name: leaf.clone() for name, leaf in model.state_dict().items()}
    total = {name: torch.zeros_like(leaf) for name, leaf in start.items()}
    for part in clients.parts:
        model.load_state_dict(start)
        train_plainly(model, clients.x[part], clients.y[part], epochs)
        for name, leaf in model.state_dict().items():
            total[name] += leaf / len(clients.parts)
    model.load_state_dict(start)
    return total


class OurRounds:
    """Every call is one round in the simulator, of FedAvg if no method is given; with `cluster` on that Ray cluster."""

    def __init__(
        self,
        workload: Workload,
        clients: ArrayClients,
        cluster: str | None = None,
        method: AnyMethod | None = None,
    ) -> None:
        self._task = Task(lambda: fedveil.make_model(workload.model, workload.input_shape, workload.classes))
        self._method = method or FedAvg(lr=0.1, epochs=workload.epochs, batch_size=64)
        self._plan = fedveil.make_plan(clients, rounds=1000, sampler="all")
        self._engine = Simulation(self._task, clients, self._method, self._plan, seed=0, cluster=cluster)
        self._server = self._method.init_server(self._task.init(0), self._plan)
        self._cohort = range(workload.clients)
        self._rounds = 0

    def __call__(self) -> None:
        self._rounds += 1
        at = At(self._plan, self._rounds)
        down = self._method.broadcast(at, self._server, self._cohort)
        answers = self._engine.exchange(self._cohort, down, at)
        streams = ServerStreams(0, self._rounds)
        self._method.server_update(self._task, at, self._server, answers.clients, answers.up, streams)  # type: ignore[arg-type]

    def close(self) -> None:
        self._engine.close()


class ProductsAlone:
    """The products of a round of local SGD on a network of linear layers, spread over one process per core."""

    def __init__(self, model: nn.Module, workload: Workload, stack: int = 5) -> None:
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        shapes = [(layer.out_features, layer.in_features) for layer in layers]
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        for _ in range(cores()):
            ours, theirs = context.Pipe()
            share = workload.clients // cores()
            context.Process(
                target=_multiply, args=(theirs, shapes, workload, share, stack), daemon=True
            ).start()
            self._pipes.append(ours)

    def __call__(self) -> None:
        for pipe in self._pipes:
            pipe.send_bytes(b"go")
        for pipe in self._pipes:
            pipe.recv_bytes()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send_bytes(b"")


def _multiply(
    pipe: Connection, shapes: list[tuple[int, int]], workload: Workload, share: int, stack: int
) -> None:
    torch.set_num_threads(1)
    weights = [torch.zeros(stack, *shape) for shape in shapes]
    widths = [min(64, workload.examples - begin) for begin in range(0, workload.examples, 64)]
    inputs = {b: [torch.zeros(stack, b, width) for _, width in shapes] for b in widths}
    outputs = {b: [torch.zeros(stack, b, width) for width, _ in shapes] for b in widths}
    while pipe.recv_bytes():
        for _ in range(share // stack * workload.epochs):
            for b in widths:
                for w, a, out in zip(weights, inputs[b], outputs[b], strict=True):
                    torch.bmm(a, w.transpose(1, 2), out=out)
                for w, a, g in list(zip(weights, inputs[b], outputs[b], strict=True))[:0:-1]:
                    torch.bmm(g, w, out=a)
                for w, a, g in zip(weights, inputs[b], outputs[b], strict=True):
                    w.baddbmm_(g.transpose(1, 2), a, alpha=-0.1)
        pipe.send_bytes(b"done")


def measure(workload: Workload, repeats: int, peak: float) -> None:
    clients = make_data(workload)
    ours = OurRounds(workload, clients)
    model = fedveil.make_model(workload.model, workload.input_shape, workload.classes, seed=0)
    linear = not any(isinstance(layer, nn.Conv2d) for layer in model.modules())
    floor = ProductsAlone(model, workload) if linear else None
    candidates: list[tuple[str, Callable[[], object]]] = [
        ("ours", ours),
        ("plain", lambda: plain_round(model, clients, workload.epochs)),
    ]
    if floor is not None:
        candidates.append(("products", floor))
    times: dict[str, list[float]] = {name: [] for name, _ in candidates}
    for _, candidate in candidates:
        candidate()
    for _ in range(repeats):
        for name, candidate in candidates:
            began = time.perf_counter()
            candidate()
            times[name].append(time.perf_counter() - began)
    ours.close()
    if floor is not None:
        floor.close()
    ours_s, plain_s = (statistics.median(times[name]) for name in ("ours", "plain"))
    ratios = sorted(p / o for o, p in zip(times["ours"], times["plain"], strict=True))
    rate = workload.multiply_adds() / ours_s / 1e9
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{workload.name}  plain {plain_s:6.2f} s  ours {ours_s:6.2f} s  "
        f"ratio {statistics.median(ratios):5.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}), expected {workload.target}  "
        f"{rate:5.0f} GFLOP/s = {100 * rate / peak:3.0f} % of peak  memory {memory:.2f} GiB"
    )
    if floor is not None:
        alone = statistics.median(times["products"])
        rate = workload.multiply_adds() / alone / 1e9
        print(
            f"    its products alone {alone:6.3f} s, {rate:5.0f} GFLOP/s = {100 * rate / peak:3.0f} % of peak; "
            f"ours reaches {100 * alone / ours_s:3.0f} % of that"
        )


class Stopwatch:
    """Adds up the processor time spent in functions, each without what it calls of the others."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    def watch(self, owner: object, name: str, label: str) -> None:
        """From now on calls of this function count under this label."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            began = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                took = time.process_time() - began
                self.seconds[label] = self.seconds.get(label, 0.0) + took - self._inner.pop()
                self._inner[-1] += took

        setattr(owner, name, timed)


def break_down(workload: Workload, repeats: int) -> None:
    """What a worker does for one client, in this process: medians over the rounds, without the first."""
    torch.set_num_threads(1)
    clients = make_data(workload)
    task = Task(lambda: fedveil.make_model(workload.model, workload.input_shape, workload.classes))
    method = FedAvg(lr=0.1, epochs=workload.epochs, batch_size=64)
    plan = fedveil.make_plan(clients, rounds=1000, sampler="all")
    server = method.init_server(task.init(0), plan)
    uploads = SharedMemory(workload.clients * (8 * task.parameter_count + 4096))
    boxes = UploadTables(uploads)
    worker = ClientWorker(task, clients, method, seed=0)
    task.memory = boxes.lend
    stopwatch = Stopwatch()
    for owner, name, label in (
        (worker, "update", "everything else"),
        (clients, "load", "examples loaded"),
        (local_sgd, "_walk", "order of the examples"),
        (ClientStreams, "of_round", "streams made"),
        (Task, "_draw_kept", "dropout drawn"),
        (LinearSteps, "gather", "batches gathered"),
        (LinearSteps, "start", "steps prepared"),
        (LinearSteps, "_put_together", "steps prepared"),
        (LinearSteps, "step", "steps"),
        (boxes, "put", "upload written"),
    ):
        stopwatch.watch(owner, name, label)
    size = min(40, -(-workload.clients // cores()))  # about as the simulator cuts its cohort
    expected: Expected | None = None
    rounds: list[dict[str, float]] = []
    for number in range(repeats + 1):
        stopwatch.seconds = {}
        at = At(plan, number + 1)
        down = method.broadcast(at, server, range(workload.clients))
        for first in range(0, workload.clients, size):
            ids = list(range(first, min(first + size, workload.clients)))
            boxes.open(ids, expected)
            up, _ = worker.update(ids, down, {}, at)
            told = boxes.put({f"up/{name}": leaf for name, leaf in up.tensors().items()}, workload.clients)
            expected = expected or told
        began = time.process_time()
        assert expected is not None
        tables = {leaf.name.removeprefix("up/params/"): uploads.view(leaf) for leaf in expected.leaves}
        sizes = tables.pop("up/size")
        weighted_sum(tables, averaging_weights(sizes, "size"))
        stopwatch.seconds["average (server, one thread)"] = time.process_time() - began
        rounds.append(stopwatch.seconds)
    print(f"{workload.name}, processor time, milliseconds per client:")
    table = {label: statistics.median(r.get(label, 0.0) for r in rounds[1:]) for label in rounds[-1]}
    for label, seconds in sorted(table.items(), key=lambda item: -item[1]):
        print(f"  {label:30s} {1e3 * seconds / workload.clients:8.3f}")
    total = statistics.median(sum(r.values()) for r in rounds[1:])
    print(f"  {'together':30s} {1e3 * total / workload.clients:8.3f}")


def matmul_peak() -> float:
    """GFLOP/s of a large product with all threads, the best of several."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    best = 0.0
    for _ in range(12):
        began = time.perf_counter()
        torch.mm(a, b)
        best = max(best, 2 * 2048**3 / (time.perf_counter() - began) / 1e9)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default="W1,W5,W2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--breakdown", action="store_true", help="where the time of a client goes")
    arguments = parser.parse_args()
    if arguments.breakdown:
        for name in arguments.workloads.split(","):
            break_down(WORKLOADS[name], arguments.repeats)
        return
    peak = matmul_peak()
    print(f"{torch.get_num_threads()} threads, matmul peak {peak:.0f} GFLOP/s")
    for name in arguments.workloads.split(","):
        measure(WORKLOADS[name], arguments.repeats, peak)


if __name__ == "__main__":
    main()
