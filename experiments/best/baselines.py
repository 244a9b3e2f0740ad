"""Published methods beside the recommended one, at the same epsilon and federation, each tuned with eight trials.

    python experiments/best/baselines.py list
    python experiments/best/baselines.py run user/mnist/udp-fedavg --results results

`docs/figures/best_baselines.toml` has the federations, the methods and what is tuned. A trial trains on clients' data
without a held-out part, and the trial that is most accurate on the held-out images is then run on all of the training
images and tested. `run` writes one record to experiments/best/records/baselines; it resumes: what is in the results
folder is not run again. Data stay in memory between trials.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedveil.atomic_files import write_atomically
from fedveil.experiment.config import Config, make_config
from fedveil.experiment.run import run_seed
from fedveil.numerics import NUMERICS
from fedveil.session.results import Result

FOLDER = Path(__file__).resolve().parent
RECORDS = FOLDER / "records" / "baselines"
GRIDS = FOLDER.parents[1] / "docs" / "figures" / "best_baselines.toml"
HELD_OUT = 5000
IMAGES = {"mnist": 60000, "cifar10": 50000}
ROUNDS = "rounds"
"""The tuned value that is the run's, not the method's."""
Values = dict[str, Any]


@dataclass(frozen=True)
class Baseline:
    """One method in one federation on one data set."""

    federation: str
    title: str
    data: str
    file: str
    method: str
    epsilons: tuple[float, ...]
    """The first is tuned, the others are run with its settings."""
    recommended: tuple[str, ...]
    """For every epsilon the row of docs/figures/best_rows.toml to compare with."""
    task: Mapping[str, Any]
    fields: Mapping[str, Any]
    start: Mapping[str, Any]
    minutes: float
    """About how long all trials and tests take on one core."""
    stages: Sequence[Mapping[str, Sequence[Any]]]
    """One value is tuned after the other; what a stage found best is kept in the next."""

    @property
    def key(self) -> str:
        return f"{self.federation}/{self.data}/{self.method}"

    @property
    def record(self) -> Path:
        return RECORDS / f"{self.key.replace('/', '-')}.json"

    @property
    def command(self) -> str:
        return f"python experiments/best/baselines.py run {self.key}"

    def trials(self) -> int:
        """The number of trials: the start, and every value of every stage."""
        return 1 + sum(len(values) for stage in self.stages for values in stage.values())

    def config(self, values: Mapping[str, Any], epsilon: float, *, held_out: bool) -> Config:
        """The recommended method's federation with this method and these values."""
        raw = tomllib.loads((FOLDER / self.file).read_text())
        raw["task"] = dict(self.task)
        raw["method"] = dict(self.fields) | {k: v for k, v in values.items() if k != ROUNDS}
        raw["run"] |= {"rounds": values[ROUNDS], "evaluate_every": values[ROUNDS]}
        raw["privacy"]["target_epsilon"] = epsilon
        if held_out:
            raw["partition"]["holdout"] = HELD_OUT / IMAGES[self.data]
        return make_config(raw)


def read_baselines(path: Path = GRIDS) -> list[Baseline]:
    """Every method of every federation and data set."""
    content = tomllib.loads(path.read_text())
    return [
        Baseline(
            federation["key"],
            federation["title"],
            data,
            file,
            method["key"],
            tuple(federation["epsilons"]),
            tuple(federation["recommended"][data]),
            {"dataset": data} | content["task"],
            method["fields"],
            method["start"],
            federation["minutes"][data],
            method["stages"],
        )
        for federation in content["federation"]
        for method in federation["method"]
        for data, file in federation["files"].items()
    ]


def tune(baseline: Baseline, results: Path) -> tuple[list[Values], Values]:
    """The trials with their accuracies on held-out images, and the values of the best one."""
    best = dict(baseline.start)
    trials = [_trial(baseline, best, results)]
    for stage in baseline.stages:
        for name, options in stage.items():
            held = dict(best)
            trials += [_trial(baseline, held | {name: option}, results) for option in options]
            best = dict(max(trials, key=lambda trial: float(trial["held_out"]))["values"])
    return trials, best


def _trial(baseline: Baseline, values: Mapping[str, Any], results: Path) -> Values:
    config = baseline.config(values, baseline.epsilons[0], held_out=True)
    result = run_seed(config, 0, experiment="baseline-trials", results=results)
    found = {"values": dict(values), "held_out": round(held_out_accuracy(result, config), 5)}
    print(baseline.key, json.dumps(found), round(result.summary["seconds"], 1), flush=True)
    return found


def held_out_accuracy(result: Result, config: Config) -> float:
    """The accuracy on all clients' held-out images together."""
    scores = result.summary["per_client"]
    held = [int(sum(counts) * config.partition.holdout) for counts in result.summary["partition"]]
    scored = [(count, score) for count, score in zip(held, scores, strict=True) if score is not None]
    return sum(count * float(score) for count, score in scored) / sum(count for count, _ in scored)


def measure(baseline: Baseline, results: Path, seeds: Sequence[int]) -> Values:
    """The record: all trials, the chosen values, and the tests at every epsilon."""
    trials, best = tune(baseline, results)
    return {
        "baseline": baseline.key,
        "command": baseline.command,
        "numerics": NUMERICS,
        "trials": trials,
        "chosen": best,
        "tests": [_tested(baseline, best, epsilon, results, seeds) for epsilon in baseline.epsilons],
    }


def _tested(
    baseline: Baseline, best: Mapping[str, Any], epsilon: float, results: Path, seeds: Sequence[int]
) -> Values:
    config = baseline.config(best, epsilon, held_out=False)
    runs = []
    for seed in seeds:
        result = run_seed(config, seed, experiment="baseline-tests", results=results)
        target = result.summary["target"]
        runs.append({"seed": seed, "accuracy": round(result.summary["accuracy"], 5)})
        print(baseline.key, epsilon, runs[-1], round(result.summary["seconds"], 1), flush=True)
    return {
        "asked": epsilon,
        "config": config.identity(),
        "unit": target["unit"],
        "adversary": target["adversary"],
        "epsilon": round(target["epsilon"], 4),
        "delta": config.privacy.delta,
        "noise_multiplier": target["noise_multiplier"],
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list")
    run = commands.add_parser("run")
    run.add_argument("keys", nargs="+", metavar="FEDERATION/DATA/METHOD")
    run.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    run.add_argument("--results", type=Path, default=Path("results"))
    given = parser.parse_args()
    known = {baseline.key: baseline for baseline in read_baselines()}
    if given.command == "list":
        print("\n".join(known))
        return
    if unknown := [key for key in given.keys if key not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; see `list`")
    torch.set_num_threads(1)
    RECORDS.mkdir(parents=True, exist_ok=True)
    for key in given.keys:
        record = measure(known[key], given.results, given.seeds)
        write_atomically(known[key].record, (json.dumps(record, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
