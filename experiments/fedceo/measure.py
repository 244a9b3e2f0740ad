"""What FedCEO's smoothing, the last batch and the size of a client do, measured beside the published tables.

    python experiments/fedceo/measure.py stacks     # one stack of uploads, smoothed by thresholds near the noise's edge
    python experiments/fedceo/measure.py search     # training with such thresholds, chosen on held-out examples
    python experiments/fedceo/measure.py batches    # what becomes of a remainder of two examples
    python experiments/fedceo/measure.py sizes      # clients with as many examples as the paper's

Each writes `experiments/records/fedceo-NAME.json`, which `fedveil reproduce --pages docs` shows. The edge is where the
singular values of the noise alone end (methods/smoothing.py). All runs are of Algorithm 1 or 2 on EMNIST letters with
MLP-2, shorter than the paper's: each record says by how much.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fedveil.atomic_files import write_atomically
from fedveil.attack_runs.transcript import StoredRun, answers_of, open_run, read_exchange, read_upload
from fedveil.evaluation.accuracy import evaluate
from fedveil.experiment.config import Config, make_config
from fedveil.experiment.run import run_seed
from fedveil.linalg import t_tsvd
from fedveil.numerics import NUMERICS
from fedveil.session.results import Result
from fedveil.tree import Params, mean

RECORDS = Path(__file__).parents[1] / "records"
FACTORS = (0.0, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0)
SEARCHED = (0.01, 0.03, 0.1, 0.3, 1.0)
SIGMAS, COHORT, INTERVAL = (1.0, 2.0), 10, 10
EPOCHS, BATCH = 30, 64
AUTHORS = {"name": "fedceo", "unit": "record", "server_lr": 1.0, "momentum": 0.5}
TRAINING = 50_060  # letters
CLIENTS = (100, 40)  # with 40, a client has as many letters as one of 100 in the paper, of 124,800
LATE = 18  # rounds, as many as between the last two smoothing rounds of sigma 2
Line = dict[str, Any]


def config(
    rounds: int,
    holdout: float = 0.2,
    transcript: bool | list[int] = False,
    clients: int = 100,
    evaluate_every: int | None = None,
    **method: Any,
) -> Config:
    return make_config(
        {
            "task": {"dataset": "emnist-letters", "model": "mlp-2"},
            "partition": {"kind": "iid", "clients": clients, "holdout": holdout},
            "method": {"lr": 0.1, "epochs": EPOCHS, "batch_size": BATCH, "clip": 1.0, "server_lr": 0.1}
            | method,
            "run": {
                "rounds": rounds,
                "cohort": COHORT,
                "workers": 1,
                "evaluate_every": evaluate_every or rounds,
                "transcript": transcript,
            },
        }
    )


def edge(std: float, shape: Sequence[int]) -> float:
    """Where the singular values of a frequency slice of noise end, of uploads `[K, d, h]`."""
    slots, d, h = shape
    return (math.sqrt(d) + math.sqrt(h)) * std * math.sqrt(slots)


def smoothed(stack: Params, std: float, factor: float) -> Params:
    """Every layer with its threshold at `factor` times the edge of its noise."""
    return {
        name: t_tsvd(leaf, factor * edge(std, leaf.shape)) if factor else leaf for name, leaf in stack.items()
    }


def held_out(run: StoredRun) -> tuple[Tensor, Tensor]:
    """The clients' held-out examples, together."""
    clients = run.prepared.local_test
    assert clients is not None
    data = [clients.load([k]) for k in range(run.prepared.plan.clients)]
    return torch.cat([one.x[0] for one in data]), torch.cat([one.y[0] for one in data])


def of_one_stack(run: StoredRun, round_: int, std: float, factors: Sequence[float]) -> list[Line]:
    """Accuracies of the single models and of their mean, by threshold, on held-out and on test examples."""
    recorded = read_exchange(run, round_)
    stack = read_upload(run, recorded.at, *answers_of(run, recorded, recorded.clients)).models
    task, test = run.prepared.task, run.prepared.dataset.test
    data = {"held-out": held_out(run), "test": (test.x, test.y)}
    found = []
    for factor in factors:
        models = smoothed(stack, std, factor)
        line: Line = {"factor": factor}
        for kind, (x, y) in data.items():
            singles = [
                evaluate(task, {name: leaf[k] for name, leaf in models.items()}, x, y).accuracy
                for k in range(COHORT)
            ]
            line[f"single, {kind}"] = fmean(score for score in singles if score is not None)
            line[f"mean, {kind}"] = evaluate(task, mean(models), x, y).accuracy
        found.append(line)
    return found


def stacks(results: Path, seeds: Sequence[int], rounds: int) -> Line:
    lines = []
    for sigma in SIGMAS:
        per_seed = []
        for seed in seeds:
            chosen = config(rounds, transcript=[rounds], name="udp-fedavg", noise_multiplier=sigma)
            result = run_seed(chosen, seed, experiment="fedceo-stacks", results=results)
            assert result.folder is not None
            std = 0.1 * sigma / math.sqrt(COHORT)  # server_lr sigma C / sqrt(K)
            per_seed.append(of_one_stack(open_run(result.folder), rounds, std, FACTORS))
        for at, factor in enumerate(FACTORS):
            keys = [key for key in per_seed[0][at] if key != "factor"]
            means = {key: fmean(one[at][key] for one in per_seed) for key in keys}
            lines.append({"sigma": sigma, "threshold / edge": factor} | _percent(means))
    return {
        "title": "One stack of uploads, smoothed",
        "note": f"UDP-FedAvg at user level, E = 30, {rounds} of 300 rounds, seeds {_listed(seeds)}; the last round's "
        "10 noisy models, as they are (0) and smoothed with thresholds relative to the noise's edge. Single: mean "
        "accuracy of the ten models; mean: accuracy of their mean.",
        "rows": lines,
    }


def search(results: Path, seeds: Sequence[int], rounds: int) -> Line:
    lines = []
    for sigma in SIGMAS:
        first = edge(0.1 * sigma / math.sqrt(COHORT), (COHORT, 64, 784))
        settings: dict[str, Line] = {"no smoothing": {"name": "udp-fedavg"}} | {
            f"{factor:g}": {
                "name": "fedceo",
                "lam": 1 / (2 * factor * first),
                "interval": INTERVAL,
                "smooth_last": False,
            }
            for factor in SEARCHED
        }
        for name, method in settings.items():
            chosen = config(rounds, noise_multiplier=sigma, **method)
            runs = [run_seed(chosen, seed, experiment="fedceo-search", results=results) for seed in seeds]
            scores = {"held-out": fmean(map(_held_out, runs)), "test": fmean(map(_test, runs))}
            lines.append({"sigma": sigma, "threshold / edge": name} | _percent(scores))
    return {
        "title": "Training with smoothing, by its threshold",
        "note": f"User level, E = 30, {rounds} of 300 rounds, smoothing every {INTERVAL} but not in the last, one "
        f"lambda for both layers, relative to the first one's edge; seeds {_listed(seeds)}. The threshold is to be "
        "chosen by the held-out column.",
        "rows": lines,
    }


def batches(results: Path, seeds: Sequence[int], rounds: int) -> Line:
    lines = []
    for rule in ("keep", "drop", "merge"):
        chosen = config(rounds, 0.1, name="udp-fedavg", noise_multiplier=1.0, last_batch=rule)
        runs = [run_seed(chosen, seed, experiment="fedceo-batches", results=results) for seed in seeds]
        lines.append({"last_batch": rule} | _percent({"test": fmean(map(_test, runs))}))
    return {
        "title": "What becomes of the last batch",
        "note": "UDP-FedAvg at user level, sigma 1, `holdout = 0.1`: about 450 examples per client in batches of 64, "
        f"so that two or three are left over; E = 30, {rounds} of 300 rounds, seeds {_listed(seeds)}.",
        "rows": lines,
    }


def sizes(results: Path, seeds: Sequence[int], rounds: int) -> Line:
    lines = []
    for sigma in reversed(SIGMAS):
        for clients in CLIENTS:
            plain = AUTHORS | {"noise_multiplier": sigma, "interval": rounds + 1}
            chosen = config(rounds, clients=clients, evaluate_every=1, **plain)
            runs = [run_seed(chosen, seed, experiment="fedceo-sizes", results=results) for seed in seeds]
            curves = [[line["accuracy"] for line in run.history] for run in runs]
            found = {
                "best": fmean(max(curve) for curve in curves),
                "last": fmean(curve[-1] for curve in curves),
                f"mean of the last {LATE}": fmean(fmean(curve[-LATE:]) for curve in curves),
            }
            steps = EPOCHS * math.ceil(0.8 * TRAINING / clients / BATCH)
            lines.append({"sigma": sigma, "clients": clients, "noisy steps": steps} | _percent(found))
    return {
        "title": "Clients as large as the paper's",
        "note": f"UDP-FedAvg at record level, E = 30, {rounds} of 300 rounds, seeds {_listed(seeds)}. The letters here "
        "are those of one part of EMNIST: split among 100 clients, each trains on 400 examples where the paper's "
        "trains on 998; split among 40, on 1001. Noisy steps: those of one participation.",
        "rows": lines,
    }


def _held_out(result: Result) -> float:
    return fmean(score for score in result.summary["per_client"] if score is not None)


def _test(result: Result) -> float:
    assert result.accuracy is not None
    return result.accuracy


def _percent(scores: Line) -> Line:
    return {f"{name}, %": round(100 * value, 2) for name, value in scores.items()}


def _listed(seeds: Sequence[int]) -> str:
    return " ".join(map(str, seeds))


COMMANDS = {"stacks": (stacks, 60), "search": (search, 60), "batches": (batches, 60), "sizes": (sizes, 60)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=COMMANDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--results", type=Path, default=Path("results"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    measure, rounds = COMMANDS[given.name]
    content = measure(given.results, given.seeds, given.rounds or rounds) | {
        "numerics": NUMERICS,
        "command": f"python experiments/fedceo/measure.py {given.name} --seeds {_listed(given.seeds)}"
        + (f" --rounds {given.rounds}" if given.rounds else ""),
    }
    write_atomically(RECORDS / f"fedceo-{given.name}.json", (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
