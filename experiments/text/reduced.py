"""The text tables at a size that a laptop finishes: run the rows of a table, print them beside the published numbers.

    python experiments/text/reduced.py cola --results results --data data
    python experiments/text/reduced.py sentiment140 --rows fedavg,fedceo-1.0

What is reduced stands in the `scale` of the table's TOML beside this file. Rows that are done are read back, so an
interrupted command goes on. PPSGD and CENTAUR are scored by their clients' own models. No text is ever printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from fedveil.experiment.config import load_config, make_config
from fedveil.experiment.run import run_seed

Row = tuple[dict[str, Any], list[dict[str, Any]], float | None]
HERE = Path(__file__).parent
# Line 10 of FedCEO's Algorithm 1 multiplies update and noise by eta = 0.1 once more.
_PRIVATE = {"lr": 0.5, "epochs": 1, "batch_size": 16, "clip": 1.0, "server_lr": 0.1}
# lambda and theta of CIFAR-10, as Table 6 prints none; I in 30 rounds smooths about as often as the paper in 300.
_CONSTANTS = {1.0: (85.0, 1.03, 2), 1.5: (10.0, 1.07, 2), 2.0: (0.6, 1.04, 2)}
_PUBLISHED = {
    "udp-fedavg": (60.31, 57.62, 50.94),
    "ppsgd": (61.04, 57.87, 55.12),
    "centaur": (63.33, 59.05, 54.88),
    "fedceo": (65.70, 60.22, 56.65),
}
_STEPS = 2  # perturbation steps of FedEM, of the paper's 15


def _sentiment140() -> dict[str, Row]:
    rows: dict[str, Row] = {"fedavg": ({"name": "fedavg"}, [], None)}
    for place, sigma in enumerate(_CONSTANTS):
        for method, values in _PUBLISHED.items():
            published = values[place]
            fields: dict[str, Any] = {"name": method, "noise_multiplier": sigma} | _PRIVATE
            if method == "fedceo":
                lam, theta, interval = _CONSTANTS[sigma]
                fields |= {"lam": lam, "theta": theta, "interval": interval}
            rows[f"{method}-{sigma}"] = (fields, [], published)
    return rows


def _defended(
    radius: float, published: dict[str, float], defences: dict[str, list[dict[str, Any]]]
) -> dict[str, Row]:
    perturbed = {"name": "fedem", "rho_max": radius, "perturbation_steps": _STEPS}
    rows: dict[str, Row] = {"fedsgd": ({"name": "fedsgd"}, [], published["fedsgd"])}
    rows |= {name: ({"name": "fedsgd"}, wrap, published[name]) for name, wrap in defences.items()}
    return rows | {"fedem": (perturbed, [], published["fedem"])}


_CLASSIFIERS: dict[str, list[dict[str, Any]]] = {
    "dp-sgd": [{"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 0.001}],
    "masking": [{"name": "gradient-masking", "part": 0.25}],
}
_LANGUAGE: dict[str, list[dict[str, Any]]] = {
    "sign": [{"name": "sign-compression"}],
    "pruning": [{"name": "gradient-pruning", "part": 0.99}],
    "gaussian": [{"name": "gradient-gaussian", "std": 0.01}],
}
TABLES: dict[str, tuple[str, dict[str, Row]]] = {
    "sentiment140": ("accuracy", _sentiment140()),
    "cola": (
        "mcc",
        _defended(2.0, {"fedsgd": 0.557, "dp-sgd": 0.551, "masking": 0.555, "fedem": 0.553}, _CLASSIFIERS),
    ),
    "sst2": (
        "mcc",
        _defended(2.0, {"fedsgd": 0.885, "dp-sgd": 0.879, "masking": 0.882, "fedem": 0.882}, _CLASSIFIERS),
    ),
    "wikitext-2": (
        "perplexity",
        _defended(
            5.0,
            {"fedsgd": 33.24, "sign": 100.32, "pruning": 102.56, "gaussian": 50.23, "fedem": 51.12},
            _LANGUAGE,
        ),
    ),
}


def run_row(table: str, row: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The summary of one row, made or read back."""
    base = load_config(HERE / f"{table}.toml", arguments.changes)
    method, wrap, _ = TABLES[table][1][row]
    content = base.model_dump(exclude_none=True)
    same = base.method["name"] == method["name"]
    kept = base.method if same or method["name"] == "fedem" else {}
    content |= {"method": kept | method, "wrap": wrap}
    config = make_config(content)
    summary: dict[str, Any] = run_seed(
        config, seed, experiment=f"text-{table}-{row}", results=arguments.results, data_dir=arguments.data
    ).summary
    return summary


def score(summary: dict[str, Any], metric: str) -> float:
    """What stands in the table: of clients with models of their own, the mean accuracy on the common test set."""
    if metric == "accuracy" and summary["personal"]:
        return float(summary["personal"]["test_accuracy"])
    return float(summary[metric])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--rows", default=None, help="names with commas between; all by default")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--set", dest="changes", action="append", default=[], help="as for fedveil run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    metric, rows = TABLES[arguments.table]
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    print(f"{'row':<18} {'published':>10} {metric:>22} {'accuracy %':>16} {'seconds':>8}")
    for row in arguments.rows.split(",") if arguments.rows else rows:
        found = [run_row(arguments.table, row, seed, arguments) for seed in seeds]
        published = rows[row][2]
        values = torch.tensor([score(summary, metric) for summary in found], dtype=torch.float64)
        accuracy = 100 * torch.tensor([score(summary, "accuracy") for summary in found], dtype=torch.float64)
        seconds = sum(summary["seconds"] for summary in found)
        print(
            f"{row:<18} {'-' if published is None else published:>10} {_spread(values):>22} "
            f"{_spread(accuracy):>16} {seconds:>8.1f}",
            flush=True,
        )


def _spread(values: torch.Tensor) -> str:
    if len(values) == 1:
        return f"{float(values[0]):.4g}"
    return f"{float(values.mean()):.4g} ± {float(values.std()):.2g}"


if __name__ == "__main__":
    main()
