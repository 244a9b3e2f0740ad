"""Accuracy of DP-FedAGS's provable variants and DP-FedAvg at one and the same proven epsilon.

    python experiments/dp_fedags/equal_epsilon.py --dataset digits --epsilon 10 30 100
    python experiments/dp_fedags/equal_epsilon.py --dataset mnist --epsilon 30 --data FOLDER

Every row but the last proves the epsilon against the server, hence against everybody; the last one, DP-FedAvg
with a trusted server's noise, proves it against observers only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil.experiment.config import Config, build_method, make_config
from fedveil.experiment.run import run_seed
from fedveil.privacy.accounting import epsilon_of
from fedveil.privacy.calibrate import calibrate
from fedveil.privacy.releases import Adversary, Plan, Release

Fields = dict[str, Any]
Row = tuple[str, Fields, Adversary]

PROVEN = {"name": "dp-fedags-proven"}
ROWS: list[Row] = [
    ("V0 everywhere", PROVEN | {"variant": "everywhere"}, "server"),
    ("V1 public mask", PROVEN | {"variant": "public-mask"}, "server"),
    ("V2 top-k", PROVEN | {"variant": "top-k"}, "server"),
    ("V3 sparse vector", PROVEN | {"variant": "sparse-vector", "selected": 0.01}, "server"),
    ("DP-FedAvg, clients' noise", {"name": "dp-fedavg", "noise_scope": "local"}, "server"),
    ("DP-FedAvg, server's noise", {"name": "dp-fedavg", "noise_scope": "central"}, "observer"),
]


def with_noise(fields: Fields, noise: float) -> Fields:
    """The method with this much noise; the sparse vector technique is priced by its epsilon instead."""
    if fields.get("variant") == "sparse-vector":
        return fields | {"upload_epsilon": 1 / noise}
    return fields | {"noise_multiplier": noise}


def calibrated(fields: Fields, plan: Plan, delta: float, target: float, adversary: Adversary) -> Fields:
    def releases(noise: float) -> Sequence[Release]:
        return build_method(with_noise(fields, noise)).releases(plan)

    return with_noise(fields, calibrate(releases, plan, delta, target, adversary, "client"))


def configuration(dataset: str, model: str, rounds: int, method: Fields, clip: float, lr: float) -> Config:
    own = {"clip": clip} if method["name"] == "dp-fedags-proven" else {"clip": clip * lr}
    return make_config(
        {
            "task": {"dataset": dataset, "model": model},
            "partition": {"kind": "dirichlet", "clients": 100, "alpha": 1.0},
            "method": {"lr": lr, "epochs": 1, "batch_size": 128} | own | method,
            "run": {"rounds": rounds, "cohort": 10, "evaluate_every": rounds, "workers": 1},
            "privacy": {"delta": 1e-3},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--model", default="logistic")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[10.0, 30.0, 100.0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--results", type=Path, default=Path("results"))
    given = parser.parse_args()
    plan = Plan(100, 10, "fixed", given.rounds)
    for target in given.epsilon:
        for title, fields, adversary in ROWS:
            method = calibrated(fields, plan, 1e-3, target, adversary)
            config = configuration(given.dataset, given.model, given.rounds, method, given.clip, given.lr)
            proven = epsilon_of(config.build_method().releases(plan), plan, 1e-3, adversary, "client")
            runs = [
                run_seed(config, seed, experiment="equal-epsilon", results=given.results, data_dir=given.data)
                for seed in given.seeds
            ]
            scores = [100 * run.summary["accuracy"] for run in runs]
            line = {
                "dataset": given.dataset,
                "target": target,
                "row": title,
                "adversary": adversary,
                "proven": proven,
                "accuracy": statistics.mean(scores),
                "spread": statistics.stdev(scores) if len(scores) > 1 else 0.0,
                "bytes_up": runs[0].summary["bytes_up"],
                "noise": method.get("noise_multiplier", method.get("upload_epsilon")),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
