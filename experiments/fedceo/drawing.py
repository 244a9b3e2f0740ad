"""FedCEO's figures for the pages: smoothing and accuracy, attacks on smoothed models, accuracy against a setting."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from fedveil.errors import InputError
from fedveil.figures.fedceo import draw_roughness
from fedveil.figures.figure import INKS, LINES, new_figure
from fedveil.task import Task
from fedveil.tree import Params

_MARKS = ("o", "s", "^", "D", "v", "P", "X")


def class_accuracy(task: Task, stack: Params, x: Tensor, y: Tensor, label: int) -> list[float]:
    """Each client's accuracy on the examples of one class."""
    chosen = x[y == label]
    if not len(chosen):
        raise InputError("label", label, "no example has it", "Use a class of the test examples.")
    found = []
    for k in range(len(next(iter(stack.values())))):
        with torch.no_grad():
            scores = task.outputs(
                {name: leaf[k : k + 1] for name, leaf in stack.items()}, chosen.unsqueeze(0)
            )
        found.append(float((scores[0].argmax(-1) == label).double().mean()))
    return found


def smoothness_and_accuracy_figure(
    before: Tensor, after: Tensor, accuracy: tuple[Sequence[float], Sequence[float]], *, label: str
) -> Figure:
    """Figure 1: roughness of the last layers, and below it each client's accuracy on the class `label`."""
    figure = new_figure(7.2, 5.4)
    maps, bars = figure.subplots(2, 2, height_ratios=[2.2, 1.0])
    _accuracy_bars(bars, accuracy, label)
    draw_roughness(figure, maps, before, after)
    return figure


def _accuracy_bars(bars: Sequence[Axes], accuracy: Sequence[Sequence[float]], label: str) -> None:
    for below, scores in zip(bars, accuracy, strict=True):
        below.bar(range(len(scores)), [100 * score for score in scores], color=INKS[0], width=0.7)
        mean = 100 * statistics.fmean(scores)
        below.axhline(mean, color=INKS[1], linestyle="--", linewidth=1.2)
        below.set_title(f"mean {mean:.0f} %, worst {100 * min(scores):.0f} %", loc="right", fontsize=8)
        below.set_ylim(0, 100)
        below.set_xticks(range(len(scores)))
        below.set_xlabel("client (slot)")
        below.set_ylabel(f"accuracy on\nclass {label} (%)")
        below.spines[["top", "right"]].set_visible(False)


def accuracy_figure(
    scores: Mapping[str, Mapping[float, Sequence[float]]],
    *,
    x: str,
    published: Mapping[str, Mapping[float, float]] | None = None,
) -> Figure:
    """Accuracy (mean and spread over seeds) against `x`, one line per method; published values beside them.

    `scores[method][value]` are the seeds' accuracies as fractions, `published` alike with one value each.
    """
    known = {name: {at: values for at, values in points.items() if values} for name, points in scores.items()}
    if not any(known.values()):
        raise InputError("scores", dict(scores), "there is nothing to draw", "Finish some runs first.")
    figure = new_figure(8.4 if published else 5.2, 3.8)
    ours = figure.add_subplot(1, 2 if published else 1, 1)
    lines: dict[str, dict[float, Sequence[float]]] = {
        name: points for name, points in known.items() if points
    }
    _lines(ours, lines)
    ours.set_ylabel("test accuracy (%)")
    ours.set_xlabel(x)
    ours.set_title("here" if published else "", loc="left", fontsize=10)
    if published:
        paper = figure.add_subplot(1, 2, 2, sharey=ours)
        _lines(paper, {name: {at: [value] for at, value in row.items()} for name, row in published.items()})
        paper.set_xlabel(x)
        paper.set_title("published", loc="left", fontsize=10)
    ours.set_ylim(0, 1.12 * ours.get_ylim()[1])
    ours.legend(frameon=False, fontsize=8, loc="best")
    return figure


def _lines(axes: Axes, scores: Mapping[str, Mapping[float, Sequence[float]]]) -> None:
    for i, (name, points) in enumerate(scores.items()):
        at = sorted(points)
        means = [100 * statistics.fmean(points[value]) for value in at]
        spread = [100 * statistics.stdev(points[v]) if len(points[v]) > 1 else 0.0 for v in at]
        axes.errorbar(
            at,
            means,
            yerr=spread if any(spread) else None,
            label=name,
            color=INKS[i % len(INKS)],
            linestyle=LINES[i % len(LINES)],
            marker=_MARKS[i % len(_MARKS)],
            markersize=5,
            linewidth=1.6,
            capsize=3,
        )
    axes.set_xticks(sorted({value for points in scores.values() for value in points}))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def leakage_figure(pictures: Mapping[str, Tensor], psnr: Mapping[str, Sequence[float]]) -> Figure:
    """Figure 3: a row of images `[n, C, H, W]` in brightness for each name, with its mean PSNR where there is one."""
    count = len(next(iter(pictures.values())))
    figure = Figure(figsize=(2.6 + 0.8 * count, 0.85 * len(pictures)), dpi=150)
    grid = figure.add_gridspec(
        len(pictures), count, left=2.5 / (2.6 + 0.8 * count), right=0.99, top=0.99, bottom=0.01
    )
    for row, (name, images) in enumerate(pictures.items()):
        for column, image in enumerate(images):
            axes = figure.add_subplot(grid[row, column])
            axes.imshow(image.clamp(0, 1).permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=1)
            axes.set_xticks([])
            axes.set_yticks([])
            if column == 0:
                scored = f"\n{statistics.fmean(psnr[name]):.1f} dB" if name in psnr else ""
                axes.set_ylabel(name + scored, rotation=0, ha="right", va="center", fontsize=8, color=INKS[0])
    return figure
