"""What secure aggregation costs: encoding and noise beside a round of W1, and masks beside the plain upload.

W1: 10 clients x 600 examples of 784 features, MLP-2, batch 64, 30 epochs, in the simulator on one core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

import fedveil
from fedveil.data.client_data import ArrayClients
from fedveil.engines.worker import ClientWorker, one_thread
from fedveil.methods.method import At
from fedveil.methods.secure import SecurelyAggregated
from fedveil.methods.udp_fedavg import UDPFedAvg
from fedveil.secure_sum.identities import Identity, Roster, Terms
from fedveil.secure_sum.journal import Journal
from fedveil.secure_sum.masks import Words
from fedveil.secure_sum.node import NodeRound
from fedveil.secure_sum.server import ServerRound
from fedveil.secure_sum.settings import SecureSum
from fedveil.streams import named_stream

NODES = 10


def median(what: str, call: Callable[[], object], repeats: int = 5) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    found = statistics.median(seconds)
    print(f"{what:66s} {1000 * found:9.1f} ms")
    return found


def masked_round(length: int, dropouts: int) -> dict[str, float]:
    """The seconds of each leg of one round, of all nodes and the server in this process."""
    identities = [Identity.generate(f"node-{i:02d}") for i in range(NODES)]
    roster = Roster({one.node: one.public for one in identities})
    group = SecureSum().group(NODES)
    terms = Terms("w1", 1, 1, tuple(roster.keys), group.threshold, group.colluders, length, roster.digest)
    nodes = [NodeRound(one, roster, SecureSum(), terms, Journal()) for one in identities]
    server = ServerRound(roster, terms)
    values: Words = np.zeros(length, dtype=np.uint32)
    marks = [time.perf_counter()]
    keys = server.advertised([node.advertise() for node in nodes])
    marks.append(time.perf_counter())
    shares = server.shared([node.share(keys) for node in nodes])
    marks.append(time.perf_counter())
    left = nodes[dropouts:]
    survivors = server.uploaded([node.upload(shares[node.node], values) for node in left])
    marks.append(time.perf_counter())
    signed = server.confirmed([node.confirm(survivors) for node in left])
    marks.append(time.perf_counter())
    server.total([node.unmask(survivors, signed) for node in left])
    marks.append(time.perf_counter())
    legs = ("advertise", "share", "upload", "confirm", "unmask")
    return {leg: after - before for leg, before, after in zip(legs, marks, marks[1:], strict=False)}


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6000, 784, generator=generator)
    y = torch.randint(0, 47, (6000,), generator=generator)
    clients = ArrayClients(x, y, list(torch.arange(6000).reshape(NODES, -1)))
    task = fedveil.Task(lambda: fedveil.make_model("mlp-2", (784,), 47))
    method = SecurelyAggregated(UDPFedAvg(lr=0.1, epochs=30, batch_size=64), SecureSum())
    plan = fedveil.make_plan(clients, rounds=10, sampler="all")
    server, at = method.init_server(task.init(0), plan), At(plan, 1)
    down = method.broadcast(at, server, range(NODES))
    worker = ClientWorker(task, clients, method, 0)
    update = {name: torch.randn(NODES, *leaf.shape) for name, leaf in task.init(0).items()}
    streams = [named_stream(0, row) for row in range(NODES)]
    noise = method.noise(plan)
    with one_thread():
        whole = median("a round of W1, secure", lambda: worker.update(range(NODES), down, {}, at), 3)
        encoding = median("  encoding and noise of ten uploads", lambda: noise.encode(update, streams))
    print(f"{'encoding and noise / round':66s} {encoding / whole:9.2%}   (limit 20 %)")
    for length in (task.parameter_count, 50_000):
        for dropouts in (0, 2):
            legs = masked_round(length, dropouts)
            told = ", ".join(f"{leg} {1000 * seconds:.1f}" for leg, seconds in legs.items())
            print(f"masks of {NODES} nodes, {length} numbers, {dropouts} dropouts, ms: {told}")


if __name__ == "__main__":
    main()
