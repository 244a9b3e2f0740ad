"""What a deployment costs: bytes and memory per node and method (`sizes`), and many virtual clients (`clients`).

`sizes`: what the server sends one client in a round and what it answers, as bytes on the wire, and the memory that the
answer adds to the process in which a node computes it. LeNet-5 on 1x28x28 pictures, 10 classes, 600 records, one epoch.
`clients`: the simulator with ever more clients whose data is made when they take part; 100 of them are expected in a
round. Every row is a process of its own, forked after the imports, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import fedveil
from fedveil.data.client_data import ArrayClients, LazyClients
from fedveil.engines.simulation import Simulation
from fedveil.engines.worker import ClientWorker, one_thread
from fedveil.methods import METHODS
from fedveil.methods.method import AnyMethod, At, field_names
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.privacy.releases import Plan
from fedveil.run import run_rounds
from fedveil.streams import named_stream
from fedveil.task import Task
from fedveil.tree import with_axis

RECORDS = 600
# Less work of the same kind: messages keep their size.
SHORT: dict[str, Any] = {
    "epochs": 1,
    "trajectories": 1,
    "max_steps": 1,
    "real_batches": 1,
    "image_updates": 1,
    "model_updates": 1,
    "matching_steps": 1,
    "server_steps": 1,
}


class SameSize(Sequence[int]):
    """So many clients with as many records each, without a list of them."""

    def __init__(self, clients: int, records: int) -> None:
        self._clients = clients
        self._records = records

    def __len__(self) -> int:
        return self._clients

    def __getitem__(self, index: Any) -> Any:
        return (
            [self._records] * len(range(*index.indices(self._clients)))
            if isinstance(index, slice)
            else self._records
        )


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def size_of(name: str) -> dict[str, Any]:
    """One client's part in a round of this method."""
    stream = named_stream(0, "deployment")
    x = torch.from_numpy(stream.standard_normal((2 * RECORDS, 1, 28, 28))).float()
    y = torch.arange(2 * RECORDS) % 10
    clients = ArrayClients(x, y, list(torch.arange(2 * RECORDS).split(RECORDS)))
    task = Task(lambda: fedveil.make_model("lenet-5", (1, 28, 28), 10))
    known = field_names(METHODS[name])
    method = METHODS[name](**{key: value for key, value in SHORT.items() if key in known})
    plan = Plan(2, 2, "all", 10, RECORDS, RECORDS)
    at = At(plan, 1, 0)
    down = method.broadcast(at, method.init_server(task.init(0), plan), [0, 1]).rows([0])
    before = peak_mb()
    with one_thread():
        up, _ = ClientWorker(task, clients, method, 0, "entropy").update([0], down, {}, at)
    exchanges = method.exchanges(plan)
    return {
        "method": name,
        "exchanges": exchanges,
        "down": exchanges * len(down.to_bytes()),
        "up": exchanges * len(up.to_bytes()),
        "added_mb": round(peak_mb() - before),
    }


def many_clients(count: int, rounds: int) -> dict[str, Any]:
    """Rounds of UDP-FedAvg over so many clients of 50 records."""
    before = peak_mb()
    records, features = 50, 64
    centres = torch.from_numpy(named_stream(0, "centres").standard_normal((10, features))).float()

    def make(client: int) -> tuple[torch.Tensor, torch.Tensor]:
        stream = named_stream(0, client, "data")
        y = torch.from_numpy(stream.integers(0, 10, records))
        noise = torch.from_numpy(stream.standard_normal((records, features))).float()
        return centres[y] + noise, y

    task = Task(lambda: fedveil.make_model("mlp-2", (features,), 10))
    method: AnyMethod = UDPFedAvg(epochs=1, batch_size=10, lr=0.1, clip=0.5, noise_multiplier=1.0)
    clients = LazyClients(SameSize(count, records), make)
    plan = Plan(count, 100, "poisson", rounds, records, records)
    engine = Simulation(task, clients, method, plan, seed=0, workers=1)
    began = time.perf_counter()
    outcome = run_rounds(task, method, engine, plan, method.init_server(task.init(0), plan), seed=0)
    seconds = time.perf_counter() - began
    engine.close()
    unseen = [make(count + number) for number in range(20)]
    x, y = torch.cat([x for x, _ in unseen]), torch.cat([y for _, y in unseen])
    found = task.outputs(with_axis(method.model(outcome.server)), x[None])[0].argmax(-1)
    return {
        "clients": count,
        "seconds_per_round": round(seconds / rounds, 3),
        "added_mb": round(peak_mb() - before),
        "accuracy": round(float((found == y).float().mean()), 3),
    }


def in_own_process(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer of a forked process: its peak memory is that of what it does, on top of the imports."""
    mine, theirs = multiprocessing.Pipe(duplex=False)

    def report() -> None:
        torch.set_num_threads(1)
        theirs.send(work())

    process = multiprocessing.get_context("fork").Process(target=report)
    process.start()
    theirs.close()
    try:
        answer: dict[str, Any] = mine.recv()
    except EOFError:
        raise SystemExit(1) from None
    process.join()
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["sizes", "clients"])
    parser.add_argument("--methods", default=",".join(sorted(METHODS)))
    parser.add_argument("--counts", default="1000,10000,100000")
    parser.add_argument("--rounds", type=int, default=20)
    chosen = parser.parse_args()
    print(json.dumps({"imports_mb": round(peak_mb())}), flush=True)
    if chosen.what == "sizes":
        for name in chosen.methods.split(","):
            print(json.dumps(in_own_process(partial(size_of, name))), flush=True)
    else:
        for count in chosen.counts.split(","):
            print(json.dumps(in_own_process(partial(many_clients, int(count), chosen.rounds))), flush=True)


if __name__ == "__main__":
    main()
