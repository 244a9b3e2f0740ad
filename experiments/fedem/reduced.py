"""FedEM's tables at a size that a laptop finishes: run every row, attack rounds 1 and 3, print a table.

    python experiments/fedem/reduced.py --results results --data data            # Table 1, MNIST
    python experiments/fedem/reduced.py --dataset fashion-mnist --rows fedsgd,fedem-8

What is reduced: clients hold 250 examples in place of 3000, 10 rounds in place of 30, 400 attack steps in place of
1600.
Rows that are done are read back, so an interrupted command goes on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fedveil.attack_run import attack_exchange, attack_identity, describe, write_finding
from fedveil.attacks.registry import make_attack
from fedveil.config import Config, make_config
from fedveil.experiment import run_seed
from fedveil.recorded import open_run

ROWS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "fedsgd": ({"name": "fedsgd"}, []),
    "gaussian": ({"name": "fedsgd"}, [{"name": "gradient-gaussian", "std": 1 / 255}]),
    "gaussian-4": ({"name": "fedsgd"}, [{"name": "gradient-gaussian", "std": 4 / 255}]),
    "gaussian-16": ({"name": "fedsgd"}, [{"name": "gradient-gaussian", "std": 16 / 255}]),
    "laplace": ({"name": "fedsgd"}, [{"name": "gradient-laplace", "scale": 1 / 255}]),
    "ppfa": ({"name": "fedsgd"}, [{"name": "ppfa", "epsilon": 0.995}]),
    "ldpm": ({"name": "fedsgd"}, [{"name": "ldpm", "std": 0.0005}]),
    "masking": ({"name": "fedsgd"}, [{"name": "gradient-masking", "part": 0.25}]),
    "sign": ({"name": "fedsgd"}, [{"name": "sign-compression"}]),
    "pruning": ({"name": "fedsgd"}, [{"name": "gradient-pruning", "part": 0.99}]),
    "dp-sgd": ({"name": "fedsgd"}, [{"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 1.0}]),
    **{f"fedem-{rho}": ({"name": "fedem", "rho_max": rho / 255}, []) for rho in (8, 32, 64, 128, 255, 300)},
    **{
        f"fedem-{low}-{high}": ({"name": "fedem", "rho_min": low / 255, "rho_max": high / 255}, [])
        for low, high in ((25, 200), (50, 200), (100, 200), (50, 400), (100, 400), (200, 400))
    },
}


def config_of(row: str, arguments: argparse.Namespace) -> Config:
    method, wrap = ROWS[row]
    small = arguments.dataset.startswith("cifar")
    return make_config(
        {
            "task": {
                "dataset": arguments.dataset,
                "model": "convnet-64" if small else "lenet-zhu",
                "model_options": {"width": 8} if small else {},
                "data_options": {"max_train": arguments.clients * arguments.examples, "max_test": 2000},
            },
            "partition": {"kind": "iid", "clients": arguments.clients},
            "method": {"lr": 0.1, "batch_size": 8} | method,
            "wrap": wrap,
            "run": {
                "rounds": arguments.rounds,
                "sampler": "all",
                "transcript": [1, 3],
                "transcript_exchanges": 1,
                "evaluate_every": getattr(arguments, "evaluate_every", 5),
            },
        }
    )


def attacked(row: str, seed: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The findings of this row, made or read back."""
    config = config_of(row, arguments)
    result = run_seed(
        config, seed, experiment=f"reduced-{row}", results=arguments.results, data_dir=arguments.data
    )
    assert result.folder is not None
    run = open_run(result.folder, arguments.data)
    attack = make_attack(
        "inverting-gradients", {"steps": arguments.steps, "tv": arguments.tv, "restarts": arguments.restarts}
    )
    rows = []
    for number in (1, 3):
        mark = attack_identity(attack, "known", arguments.adaptive, 0)
        done = list(result.folder.glob(f"attacks/{attack.name}-round-{number}-*-{mark}/finding.json"))
        if done:
            finding = json.loads(done[0].read_text())
        else:
            exchange, scored = attack_exchange(
                run, attack, round=number, clients=[0], adaptive=arguments.adaptive
            )
            write_finding(
                run, attack, exchange, [0], scored, labels="known", adaptive=arguments.adaptive, seed=0
            )
            finding = describe(run, attack, exchange, [0], scored, "known", 0)
        rows.append({"row": row, "seed": seed, "accuracy": result.accuracy, "stage": f"E{number}", **finding})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--examples", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tv", type=float, default=1e-5)
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--adaptive", action="store_true")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--data", type=Path)
    arguments = parser.parse_args()
    print(
        "| row | seed | test acc | stage | MSE | PSNR | SSIM | LPIPS | KL | PSNR to x+delta | mean image PSNR |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in arguments.rows.split(","):
        for seed in range(arguments.seeds):
            for found in attacked(row, seed, arguments):
                mean = found["against_x"]["mean"]
                scores = [mean[key] for key in ("mse", "psnr", "ssim", "lpips", "kl")]
                seen = found["against_trained_on"]
                scores += [None if seen is None else seen["mean"]["psnr"], found["mean_image_psnr"]]
                shown = " | ".join("-" if value is None else f"{value:.4f}" for value in scores)
                print(
                    f"| {row} | {seed} | {found['accuracy']:.4f} | {found['stage']} | {shown} |", flush=True
                )


if __name__ == "__main__":
    main()
