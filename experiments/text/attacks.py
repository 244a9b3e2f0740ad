"""Attacks on FedEM's text defences (the attack columns of Tables 3, 8 and 10) at a size that a laptop finishes.

    python experiments/text/attacks.py --results results --data data                       # Table 3, CoLA
    python experiments/text/attacks.py --dataset sst2 --data data                          # Table 8
    python experiments/text/attacks.py --dataset wikitext-2 --model causal-lm --data data  # Table 10
    python experiments/text/attacks.py --attack embedding-rows --data data                       # without any search
    python experiments/text/attacks.py --model bert --clients 2 --texts 1 --rows fedsgd,fedem-2 --data data

Every client sends one gradient per text in round 1, as in the paper (batch size 1); all are attacked. What is reduced:
a transformer from scratch in place of BERT-base (or MiniLM with --model bert), few texts, few attack steps.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from fedveil.attack_runs.inversion import attack_exchange, describe, write_finding
from fedveil.attack_runs.transcript import open_run
from fedveil.attacks.registry import make_attack
from fedveil.experiment.config import Config, make_config
from fedveil.experiment.run import run_seed

ROWS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "fedsgd": ({"name": "fedsgd"}, []),
    "fedem-0.5": ({"name": "fedem", "rho_max": 0.5}, []),
    "fedem-2": ({"name": "fedem", "rho_max": 2.0}, []),
    "fedem-5": ({"name": "fedem", "rho_max": 5.0}, []),
    "dp-sgd": ({"name": "fedsgd"}, [{"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 0.001}]),
    "dp-sgd-0.01": ({"name": "fedsgd"}, [{"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 0.01}]),
    "dp-sgd-0.1": ({"name": "fedsgd"}, [{"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 0.1}]),
    "masking": ({"name": "fedsgd"}, [{"name": "gradient-masking", "part": 0.25}]),
    "sign": ({"name": "fedsgd"}, [{"name": "sign-compression"}]),
    "pruning": ({"name": "fedsgd"}, [{"name": "gradient-pruning", "part": 0.99}]),
    "gaussian": ({"name": "fedsgd"}, [{"name": "gradient-gaussian", "std": 0.01}]),
}
SCORES = ("rouge1", "rouge2", "rougeL", "leaked_tokens_right", "tokens_leaked")


def config_of(row: str, arguments: argparse.Namespace) -> Config:
    method, wrap = ROWS[row]
    return make_config(
        {
            "task": {
                "dataset": arguments.dataset,
                "model": arguments.model,
                "data_options": {"max_train": arguments.clients * arguments.texts, "max_test": 500},
                "text": {"vocabulary": "tokenizer", "length": arguments.length},
            },
            "partition": {"kind": "iid", "clients": arguments.clients},
            "method": {"lr": 0.1, "batch_size": 1} | method,
            "wrap": wrap,
            "run": {"rounds": 1, "sampler": "all", "transcript": [1]},
        }
    )


def attacked(row: str, seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """The mean scores over all texts of this row, and what a public text scores."""
    result = run_seed(
        config_of(row, arguments),
        seed,
        experiment=f"text-{row}",
        results=arguments.results,
        data_dir=arguments.data,
    )
    assert result.folder is not None
    run = open_run(result.folder, arguments.data)
    settings = {
        "steps": arguments.steps,
        "starts": arguments.starts,
        "swaps": arguments.swaps,
        "polish": arguments.polish,
        "prior": arguments.prior,
        "use_leak": not arguments.no_leak,
    }
    attack = make_attack(arguments.attack, settings if arguments.attack == "lamp" else {})
    found: list[dict[str, Any]] = []
    for number in range(arguments.texts):
        for client in range(arguments.clients):
            exchange, scored = attack_exchange(run, attack, round=1, clients=[client], exchange=number)
            write_finding(run, attack, exchange, [client], scored, labels="known", adaptive=True, seed=0)
            found.append(describe(run, attack, exchange, [client], scored, "known", 0))
    scores = {name: fmean(one["metrics"][name] for one in found) for name in SCORES}
    scores["public"] = fmean(one["public_text"]["rouge1"] for one in found)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--dataset", default="cola")
    parser.add_argument("--model", default="transformer")
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--texts", type=int, default=2, help="texts of each client")
    parser.add_argument("--attack", choices=("lamp", "embedding-rows"), default="lamp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--swaps", type=int, default=50)
    parser.add_argument("--polish", type=int, default=1000)
    parser.add_argument("--prior", default="n-gram")
    parser.add_argument("--no-leak", action="store_true", help="do not look at the embedding gradient")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--data", type=Path)
    arguments = parser.parse_args()
    print(
        "| row | ROUGE-1 | ROUGE-2 | ROUGE-L | named tokens that are right | tokens named | a public text |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in arguments.rows.split(","):
        scores = attacked(row, arguments.seed, arguments)
        shown = " | ".join(f"{100 * scores[name]:.1f}" for name in (*SCORES, "public"))
        print(f"| {row} | {shown} |", flush=True)
    print(json.dumps({name: str(value) for name, value in vars(arguments).items()}))


if __name__ == "__main__":
    main()
