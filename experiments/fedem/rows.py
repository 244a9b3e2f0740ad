"""The rows of FedEM's tables, and their runs at a size that a laptop finishes.

What is reduced: clients hold 250 examples in place of 3000, and rounds are as many as the attacks need in place of 30.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedveil.experiment.config import Config, make_config

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


def make_parser(description: str | None, rows: Iterable[str]) -> argparse.ArgumentParser:
    """What every table is asked for: its rows, the runs behind them, and where both are kept."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0] if description else None)
    parser.add_argument("--rows", default=list(rows), type=lambda text: text.split(","))
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--examples", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", default=[1, 3], type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tv", type=float, default=1e-5)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--data", type=Path)
    return parser


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
