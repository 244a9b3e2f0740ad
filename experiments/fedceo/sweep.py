"""The reduced reproduction of FedCEO's tables: runs its grid, as far as it is not done, and prints the tables.

    python experiments/fedceo/sweep.py run --results results/fedceo
    python experiments/fedceo/sweep.py tables --results results/fedceo

Several processes may run the grid at once: each takes what no other holds. Wrappers that only change what is
released follow every run, so they cost no training of their own; server momentum has runs of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedveil.config import Config, build_rule, load_config
from fedveil.errors import ResultError
from fedveil.evaluation.accuracy import evaluate
from fedveil.experiment import prepare, result_folder, run_seed
from fedveil.methods.wrappers import Rule
from fedveil.privacy.releases import Plan
from fedveil.run import Observer, RoundEnd
from fedveil.task import Task
from fedveil.tree import Params

HERE = Path(__file__).parent
SIGMAS = (1.0, 1.5, 2.0)
SEEDS = (0, 1, 2)
# lambda and theta of the paper's appendix C.1.
CONSTANTS = {
    "emnist": {1.0: (70.0, 1.08), 1.5: (0.5, 1.04), 2.0: (0.03, 1.06)},
    "cifar10": {1.0: (85.0, 1.03), 1.5: (10.0, 1.07), 2.0: (0.6, 1.04)},
}
# Intervals shrink with the rounds, so that a run smooths as often as the paper's (EMNIST), or four times (CIFAR-10).
INTERVALS = {"emnist": {1.0: 6, 1.5: 4, 2.0: 4}, "cifar10": {1.0: 5, 1.5: 5, 2.0: 5}}
SHARDS = ("partition.kind=shards", "partition.shards_per_client=2")
RECORD = ("method.unit=record", "method.momentum=0.5")  # the authors' code: DP-SGD inside the clients
FOLLOWED = (
    {"name": "model-average", "decay": 0.95},
    {"name": "low-pass", "cutoff": 0.05},
    {"name": "displacement-denoise", "shrinkage": "soft"},
    {"name": "displacement-denoise", "shrinkage": "optimal"},
)


@dataclass(frozen=True)
class Case:
    """One cell of a table."""

    data: str
    group: str
    method: str
    sigma: float
    changes: tuple[str, ...]

    def config(self) -> Config:
        fixed = ("run.workers=1", "run.checkpoint_every=100000")  # a run is short: start again rather than resume
        return load_config(HERE / f"reduced-{self.data}.toml", [*self.changes, *fixed])


def fedceo(data: str, sigma: float, *, theta: bool = False, auto: bool = False) -> tuple[str, ...]:
    lam, growth = CONSTANTS[data][sigma]
    return (
        "method.name=fedceo",
        f"method.interval={INTERVALS[data][sigma]}",
        "method.lam=auto" if auto else f"method.lam={lam}",
        f"method.theta={growth if theta else 1.0}",
    )


def methods(data: str, sigma: float) -> dict[str, tuple[str, ...]]:
    return {
        "UDP-FedAvg": ("method.name=udp-fedavg",),
        "PPSGD": ("method.name=ppsgd",),
        "CENTAUR": ("method.name=centaur", "method.head_epochs=1"),
        "FedCEO theta=1": fedceo(data, sigma),
        "FedCEO theta>1": fedceo(data, sigma, theta=True),
        "FedCEO auto": fedceo(data, sigma, auto=True),
    }


def record_methods(data: str, sigma: float) -> dict[str, tuple[str, ...]]:
    lr = "method.lr=0.1"
    return {
        "no smoothing": ("method.name=fedceo", "method.interval=100000", *RECORD, lr),
        "FedCEO theta=1": (*fedceo(data, sigma), *RECORD, lr),
        "FedCEO theta>1": (*fedceo(data, sigma, theta=True), *RECORD, lr),
        "FedCEO auto": (*fedceo(data, sigma, auto=True), *RECORD, lr),
    }


def grid() -> Iterator[tuple[Case, int]]:
    """Everything, the most telling first: one seed of all tables before the next seed."""
    for seed in SEEDS:
        for data in ("emnist", "cifar10"):
            yield Case(data, "no noise", "FedAvg", 0.0, ("method.noise_multiplier=0.0",)), seed
            for sigma in SIGMAS:
                noise = f"method.noise_multiplier={sigma}"
                for name, changes in methods(data, sigma).items():
                    yield Case(data, "iid", name, sigma, (*changes, noise)), seed
                for name, changes in record_methods(data, sigma).items():
                    fewer = f"method.epochs={2 if data == 'emnist' else 1}"
                    yield Case(data, "record", name, sigma, (*changes, noise, fewer)), seed
                if data == "cifar10":
                    continue
                for name, changes in methods(data, sigma).items():
                    yield Case(data, "shards", name, sigma, (*changes, noise, *SHARDS)), seed
                momentum = 'wrap=[{name="server-momentum",momentum=0.9,lr=0.1}]'
                yield Case(data, "momentum", "UDP-FedAvg", sigma, (noise, momentum)), seed
                yield Case(data, "momentum", "FedCEO theta>1", sigma,
                           (*fedceo(data, sigma, theta=True), noise, momentum)), seed  # fmt: skip
    for sigma in SIGMAS:
        for name, changes in methods("cifar10", sigma).items():
            noise = f"method.noise_multiplier={sigma}"
            yield Case("cifar10", "shards", name, sigma, (*changes, noise, *SHARDS)), SEEDS[0]


class FollowRules(Observer):
    """Applies rules to the models of a run that is not wrapped, and scores what they would have released."""

    def __init__(self, rules: Sequence[Rule], task: Task, start: Params, test: tuple[torch.Tensor, torch.Tensor]):
        self._rules = rules
        self._task = task
        self._test = test
        self._memory = [rule.start(start) for rule in rules]
        self._released = [start for _ in rules]
        self.accuracy: dict[str, float] = {}

    def round_ends(self, end: RoundEnd) -> None:
        for i, rule in enumerate(self._rules):
            if rule.name == "displacement-denoise" and not end.last:
                continue  # it remembers nothing but the start
            done = rule.step(end.at.round, self._memory[i], self._released[i], end.model)
            self._memory[i], self._released[i] = done.memory, done.released
            if end.last:
                self.accuracy[repr(rule)] = evaluate(self._task, done.released, *self._test).accuracy


def run_case(case: Case, seed: int, results: Path) -> bool:
    """Whether the case was run here; not if it was done, or is being run elsewhere."""
    config = case.config()
    experiment = f"reduced-{case.data}"
    folder = result_folder(config, seed, experiment, results)
    if (folder / "wrappers.json").exists():
        return False
    prepared = prepare(config, seed)
    test = (prepared.dataset.test.x, prepared.dataset.test.y)
    rules = [build_rule(section) for section in FOLLOWED]
    follow = FollowRules(rules, prepared.task, prepared.task.init(seed), test)

    def observe(_plan: Plan) -> list[Observer]:
        return [follow]

    try:
        result = run_seed(config, seed, experiment=experiment, results=results, observe=observe)
    except ResultError:
        return False
    (folder / "wrappers.json").write_text(json.dumps(follow.accuracy, indent=2) + "\n")
    print(f"{case.data} {case.group} {case.method} sigma {case.sigma} seed {seed}: {result.accuracy}", flush=True)
    return True


def scores(case: Case, results: Path) -> list[dict[str, Any]]:
    """The summaries of the seeds that are done, with the wrappers' scores."""
    found = []
    for seed in SEEDS:
        folder = result_folder(case.config(), seed, f"reduced-{case.data}", results)
        if (folder / "wrappers.json").exists():
            summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
            summary["wrappers"] = json.loads((folder / "wrappers.json").read_text())
            found.append(summary)
    return found


def percent(values: Sequence[float | None]) -> str:
    """Mean and spread over seeds, in per cent."""
    known = [100 * value for value in values if value is not None]
    if not known:
        return "-"
    spread = f" ± {statistics.stdev(known):.1f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.1f}{spread}" + ("" if len(known) == len(SEEDS) else f" (n={len(known)})")


def tables(results: Path) -> str:
    """All tables in Markdown."""
    cases: dict[tuple[str, str], list[Case]] = {}
    for case, seed in grid():
        if seed == SEEDS[0]:
            cases.setdefault((case.data, case.group), []).append(case)
    lines: list[str] = []
    for (data, group), members in cases.items():
        sigmas = sorted({case.sigma for case in members})
        done = {(case.method, case.sigma): scores(case, results) for case in members}
        names = list(dict.fromkeys(case.method for case in members))
        lines += [f"### {data}, {group}", "", "| method | " + " | ".join(f"σ {s}" for s in sigmas) + " |"]
        lines += ["|---|" + "---|" * len(sigmas)]
        for name in names:
            cells = [percent([s["accuracy"] for s in done[name, sigma]]) for sigma in sigmas]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
            for label, key in (("personal, test", "test_accuracy"), ("personal, own data", "own_accuracy")):
                own = [[(s["personal"] or {}).get(key) for s in done[name, sigma]] for sigma in sigmas]
                if any(value is not None for values in own for value in values):
                    lines.append(f"| {name} ({label}) | " + " | ".join(percent(v) for v in own) + " |")
        seconds = [s["seconds"] for found in done.values() for s in found]
        if seconds:
            lines += ["", f"{len(seconds)} runs, median {statistics.median(seconds):.0f} s of rounds each."]
        lines += ["", "| method, wrapper | " + " | ".join(f"σ {s}" for s in sigmas) + " |"]
        lines += ["|---|" + "---|" * len(sigmas)]
        for name in names:
            for rule in dict.fromkeys(key for found in done.values() for s in found for key in s["wrappers"]):
                cells = [percent([s["wrappers"].get(rule) for s in done[name, sigma]]) for sigma in sigmas]
                lines.append(f"| {name}, {rule} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("action", choices=("run", "tables"))
    parser.add_argument("--results", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    if arguments.action == "tables":
        print(tables(arguments.results))
        return
    torch.set_num_threads(1)
    for case, seed in grid():
        run_case(case, seed, arguments.results)


if __name__ == "__main__":
    main()
