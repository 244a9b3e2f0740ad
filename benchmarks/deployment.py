"""What a deployment costs: bytes and memory per node and method (`sizes`), many virtual clients (`clients`), and the
processes of a federation on loopback (`loopback`).

`sizes`: what the server sends one client in a round and what it answers, as bytes on the wire, and the memory that the
answer adds to the process in which a node computes it. LeNet-5 on 1x28x28 pictures, 10 classes, 600 records, one epoch.
`clients`: the simulator with ever more clients whose data is made when they take part; 100 of them are expected in a
round. Every row is a process of its own, forked after the imports, so that its peak memory is its own.
`loopback`: a server and two nodes as `fedveil deploy` starts them, TLS on, FedAvg with MLP-2: the seconds of each
exchange, and the resident memory of every process, waiting and at its peak in the run (from /proc: Linux).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedveil
from fedveil.data.client_data import ArrayClients, LazyClients
from fedveil.engines.simulation import Simulation
from fedveil.engines.worker import ClientWorker, one_thread
from fedveil.experiment.config import make_config
from fedveil.experiment.run import run_seed
from fedveil.federation.create import Federation, init
from fedveil.federation.processes import START_SECONDS, free_port
from fedveil.methods import METHODS
from fedveil.methods.method import AnyMethod, At, field_names
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.privacy.releases import Plan
from fedveil.session.loop import run_rounds
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
    """Sizes of clients that all have the same number of records, without a list of them."""

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
    """The result of `work` in a forked process, so that its peak memory is of this work and the imports alone."""
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


class Watched:
    """The resident memory of a process and of all that it started, by program, in MB."""

    PROGRAMS = ("superlink.py", "supernode.py", "superexec", "serverapp", "client_processes.py")

    def __init__(self, role: str, process: subprocess.Popen[bytes]) -> None:
        self.role = role
        self.process = process

    def memory(self) -> dict[str, int]:
        parents: dict[int, list[int]] = {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = entry.read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
        family = [self.process.pid]
        for parent in family:
            family += parents.get(parent, [])
        found: dict[str, int] = {}
        for number in family:
            with suppress(OSError, StopIteration):
                place = Path("/proc") / str(number)
                words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                status = (place / "status").read_text().splitlines()
                size = next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) // 1024
                name = next(
                    (known for known in self.PROGRAMS if known in words), f"fedveil deploy {self.role}"
                )
                found[name] = max(size, found.get(name, 0))
        return found


@contextmanager
def federation_of_two(place: Path) -> Iterator[tuple[Path, list[Watched]]]:
    """The server's folder and all processes, up and connected; they end with the block."""
    folders = init(place / "fed", Federation(2, port=free_port(), methods=("fedavg",), epsilon=None))
    stream = named_stream(0, "loopback")
    for folder in folders:
        x = stream.standard_normal((RECORDS, 64)).astype("float32")
        np.savez(folder / "data.npz", x=x, y=np.arange(RECORDS) % 10)
    server = place / "fed" / "server"
    started: list[Watched] = []

    def start(role: str, folder: Path, ready: str) -> None:
        log = place / f"{folder.name}.log"
        with log.open("wb") as out:
            command = [sys.executable, "-m", "fedveil", "deploy", role, str(folder)]
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        started.append(Watched(role, process))
        end = time.monotonic() + START_SECONDS
        while ready not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{folder.name} did not start:\n{log.read_text(errors='replace')}")
            time.sleep(0.2)

    try:
        start("server", server, "server is up")
        for folder in folders:
            start("node", folder, "SuperNode ID")
        yield server, started
    finally:
        for one in reversed(started):
            one.process.terminate()
        for one in started:
            one.process.wait(60)


def on_loopback(rounds: int) -> Iterator[dict[str, Any]]:
    """Rounds of one exchange each on two nodes: seconds, and the memory of the processes."""
    raw = {
        "task": {"dataset": "none", "model": "mlp-2", "input_shape": [64], "classes": 10},
        "partition": {"clients": 2},
        "method": {"name": "fedavg", "epochs": 1},
        "run": {"engine": "flower", "rounds": rounds, "sampler": "all", "deadline": 300.0},
    }
    with tempfile.TemporaryDirectory() as name, federation_of_two(Path(name)) as (server, processes):
        config = make_config(raw, [f"run.federation={json.dumps(str(server))}"])
        waiting = [one.memory() for one in processes]
        peak: list[dict[str, int]] = [{} for _ in processes]
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.2):
                for one, highest in zip(processes, peak, strict=True):
                    for program, size in one.memory().items():
                        highest[program] = max(size, highest.get(program, 0))

        watcher = threading.Thread(target=watch)
        watcher.start()
        began = time.perf_counter()
        try:
            result = run_seed(config, 0, experiment="loopback", results=Path(name) / "results")
        finally:
            done.set()
            watcher.join()
        whole = time.perf_counter() - began
    seconds = sorted(line["seconds"] for line in result.history)
    yield {
        "exchanges": len(seconds),
        "seconds_per_exchange": round(seconds[len(seconds) // 2], 1),
        "from": round(seconds[0], 1),
        "to": round(seconds[-1], 1),
        "whole_run": round(whole, 1),
    }
    for one, before, highest in zip(processes, waiting, peak, strict=True):
        for program, size in sorted(highest.items()):
            yield {
                "of": one.role,
                "program": program,
                "waiting_mb": before.get(program),
                "peak_mb": max(size, before.get(program, 0)),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["sizes", "clients", "loopback"])
    parser.add_argument("--methods", default=",".join(sorted(METHODS)))
    parser.add_argument("--counts", default="1000,10000,100000")
    parser.add_argument("--rounds", type=int, default=20, help="of clients and loopback")
    chosen = parser.parse_args()
    if chosen.what == "loopback":
        for row in on_loopback(chosen.rounds):
            print(json.dumps(row), flush=True)
        return
    print(json.dumps({"imports_mb": round(peak_mb())}), flush=True)
    if chosen.what == "sizes":
        for name in chosen.methods.split(","):
            print(json.dumps(in_own_process(partial(size_of, name))), flush=True)
    else:
        for count in chosen.counts.split(","):
            print(json.dumps(in_own_process(partial(many_clients, int(count), chosen.rounds))), flush=True)


if __name__ == "__main__":
    main()
