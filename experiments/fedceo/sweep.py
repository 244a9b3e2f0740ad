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

from fedveil.errors import ResultError
from fedveil.evaluation.accuracy import evaluate
from fedveil.experiment.config import Config, build_rule, load_config
from fedveil.experiment.prepare import prepare, result_folder
from fedveil.experiment.run import run_seed
from fedveil.methods.wrappers import Rule
from fedveil.privacy.releases import Plan
from fedveil.session.loop import Callback, RoundEnd
from fedveil.task import Task
from fedveil.tree import Params

HERE = Path(__file__).parent
SIGMAS = (1.0, 1.5, 2.0)
SEEDS = (0, 1, 2)
# lambda and theta of the paper's appendix C.1; it has none of its own for Table 5.
_CIFAR = {1.0: (85.0, 1.03), 1.5: (10.0, 1.07), 2.0: (0.6, 1.04)}
CONSTANTS = {
    "emnist": {1.0: (70.0, 1.08), 1.5: (0.5, 1.04), 2.0: (0.03, 1.06)},
    "cifar10-mlp": _CIFAR,
    "cifar10": _CIFAR,
}
# Intervals shrink with the rounds, so that a run smooths as often as the paper's; LeNet-5's smooths twice.
INTERVALS = {
    "emnist": {1.0: 6, 1.5: 4, 2.0: 4},
    "cifar10-mlp": {1.0: 2, 1.5: 2, 2.0: 2},
    "cifar10": {1.0: 5, 1.5: 5, 2.0: 5},
}
SHARDS = ("partition.kind=shards", "partition.shards_per_client=2")
# The authors' code: DP-SGD with momentum inside the clients.
RECORD = {
    "emnist": ("method.unit=record", "method.momentum=0.5", "method.server_lr=1.0", "method.epochs=2"),
    "cifar10": (
        "method.unit=record",
        "method.momentum=0.5",
        "method.server_lr=1.0",
        "method.lr=0.1",
        "method.clip=1.0",
        "method.batch_size=32",
        "partition.clients=100",
        "task.data_options={max_train=10000,max_test=1000}",
        "run.rounds=15",
        "run.evaluate_every=5",
    ),
}
_DENOISING: tuple[dict[str, Any], ...] = (
    {"name": "displacement-denoise", "shrinkage": "soft"},
    {"name": "displacement-denoise", "shrinkage": "optimal"},
)
_LONG: tuple[dict[str, Any], ...] = ({"name": "model-average"}, {"name": "low-pass"})
_SHORT: tuple[dict[str, Any], ...] = (
    {"name": "model-average", "decay": 0.8},
    {"name": "low-pass", "cutoff": 0.2},
)
# Filters that remember about a third of the run.
FOLLOWED = {
    "emnist": (*_LONG, *_DENOISING),
    "cifar10-mlp": (*_LONG, *_SHORT, *_DENOISING),
    "cifar10": (*_SHORT, *_DENOISING),
}
_SLOW = 'wrap=[{name="server-momentum",momentum=0.9,lr=0.1}]'
MOMENTUM = {
    "emnist": _SLOW,
    "cifar10-mlp": _SLOW,
    "cifar10": 'wrap=[{name="server-momentum",momentum=0.5,lr=0.5}]',
}
HEAD_EPOCHS = {"emnist": 1, "cifar10-mlp": 3, "cifar10": 3}


@dataclass(frozen=True)
class Case:
    """One cell of a table."""

    data: str
    group: str
    method: str
    sigma: float
    changes: tuple[str, ...]

    def config(self) -> Config:
        fixed = (
            "run.workers=1",
            "run.checkpoint_every=100000",
        )  # a run is short: start again rather than resume
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
        "CENTAUR": ("method.name=centaur", f"method.head_epochs={HEAD_EPOCHS[data]}"),
        "FedCEO theta=1": fedceo(data, sigma),
        "FedCEO theta>1": fedceo(data, sigma, theta=True),
        "FedCEO auto": fedceo(data, sigma, auto=True),
    }


def record_methods(data: str, sigma: float) -> dict[str, tuple[str, ...]]:
    smoothed = {
        "FedCEO theta>1": fedceo(data, sigma, theta=True),
        "FedCEO auto": fedceo(data, sigma, auto=True),
    }
    plain = {"no smoothing": ("method.name=fedceo", "method.interval=100000")}
    return {name: (*changes, *RECORD[data]) for name, changes in (plain | smoothed).items()}


def variants(sigma: float = 1.0) -> dict[str, tuple[str, ...]]:
    """What else could make smoothing help: lambda, eta, local epochs, layers, interval."""
    plain, smoothed = ("method.name=udp-fedavg",), fedceo("emnist", sigma, theta=True)
    found = {f"FedCEO lambda={lam:g}": (*smoothed, f"method.lam={lam}") for lam in (7.0, 0.7, 0.2, 0.07)}
    found |= {f"FedCEO I={i}": (*smoothed, f"method.interval={i}") for i in (3, 4, 5, 7)}
    for step in (1.0, 0.3, 0.03):
        found[f"UDP-FedAvg server_lr={step}"] = (*plain, f"method.server_lr={step}")
        found[f"FedCEO server_lr={step}"] = (*smoothed, f"method.server_lr={step}")
    found["UDP-FedAvg E=10"] = (*plain, "method.epochs=10")
    found["FedCEO E=10"] = (*smoothed, "method.epochs=10")
    found["FedCEO lambda=0.2, last layer"] = (*smoothed, "method.lam=0.2", "method.layers=last:1")
    found["FedCEO auto, last layer"] = (*smoothed, "method.lam=auto", "method.layers=last:1")
    return found


def table(data: str, group: str, seed: int) -> Iterator[tuple[Case, int]]:
    """One seed of one table."""
    if group == "no noise":
        bare = ("method.noise_multiplier=0.0",)
        yield Case(data, group, "FedAvg", 0.0, bare), seed
        yield Case(data, group, "FedAvg, two shards", 0.0, (*SHARDS, *bare)), seed
        if data in RECORD:
            record = record_methods(data, 1.0)["no smoothing"]
            yield Case(data, group, "FedAvg, as in the record table", 0.0, (*record, *bare)), seed
        return
    for sigma in (1.0,) if group == "variants" else SIGMAS:
        rows = record_methods(data, sigma) if group == "record" else methods(data, sigma)
        if group == "momentum":
            rows = {"UDP-FedAvg": (MOMENTUM[data],)}
        if group == "mean only":
            rows = {
                "FedCEO theta>1, personal=false": (*fedceo(data, sigma, theta=True), "method.personal=false")
            }
        if group == "variants":
            rows = variants(sigma)
        for name, changes in rows.items():
            noise = f"method.noise_multiplier={sigma}"
            yield (
                Case(data, group, name, sigma, (*changes, noise, *(SHARDS if group == "shards" else ()))),
                seed,
            )


def grid() -> Iterator[tuple[Case, int]]:
    """Everything, the most telling first."""
    for seed in SEEDS:
        for group in ("no noise", "iid", "shards", "momentum", "record"):
            yield from table("emnist", group, seed)
    yield from table("emnist", "variants", SEEDS[0])
    for seed in SEEDS:
        yield from table("emnist", "mean only", seed)
    for data in ("cifar10-mlp", "cifar10"):
        for seed in SEEDS:
            for group in ("no noise", "iid", "shards", "momentum"):
                yield from table(data, group, seed)
    for seed in SEEDS:
        yield from table("cifar10", "record", seed)
    for seed in SEEDS[1:]:
        yield from table("emnist", "variants", seed)


class FollowRules(Callback):
    """Applies rules to the models of a run that is not wrapped, and scores what they would have released."""

    def __init__(
        self, rules: Sequence[Rule], task: Task, start: Params, test: tuple[torch.Tensor, torch.Tensor]
    ):
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
    if (folder / "summary.json").exists():
        return False
    prepared = prepare(config, seed)
    test = (prepared.dataset.test.x, prepared.dataset.test.y)
    rules = [rule for rule in map(build_rule, FOLLOWED[case.data]) if isinstance(rule, Rule)]
    follow = FollowRules(rules, prepared.task, prepared.task.init(seed), test)

    def callbacks_for(_plan: Plan) -> list[Callback]:
        return [follow]

    try:
        result = run_seed(config, seed, experiment=experiment, results=results, callbacks_for=callbacks_for)
    except ResultError:
        return False
    if not follow.accuracy:  # another process finished it in the meantime
        return False
    (folder / "wrappers.json").write_text(json.dumps(follow.accuracy, indent=2) + "\n")
    print(
        f"{case.data} {case.group} {case.method} sigma {case.sigma} seed {seed}: {result.accuracy}",
        flush=True,
    )
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
    return f"{statistics.fmean(known):.1f}{spread}" + (
        "" if len(known) == len(SEEDS) else f" (n={len(known)})"
    )


def tables(results: Path) -> str:
    """All tables in Markdown: the methods, then what each wrapper would have released in their place."""
    cases: dict[tuple[str, str], dict[str, list[Case]]] = {}
    for case, seed in grid():
        if seed == SEEDS[0]:
            cases.setdefault((case.data, case.group), {}).setdefault(case.method, []).append(case)
    lines: list[str] = []
    for (data, group), members in cases.items():
        sigmas = [case.sigma for case in next(iter(members.values()))]
        done = {name: [scores(case, results) for case in row] for name, row in members.items()}
        lines += [f"### {data}, {group}", "", *_head("method", sigmas)]
        for name, cells in done.items():
            lines.append(_row(name, [[s["accuracy"] for s in found] for found in cells]))
            for label, key in (("personal, test", "test_accuracy"), ("personal, own data", "own_accuracy")):
                own = [[s["personal"][key] for s in found if s["personal"]] for found in cells]
                if any(own):
                    lines.append(_row(f"{name} ({label})", own))
        seconds = [s["seconds"] for cells in done.values() for found in cells for s in found]
        if not seconds:
            continue
        lines += ["", f"{len(seconds)} runs, median {statistics.median(seconds):.0f} s of rounds each.", ""]
        lines += _head("method, wrapper", sigmas)
        labels = {repr(build_rule(s)): " ".join(map(str, s.values())) for s in FOLLOWED[data]}
        for name, cells in done.items():
            for rule, label in labels.items():
                wrapped = [[s["wrappers"].get(rule) for s in found] for found in cells]
                lines.append(_row(f"{name}, {label}", wrapped))
        lines.append("")
    return "\n".join(lines)


def _head(first: str, sigmas: Sequence[float]) -> list[str]:
    return [_line([first, *(f"sigma {s}" for s in sigmas)]), _line(["---"] * (1 + len(sigmas)))]


def _row(name: str, cells: Sequence[Sequence[float | None]]) -> str:
    return _line([name, *(percent(values) for values in cells)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("action", choices=("run", "tables"))
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--data", choices=tuple(FOLLOWED), nargs="+", default=list(FOLLOWED))
    parser.add_argument(
        "--groups", nargs="+", help="only these tables: 'no noise', iid, shards, momentum, ..."
    )
    arguments = parser.parse_args()
    if arguments.action == "tables":
        print(tables(arguments.results))
        return
    torch.set_num_threads(1)
    for case, seed in grid():
        if case.data in arguments.data and (arguments.groups is None or case.group in arguments.groups):
            run_case(case, seed, arguments.results)


if __name__ == "__main__":
    main()
