"""FedEM's tables on the same models and batches: what is left of eight images under each row's defence, over seeds.

    python experiments/fedem/tables.py --data data --seeds 5 --rows fedsgd,gaussian,laplace,ppfa,ldpm,fedem-8
    python experiments/fedem/tables.py --data data --dataset cifar10 --rows fedsgd,fedem-8,fedem-255

For each seed FedSGD trains for three rounds. In round 1 (E1) and round 3 (E3) client 0 answers the broadcast model
under every row's defence, and all answers are attacked as one stack, so that rows differ in the defence alone. Numbers
are kept in RESULTS/tables.json: what is there is not attacked again, so an interrupted command goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from one_model import attack_rows, numbers
from rows import ROWS, config_of, make_parser

from fedveil.atomic_files import write_atomically
from fedveil.attack_runs.inversion import attack_settings
from fedveil.attack_runs.transcript import StoredRun, open_run
from fedveil.attacks.registry import make_attack
from fedveil.experiment.run import run_seed

SCORES = ("mse", "psnr", "ssim", "lpips", "kl", "psnr_to_trained_on", "distortion_psnr", "mean_image_psnr")


def trained(seed: int, arguments: argparse.Namespace) -> StoredRun:
    """The FedSGD run whose broadcast models are answered."""
    name = f"tables-{arguments.dataset}-{arguments.clients}"
    result = run_seed(
        config_of("fedsgd", arguments),
        seed,
        experiment=name,
        results=arguments.results,
        data_dir=arguments.data,
    )
    assert result.folder is not None
    return open_run(result.folder, arguments.data)


def scores_of(arguments: argparse.Namespace) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """For each row and stage the scores of every seed."""
    store = arguments.results / "tables.json"
    known: dict[str, dict[str, Any]] = json.loads(store.read_text()) if store.exists() else {}
    settings = {"tv": arguments.tv, "restarts": arguments.restarts}
    if arguments.attack == "gias":  # half of the steps in the latent space, half in the decoder's weights
        settings |= {"latent_steps": arguments.steps // 2, "weight_steps": arguments.steps // 2}
    else:
        settings |= {"steps": arguments.steps}
    attack = make_attack(arguments.attack, settings)
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for seed in range(arguments.seeds):
        run: StoredRun | None = None
        for stage in arguments.stages:
            facts = [
                arguments.dataset,
                arguments.clients,
                arguments.examples,
                seed,
                stage,
                arguments.adaptive,
            ]
            keys = {row: json.dumps([row, *facts, attack_settings(attack)]) for row in arguments.rows}
            missing = [row for row, key in keys.items() if key not in known]
            if missing:
                run = run or trained(seed, arguments)
                scored = attack_rows(run, missing, stage, attack, adaptive=arguments.adaptive, seed=seed)
                known |= {keys[row]: numbers(one) for row, one in zip(missing, scored, strict=True)}
                write_atomically(store, json.dumps(known, indent=1).encode())
            for row, key in keys.items():
                found.setdefault((row, stage), []).append(known[key])
    return found


def shown(values: list[float | None]) -> str:
    whole = [value for value in values if value is not None]
    if not whole:
        return "-"
    spread = f" ± {statistics.stdev(whole):.3f}" if len(whole) > 1 else ""
    return f"{statistics.fmean(whole):.3f}{spread}"


def main() -> None:
    parser = make_parser(__doc__, ROWS)
    parser.add_argument("--attack", default="inverting-gradients")
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--adaptive", action="store_true")
    arguments = parser.parse_args()
    print(
        "| row | stage | MSE | PSNR | SSIM | LPIPS | KL | PSNR to x+delta | x+delta to x | mean image PSNR |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (row, stage), seeds in scores_of(arguments).items():
        cells = " | ".join(shown([one[score] for one in seeds]) for score in SCORES)
        print(f"| {row} | E{stage} | {cells} |")


if __name__ == "__main__":
    main()
