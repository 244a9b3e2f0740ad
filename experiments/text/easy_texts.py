"""Why FedEM's training on SST-2 stands still: how easy its perturbed texts are, before and after it.

    python experiments/text/reduced.py sst2 --rows fedem --results results --data data
    python experiments/text/easy_texts.py --results results --data data

The loss of client 0's first batches and the length of its gradient, as they are and as FedEM's client shows them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

import safetensors.torch
import torch

from fedveil.experiment.config import load_config
from fedveil.experiment.prepare import Prepared, prepare
from fedveil.methods.fedsgd import batch_in_step
from fedveil.methods.method import At
from fedveil.streams import ClientStreams
from fedveil.tree import Params, flatten, with_axis

BATCHES = 5


def told(prepared: Prepared, model: Params, seed: int) -> str:
    """Loss and gradient of some batches, plain and perturbed, at this model."""
    task, method, data = prepared.task, prepared.method, prepared.clients.load([0])
    w = with_axis(model)
    state = method.init_client(task, data, ClientStreams(seed, 1, (0,), 0))
    rows: list[tuple[float, float, float, float]] = []
    for number in range(BATCHES):
        streams = ClientStreams(seed, 1, (0,), number)
        at = At(prepared.plan, 1, number)
        down = method.broadcast(at, method.init_server(model, prepared.plan), [0])
        up, state = method.client_update(task, at, down, data, state, streams)
        batch = batch_in_step(data, method.batch_size, number, streams)
        shown = task.perturbed(batch, state["delta"][:, : batch.y.shape[1]])
        rows.append(
            (
                float(task.loss(w, batch)),
                float(task.loss(w, shown)),
                float(flatten(task.grad(w, batch)).norm()),
                float(flatten(up.gradient).norm()),
            )
        )
    plain, perturbed, long, sent = (fmean(column) for column in zip(*rows, strict=True))
    return f"loss {plain:.3f}, perturbed {perturbed:.4f}; gradient {long:.3f}, perturbed {sent:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--data", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for folder in sorted(arguments.results.glob("text-sst2-fedem/*/seed-*")):
        seed = int(folder.name.removeprefix("seed-"))
        prepared = prepare(load_config(folder / "config.toml"), seed, arguments.data)
        assert prepared.task.text is not None
        tokens = prepared.task.text.embedding_table().norm(dim=1).mean()
        print(f"{folder.name}: radius {prepared.method.rho_max:g}, tokens of mean length {float(tokens):.3g}")
        print(f"{folder.name}, start: {told(prepared, prepared.task.init(seed), seed)}")
        trained = safetensors.torch.load_file(folder / "model.safetensors")
        print(f"{folder.name}, end:   {told(prepared, trained, seed)}")


if __name__ == "__main__":
    main()
