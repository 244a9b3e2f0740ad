"""Rounds of federated averaging through Flower's Ray simulation, in a process of its own.

    PYTHONPATH=benchmarks python benchmarks/peers/flower_rounds.py W1

Every line on standard input asks for a round, which is answered by `round SECONDS`.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from workloads import WORKLOADS

from fedveil import ArrayClients, make_model
from simulator import Workload, make_data, train_plainly


@functools.cache
def _data(name: str) -> tuple[Workload, ArrayClients, nn.Module]:
    """Made once in every actor."""
    workload = WORKLOADS[name]
    torch.set_num_threads(1)
    model = make_model(workload.model, workload.input_shape, workload.classes, seed=0)
    return workload, make_data(workload), model


def serve(name: str) -> None:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client = ClientApp()
    server = ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        workload, data, model = _data(name)
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        part = data.parts[int(context.node_config["partition-id"])]
        train_plainly(model, data.x[part], data.y[part], workload.epochs)
        content = RecordDict(
            {
                "arrays": ArrayRecord(model.state_dict()),
                "metrics": MetricRecord({"num-examples": len(part)}),
            }
        )
        return Message(content=content, reply_to=message)

    @server.main()
    def main(grid: Grid, _: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0)
        arrays = ArrayRecord(_data(name)[2].state_dict())
        for _line in sys.stdin:
            began = time.perf_counter()
            arrays = strategy.start(grid, arrays, num_rounds=1).arrays
            print(f"\nround {time.perf_counter() - began}", flush=True)

    resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(server, client, WORKLOADS[name].clients, backend_config={"client_resources": resources})


class FlowerRounds:
    """Every call is one round of the process, which starts Ray before the first."""

    def __init__(self, name: str) -> None:
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        quiet["RAY_worker_niceness"] = "0"  # our workers do not give way to others either
        here = Path(__file__).resolve().parent
        paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, __file__, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | quiet | {"PYTHONPATH": paths},
        )

    def within(self, limit: float) -> float | None:
        """The seconds of a round, None if it takes longer than the limit; then the process has been ended."""
        timer = threading.Timer(limit, self._process.kill)
        timer.start()
        try:
            return self()
        except (RuntimeError, BrokenPipeError):
            return None
        finally:
            timer.cancel()

    def __call__(self) -> float:
        """The seconds of the round as the server measured them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("round "):
                return float(line.split()[1])
        raise RuntimeError("Flower's process ended; run it by hand to see why")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)


if __name__ == "__main__":
    import flower_rounds  # actors find what clients run by the name of its module

    flower_rounds.serve(sys.argv[1])
