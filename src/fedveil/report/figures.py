"""Figures in one style: labelled with units, readable in grey, PNG or vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fedveil.errors import InputError
from fedveil.privacy.releases import Adversary, Unit

LINES = ("-", "--", ":", "-.")
INKS = ("#1b3a5c", "#b4532a", "#4d7c4f", "#6b5b95")


def new_figure(width: float = 6.0, height: float = 3.8) -> Figure:
    """A figure without global state."""
    return Figure(figsize=(width, height), layout="constrained")


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
            linestyle=LINES[drawn % len(LINES)],
            color=INKS[drawn % len(INKS)],
            linewidth=1.8,
            label=f"{adversary} ({unit} level)",
        )
        drawn += 1
    if drawn:
        axes.set_yscale("log")
        axes.legend(frameon=False)
    else:
        axes.text(0.5, 0.5, "nothing is proven", ha="center", va="center", transform=axes.transAxes)
    axes.set_xlabel("rounds")
    axes.set_ylabel(f"proven ε at δ = {delta:g}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure as the path's ending says."""
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise InputError("path", str(path), "no such kind of picture", "Use .png, .pdf or .svg.")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
