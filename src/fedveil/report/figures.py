"""Figures for papers in the project's style: with units and seeds, readable in greyscale, as PNG or vector graphics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from fedveil.figures.figure import in_style, new_figure, save_figure
from fedveil.figures.style import matplotlib_line
from fedveil.partition.picture import counts_figure
from fedveil.privacy.releases import Adversary, Unit
from fedveil.report.groups import WHO, Setting, scored, shared_measure
from fedveil.report.measures import Measure
from fedveil.report.scales import logarithmic, short


@in_style
def epsilon_figure(
    curves: Mapping[tuple[Unit, Adversary], Sequence[tuple[int, float | None]]], delta: float
) -> Figure:
    """Proven epsilon after each number of rounds, one line per adversary; log scale."""
    figure = new_figure()
    axes = figure.add_subplot()
    drawn = 0
    for (unit, adversary), points in curves.items():
        known = [(t, value) for t, value in points if value is not None]
        if not known:
            continue
        axes.plot(
            [t for t, _ in known],
            [value for _, value in known],
            label=f"{adversary} ({unit} level)",
            **(matplotlib_line(drawn) | {"marker": ""}),
        )
        drawn += 1
    if drawn:
        axes.set_yscale("log")
        axes.legend()
    else:
        axes.text(0.5, 0.5, "nothing is proven", ha="center", va="center", transform=axes.transAxes)
    axes.set_xlabel("rounds")
    axes.set_ylabel(f"proven ε at δ = {delta:g}")
    return figure


@in_style
def accuracy_figure(settings: Sequence[Setting], *, against: str = "round") -> Figure:
    """The score over rounds, or over megabytes sent with `against="bytes"`; bands span the seeds."""
    figure, measure = new_figure(), shared_measure(settings)
    axes = figure.add_subplot()
    factor = 1e-6 if against == "bytes" else 1.0
    for setting in settings:
        x, mean, low, high = setting.curve(against, measure.key)
        if not x:
            continue
        places = [factor * value for value in x]
        line = matplotlib_line(setting.look)
        axes.fill_between(
            places,
            [measure.factor * v for v in low],
            [measure.factor * v for v in high],
            color=line["color"],
            alpha=0.15,
            lw=0,
        )
        every = max(1, len(x) // 6)
        axes.plot(
            places, [measure.factor * v for v in mean], label=_with_seeds(setting), markevery=every, **line
        )
    if against != "bytes":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("MB sent, up and down, all clients" if against == "bytes" else "round")
    _score_axis(axes, measure)
    _legend(figure)
    return figure


@in_style
def tradeoff_figure(settings: Sequence[Setting], adversary: Adversary) -> Figure:
    """The score against the epsilon proven against this adversary; bars are one deviation over seeds."""
    figure, measure = new_figure(), shared_measure(settings)
    axes = figure.add_subplot()
    for setting in scored(settings):
        proof, spread = setting.proof(adversary), setting.score
        assert spread is not None
        line = matplotlib_line(setting.look) | {"markersize": 6, "linestyle": "none"}
        if proof is None or proof.epsilon is None:
            axes.axhline(
                measure.factor * spread.mean,
                label=f"{_with_seeds(setting)}: nothing proven",
                color=line["color"],
                linestyle=matplotlib_line(setting.look)["linestyle"],
            )
            continue
        axes.errorbar(
            [proof.epsilon],
            [measure.factor * spread.mean],
            yerr=[measure.factor * spread.deviation] if spread.deviation else None,
            capsize=3,
            label=f"{_with_seeds(setting)}: {proof.unit} level",
            **line,
        )
    proven = [proof.epsilon for s in settings if (proof := s.proof(adversary)) and proof.epsilon]
    decades = logarithmic([*proven, 1.0, 10.0], 0, 1)
    axes.set_xscale("log")
    axes.set_xlim(decades.low, decades.high)
    axes.set_xticks(decades.ticks, [short(tick) for tick in decades.ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"proven ε against {WHO[adversary]}")
    _score_axis(axes, measure)
    _legend(figure)
    return figure


def save_figures(settings: Sequence[Setting], folder: Path) -> list[Path]:
    """Write the report's figures as PDF files to this folder; figures without data are left out."""
    figures: dict[str, Figure] = {}
    if any(setting.curve("round", shared_measure(settings).key)[0] for setting in settings):
        figures["accuracy"] = accuracy_figure(settings)
        figures["traffic"] = accuracy_figure(settings, against="bytes")
    adversaries: tuple[Adversary, ...] = ("observer", "server")
    for adversary in adversaries:
        if any(s.proof(adversary) is not None for s in scored(settings)):
            figures[f"trade-off-{adversary}"] = tradeoff_figure(settings, adversary)
    shared = next((s.first for s in settings if s.first.partition and s.first.partition[0]), None)
    if shared is not None:
        counts = torch.tensor(shared.partition)
        names = shared.classes if len(shared.classes) == counts.shape[1] else None
        figures["partition"] = counts_figure(counts, names)
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.pdf")
        save_figure(figure, paths[-1])
    return paths


def _score_axis(axes: Axes, measure: Measure) -> None:
    """Named, and ending where scores can end."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(measure.factor * measure.span[0], low), min(measure.factor * measure.span[1], high))
    axes.set_ylabel(measure.axis)


def _with_seeds(setting: Setting) -> str:
    count = len(setting.runs)
    return f"{setting.name} ({count} seeds)" if count > 1 else f"{setting.name} (seed {setting.runs[0].seed})"


def _legend(figure: Figure) -> None:
    """A legend below the axes, where it covers no data."""
    axes = figure.axes[0]
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        plain = [label.replace("$", r"\$") for label in labels]  # a name is not mathematics
        figure.legend(handles, plain, loc="outside lower left", ncols=1 if max(map(len, labels)) > 40 else 2)
