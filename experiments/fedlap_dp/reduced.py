"""FedLAP-DP's comparison at a size that a small machine finishes: accuracy against rounds, epsilon and bytes.

    python experiments/fedlap_dp/reduced.py --results results/fedlap-reduced [--datasets mnist,cifar10] [--seeds 0,1,2]
        [--methods fedavg,fedlap,dp-fedprox,fedlap-dp] [--rounds 10] [--data DIR]

Each run is a folder of results, so an interrupted comparison goes on where it stopped. Ends with a Markdown table.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedveil.config import load_config
from fedveil.experiment import run_seed
from fedveil.results import Result

HERE = Path(__file__).parent
METHODS: dict[str, list[str]] = {
    "fedavg": ["method.name=fedavg", "method.epochs=2"],
    "fedprox": ["method.name=fedprox", "method.epochs=2", "method.proximal=0.1"],
    "scaffold": ["method.name=scaffold", "method.epochs=2"],
    "feddm": ["method.name=feddm", "method.matching_steps=50", "method.spread=0.1"],
    "fedlap": ["method.name=fedlap", "method.radius=10.0", "method.radius_examples=100"],
    "dp-fedavg": ["method.name=dp-fedprox", "method.proximal=0.0", "method.epochs=2", "method.lr=0.5"],
    "dp-fedprox": ["method.name=dp-fedprox", "method.proximal=0.1", "method.epochs=2", "method.lr=0.5"],
    "fedlap-dp": [],
}


def proven(result: Result) -> str:
    rows = [row["epsilon"] for row in result.privacy["proven"] if row["adversary"] == "server"]
    return f"{rows[0]:.2f}" if rows and rows[0] is not None else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--datasets", default="digits,mnist,fashion-mnist,cifar10")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--data", type=Path)
    chosen = parser.parse_args()
    print("| data | method | seed | rounds | accuracy | epsilon (server, record) | MB up | MB down |")
    print("|---|---|---|---|---|---|---|---|")
    for dataset in chosen.datasets.split(","):
        path = HERE / ("digits.toml" if dataset == "digits" else f"reduced-{dataset}.toml")
        for method in chosen.methods.split(","):
            changes = METHODS[method] + ([f"run.rounds={chosen.rounds}"] if chosen.rounds else [])
            config = load_config(path, changes)
            for seed in map(int, chosen.seeds.split(",")):
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
