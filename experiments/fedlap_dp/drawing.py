"""FedLAP-DP's figures for the pages: the walk on a synthetic set with its radius, and pixel values over rounds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fedveil.figures.fedlap import Sets
from fedveil.figures.figure import INKS, LINES, new_figure
from fedveil.training.surrogate import PADDING, Path


def pixels(sets: Sets) -> Tensor:
    """The values of all pixels of a round's images, without the padding."""
    return sets.images[sets.labels != PADDING].flatten()


def pixels_figure(rounds: Mapping[int, Sets], bins: int = 80) -> Figure:
    """The distribution of pixel values, one line per round."""
    figure = new_figure()
    axes = figure.add_subplot()
    limit = max(float(torch.quantile(_thinned(pixels(sets)).abs(), 0.999)) for sets in rounds.values())
    edges = np.linspace(-limit, limit, bins + 1)
    for number, (round_, sets) in enumerate(rounds.items()):
        counts, _ = np.histogram(pixels(sets).double().numpy(), bins=edges, density=True)
        axes.plot(
            (edges[1:] + edges[:-1]) / 2,
            counts,
            linestyle=LINES[number % len(LINES)],
            color=INKS[number % len(INKS)],
            linewidth=1.6,
            label=f"round {round_}",
        )
    axes.set_xlabel("pixel value (normalised)")
    axes.set_ylabel("density")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _thinned(values: Tensor, most: int = 100_000) -> Tensor:
    """At most `most` of the values, evenly spread: quantiles of more are refused by torch."""
    return values[:: max(1, -(-len(values) // most))].double()


def path_figure(path: Path, radius: float, client: int = 0) -> Figure:
    """Real and synthetic loss of one client against the distance walked, with its r_k."""
    figure = new_figure()
    axes = figure.add_subplot()
    distance = path.distance[:, client].numpy()
    for number, (label, loss) in enumerate((("real data", path.real), ("synthetic images", path.synthetic))):
        axes.plot(
            distance,
            loss[:, client].numpy(),
            linestyle=LINES[number],
            color=INKS[number],
            linewidth=1.8,
            label=label,
        )
    found = float(path.radii(radius)[client])
    axes.axvline(found, color="#555555", linewidth=1.0)
    axes.annotate(
        f"$r_k$ = {found:.2f}", (found, axes.get_ylim()[1]), xytext=(4, -12), textcoords="offset points"
    )
    axes.set_xlabel("distance from the start of the round (L2)")
    axes.set_ylabel(f"loss of client {client}")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
