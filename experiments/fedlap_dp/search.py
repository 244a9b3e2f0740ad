"""A small search for FedLAP-DP and DP-FedAvg on the reduced MNIST, at the epsilon of its tables.

    python experiments/fedlap_dp/search.py [--methods fedlap-dp,dp-fedavg] [--seed 0] [--data DIR]

Settings are judged by the 2000 training images after those that the clients hold. The test images are looked at once,
for the best setting of each method. All settings read as many noisy batches: they differ in what is made of them, which
is free. The search itself is not charged.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from reduced import HERE, TABLE_2, proven

from fedveil.evaluation.accuracy import evaluate
from fedveil.experiment.config import load_config
from fedveil.experiment.prepare import Prepared, load_examples, prepare
from fedveil.session.run import run
from fedveil.tree import Params

CONFIG = HERE / "reduced-mnist.toml"
TRAINED, HELD_OUT = 2200, 2000
AVERAGE = 'wrap=[{name="model-average", decay=0.8}]'
SHORT = ["method.radius=0.5", "method.lr=0.02"]
KEPT = [*SHORT, "method.reinit=false"]  # images go on from the last round
SETTINGS: dict[str, dict[str, list[str]]] = {
    "dp-fedavg": {
        "lr 2, as in the tables": [],
        "lr 1": ["method.lr=1.0"],
        "lr 4": ["method.lr=4.0"],
        "lr 2, model-average 0.8": [AVERAGE],
    },
    "fedlap-dp": {
        "radius 1.5, lr 0.05, as in the tables": [],
        "radius 0.5, lr 0.02": SHORT,
        "radius 0.5, lr 0.02, model-average 0.8": [*SHORT, AVERAGE],
        "radius 0.5, lr 0.02, images kept": KEPT,
        "radius 1.0, lr 0.02, images kept": [*KEPT, "method.radius=1.0"],
        "radius 0.5, lr 0.02, images kept, image lr 3": [*KEPT, "method.image_lr=3.0"],
        "radius 0.5, lr 0.02, images kept, image lr 30": [*KEPT, "method.image_lr=30.0"],
        "radius 0.5, lr 0.02, images kept, 6 updates a batch": [*KEPT, "method.image_updates=6"],
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--methods", default=",".join(SETTINGS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path)
    chosen = parser.parse_args()
    larger = load_config(CONFIG, [f"task.data_options={{max_train={TRAINED + HELD_OUT}, max_test=1}}"])
    images = load_examples(larger, chosen.data).train
    held_out = (images.x[TRAINED:], images.y[TRAINED:])
    print("| method | setting | held-out accuracy | epsilon | test accuracy |")
    print("|---|---|---|---|---|")
    for method in chosen.methods.split(","):
        found: list[tuple[float, str, Prepared, Params]] = []
        for setting, changes in SETTINGS[method].items():
            config = load_config(CONFIG, TABLE_2[method] + changes)
            prepared = prepare(config, chosen.seed, chosen.data)
            result = run(
                prepared.task,
                prepared.clients,
                prepared.method,
                rounds=config.run.rounds,
                sampler=config.run.sampler,
                seed=chosen.seed,
                test=held_out,
                evaluate_every=config.run.rounds,
                workers=1,
                noise="seeded",
                score_clients=False,
            )
            accuracy = result.accuracy or 0.0
            print(f"| {method} | {setting} | {100 * accuracy:.1f} % | {proven(result)} | |", flush=True)
            found.append((accuracy, setting, prepared, result.model))
        _, setting, prepared, model = max(found, key=lambda each: each[0])
        test = prepared.dataset.test
        score = evaluate(prepared.task, model, test.x, test.y).accuracy
        print(f"| {method} | best: {setting} | | | {100 * score:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
