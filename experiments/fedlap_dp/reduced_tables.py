"""Tables and figures of the runs that reduced.py has finished, beside the paper's numbers.

python experiments/fedlap_dp/reduced_tables.py --results results/fedlap-reduced [--out docs/figures]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from fedveil.figures.figure import new_figure, save_figure
from fedveil.figures.style import matplotlib_line

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import generate as paper  # noqa: E402
from reduced import TABLE_1, TABLE_2  # noqa: E402

# A method looks the same in every figure.
DRAWN = list(dict.fromkeys([*TABLE_1, "fedlap-dp", "dp-fedavg", "dp-fedprox", *TABLE_2]))


@dataclass(frozen=True)
class Seed:
    """One finished run: its rounds and its summary."""

    rounds: list[dict[str, Any]]
    summary: dict[str, Any]


def seeds_of(results: Path, dataset: str, method: str) -> list[Seed]:
    """The finished runs, by seed."""
    found = []
    for path in sorted((results / f"{dataset}-{method}").glob("*/seed-*/summary.json")):
        lines = (path.parent / "rounds.jsonl").read_text().splitlines()
        found.append(Seed([json.loads(line) for line in lines], json.loads(path.read_text())))
    return found


def percent(values: Sequence[float]) -> str:
    """Mean and standard deviation over the seeds, in per cent."""
    if not values:
        return "-"
    mean = 100 * statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.1f} (one seed)"
    return f"{mean:.1f} ± {100 * statistics.stdev(values):.1f}"


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def head(*cells: str) -> None:
    row(*cells)
    row(*("---" for _ in cells))


def after(runs: Sequence[Seed], number: int | None = None) -> list[float]:
    """Accuracies after this round, or at the end, of the runs that went so far."""
    at = [run.rounds if number is None else run.rounds[:number] for run in runs]
    return [rounds[-1]["accuracy"] for rounds in at if number is None or len(rounds) == number]


def traffic(runs: Sequence[Seed]) -> str:
    """Bytes that a client sends in a round, relative to the model, as the paper counts."""
    if not runs:
        return "-"
    facts = runs[0].summary
    up = facts["bytes_up"] / facts["rounds"] / facts["plan"]["clients"]
    return f"{up / (4 * facts['parameters']):.2f}x"


def open_table(results: Path) -> None:
    print("\nTable 1, without privacy (per cent)\n")
    columns = [f"{data}{what}" for data in paper.DATASETS for what in ("", ", paper")]
    head("method", *columns, "sent per round, MNIST")
    for method in TABLE_1:
        cells = []
        for data, published in zip(paper.DATASETS, paper.TABLE_1[method], strict=True):
            cells += [percent(after(seeds_of(results, data, method))), f"{published:.2f}"]
        row(paper.NAMES[method], *cells, traffic(seeds_of(results, "mnist", method)))


def private_table(results: Path) -> None:
    print("\nTable 2, private (per cent)\n")
    head("method", "rounds", "epsilon", *(f"{d}{w}" for d in paper.DATASETS for w in ("", ", paper")))
    for number in (1, 15):
        for method in TABLE_2:
            if (method, number) not in paper.TABLE_2:
                continue
            cells, spent = [], "-"
            for data, published in zip(paper.DATASETS, paper.TABLE_2[method, number], strict=True):
                runs = seeds_of(results, data, method)
                cells += [percent(after(runs, number)), f"{published:.2f}"]
                if after(runs, number):
                    spent = f"{runs[0].rounds[number - 1]['epsilon']:.2f}"
            row(paper.NAMES[method], number, spent, *cells)


def other_tables(results: Path) -> None:
    print("\nTable 3, radius strategies on CIFAR-10 (per cent)\n")
    head("strategy", "here", "paper")
    for name, published in paper.TABLE_3.items():
        method = "fedlap" if name == "min" else f"fedlap-{name}"
        row(name, percent(after(seeds_of(results, "cifar10", method))), f"{published:.2f}")
    print("\nTable 4, DP-FedAvg with a fiftieth of the learning rate (per cent)\n")
    head("rounds", *(f"{d}{w}" for d in paper.DATASETS for w in ("", ", paper")))
    for number, values in paper.TABLE_4.items():
        cells = []
        for data, published in zip(paper.DATASETS, values, strict=True):
            cells += [percent(after(seeds_of(results, data, "dp-fedavg-low"), number)), f"{published:.2f}"]
        row(number, *cells)
    print("\nFigure 5, images per class on CIFAR-10 (per cent)\n")
    head("images per class", "here")
    for ipc in (2, 5, 10, 20):
        method = "fedlap" if ipc == 10 else f"fedlap-ipc-{ipc}"
        row(ipc, percent(after(seeds_of(results, "cifar10", method))))


def curve(axes: Axes, runs: Sequence[Seed], method: str, x: Callable[[Seed, int], float]) -> None:
    """Mean accuracy of the seeds, with a band from the lowest to the highest."""
    count = min(len(run.rounds) for run in runs)
    scores = [[100 * run.rounds[t]["accuracy"] for run in runs] for t in range(count)]
    at = [x(runs[0], t) for t in range(count)]
    line = matplotlib_line(DRAWN.index(method)) | ({} if count > 1 else {"linestyle": "none"})
    low, high = [min(v) for v in scores], [max(v) for v in scores]
    axes.fill_between(at, low, high, color=line["color"], alpha=0.15, lw=0)
    axes.plot(at, [statistics.fmean(v) for v in scores], label=paper.NAMES[method], **line)


def draw(
    results: Path, path: Path, methods: Sequence[str], label: str, x: Callable[[Seed, int], float], log: bool
) -> None:
    """One panel per dataset, one line per method."""
    figure = new_figure(10.0, 3.8)
    panels = figure.subplots(1, len(paper.DATASETS), sharey=True)
    for axes, data in zip(panels, paper.DATASETS, strict=True):
        count = 0
        for method in methods:
            if runs := seeds_of(results, data, method):
                curve(axes, runs, method, x)
                count = max(count, len(runs))
        axes.set_title(f"{data}, {count} seed{'s' if count != 1 else ''}", loc="left", fontsize=10)
        axes.set_xlabel(label)
        if log:
            axes.set_xscale("log")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("test accuracy (%)")
    handles = {}
    for axes in panels:
        handles.update(dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)))
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=6, frameon=False)
    save_figure(figure, path)


def megabytes(run: Seed, t: int) -> float:
    sent: float = sum(line["bytes_up"] + line["bytes_down"] for line in run.rounds[: t + 1])
    return sent / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    open_table(chosen.results)
    private_table(chosen.results)
    other_tables(chosen.results)
    if chosen.out is None:
        return
    every, private = [*TABLE_1, "fedlap-dp", "dp-fedavg", "dp-fedprox"], list(TABLE_2)
    name = chosen.out / "fedlap-reduced"
    draw(chosen.results, Path(f"{name}-rounds.png"), every, "round", lambda _, t: t + 1.0, False)
    draw(chosen.results, Path(f"{name}-bytes.png"), every, "MB sent, up and down", megabytes, True)
    draw(
        chosen.results,
        Path(f"{name}-epsilon.png"),
        private,
        "epsilon (record level, delta 1e-5)",
        lambda run, t: float(run.rounds[t]["epsilon"]),
        False,
    )


if __name__ == "__main__":
    main()
