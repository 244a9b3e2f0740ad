"""FedLAP-DP's Tables 1-4 and Figures 4-5 at a size that a small machine finishes.

    python experiments/fedlap_dp/reduced.py --results results/fedlap-reduced [--datasets mnist,cifar10] [--seeds 0,1,2]
        [--methods fedavg,fedlap,dp-fedprox,fedlap-dp] [--rounds 10] [--data DIR]

Each run is a folder of results, so an interrupted comparison goes on where it stopped. `reduced_tables.py` makes
tables and figures of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedveil.experiment.config import load_config
from fedveil.experiment.run import run_seed
from fedveil.session.results import Result

HERE = Path(__file__).parent
EVERYONE = "partition.groups=[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]"  # one client: the centralised setting
OPEN = ["run.rounds=8"]
# As far per round as the paper's clients: a twentieth of its steps, twenty times its learning rate of 0.1.
PRIVATE = ["method.name=dp-fedprox", "method.epochs=1", "method.lr=2.0"]
FEDLAP = [
    *OPEN,
    "method.name=fedlap",
    "method.ipc=10",
    "method.trajectories=1",
    "method.real_batches=2",
    "method.model_updates=0",
    "method.radius=10.0",
    "method.radius_examples=50",
    "method.lr=0.1",
    "method.server_steps=25",
]
TABLE_1: dict[str, list[str]] = {
    "dsc": [
        EVERYONE,
        "method.name=dsc",
        'method.augment=["brightness", "saturation", "contrast", "crop", "cutout", "scale", "rotate"]',
        "run.rounds=1",
        "method.ipc=10",
        "method.trajectories=6",
        "method.max_steps=8",
        "method.image_updates=1",
        "method.model_updates=3",
        "method.lr=0.1",
        "method.server_steps=200",
        "method.classes_per_client=10",
    ],
    "fedsgd": [*OPEN, "method.name=fedsgd", "method.lr=0.1"],
    "fedavg": [*OPEN, "method.name=fedavg", "method.epochs=2", "method.lr=0.1"],
    "fedprox": [*OPEN, "method.name=fedprox", "method.epochs=2", "method.lr=0.1", "method.proximal=0.1"],
    "scaffold": [*OPEN, "method.name=scaffold", "method.epochs=2", "method.lr=0.1"],
    "feddm": [
        *OPEN,
        "method.name=feddm",
        "method.ipc=10",
        "method.matching_steps=20",
        "method.spread=0.1",
        "method.image_lr=1.0",
        "method.radius=5.0",
        "method.lr=0.1",
        "method.server_steps=25",
    ],
    "fedlap": FEDLAP,
}
TABLE_2: dict[str, list[str]] = {
    "dp-fedavg": [*PRIVATE, "method.proximal=0.0", "method.clip=0.1"],
    "dp-fedprox": [*PRIVATE, "method.proximal=0.1", "method.clip=0.2"],
    "fedlap-dp": [],
    "psg": [
        "method.name=psg",
        "run.rounds=1",
        "method.trajectories=15",
        "method.max_steps=10",
        "method.image_updates=1",
        "method.model_updates=2",
        "method.radius=inf",
        "method.clip=0.1",
        "method.server_steps=200",
    ],
}
TABLE_3 = {
    f"fedlap-{name}": [*FEDLAP, f"method.radius_strategy={name}"] for name in ("median", "max", "fixed")
}
TABLE_4 = {"dp-fedavg-low": [*PRIVATE, "method.proximal=0.0", "method.clip=0.1", "method.lr=0.04"]}
FIGURE_5 = {f"fedlap-ipc-{ipc}": [*FEDLAP, f"method.ipc={ipc}"] for ipc in (2, 5, 20)}
METHODS = TABLE_1 | TABLE_2 | TABLE_3 | TABLE_4 | FIGURE_5
EVERYWHERE = TABLE_1 | TABLE_2 | TABLE_4  # Table 3 and Figure 5 are about CIFAR-10
DIGITS: dict[str, list[str]] = {  # around digits.toml, for a first look
    "fedavg": ["method.name=fedavg", "method.epochs=2"],
    "fedlap": ["method.name=fedlap", "method.radius=10.0", "method.radius_examples=100"],
    "dp-fedavg": ["method.name=dp-fedprox", "method.proximal=0.0", "method.epochs=2", "method.lr=0.5"],
    "dp-fedprox": ["method.name=dp-fedprox", "method.proximal=0.1", "method.epochs=2", "method.lr=0.5"],
    "fedlap-dp": [],
}


def methods_of(dataset: str) -> dict[str, list[str]]:
    return {"digits": DIGITS, "cifar10": METHODS}.get(dataset, EVERYWHERE)


def proven(result: Result) -> str:
    rows = [row["epsilon"] for row in result.privacy["proven"] if row["adversary"] == "server"]
    return f"{rows[0]:.2f}" if rows and rows[0] is not None else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--datasets", default="mnist,fashion-mnist,cifar10")
    parser.add_argument("--methods", help="all of a dataset's unless given")
    parser.add_argument("--seeds", help="those of the dataset's file unless given")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--data", type=Path)
    chosen = parser.parse_args()
    print("| data | method | seed | rounds | accuracy | epsilon (server, record) | MB up | MB down |")
    print("|---|---|---|---|---|---|---|---|")
    for dataset in chosen.datasets.split(","):
        path = HERE / ("digits.toml" if dataset == "digits" else f"reduced-{dataset}.toml")
        known = methods_of(dataset)
        for method in chosen.methods.split(",") if chosen.methods else known:
            changes = known[method] + ([f"run.rounds={chosen.rounds}"] if chosen.rounds else [])
            config = load_config(path, changes)
            for seed in map(int, chosen.seeds.split(",")) if chosen.seeds else config.run.seeds:
                result = run_seed(
                    config,
                    seed,
                    experiment=f"{dataset}-{method}",
                    results=chosen.results,
                    data_dir=chosen.data,
                )
                facts = result.summary
                print(
                    f"| {dataset} | {method} | {seed} | {facts['rounds']} | {100 * facts['accuracy']:.2f} % "
                    f"| {proven(result)} | {facts['bytes_up'] / 1e6:.2f} | {facts['bytes_down'] / 1e6:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
