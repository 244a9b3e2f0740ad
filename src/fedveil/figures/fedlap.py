"""FedLAP-DP's figures: what the synthetic images look like, and how far they can be trusted.

Figure 2: real and synthetic loss along the walk on the synthetic set, with r_k marked. Figure 11: the pixel values of
all images over rounds. Figures 12 and 13: images of each class over rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fedveil.errors import InputError
from fedveil.figures.figure import INKS, LINES, new_figure
from fedveil.training.surrogate import PADDING, Path
from fedveil.tree import Params

_MOST_CLASSES, _MOST_OF_A_CLASS = 10, 4


@dataclass(frozen=True)
class Sets:
    """The synthetic sets of one round, `[K, n, ...]` and `[K, n]`, and the model `[1, ...]` they were made for."""

    images: Tensor
    labels: Tensor
    model: Params

    def of_class(self, label: int) -> Tensor:
        """The images of one class, of all clients."""
        return self.images[self.labels == label]

    def pixels(self) -> Tensor:
        return self.images[self.labels != PADDING].flatten()


def _some(rounds: Mapping[int, Sets]) -> None:
    if not rounds:
        raise InputError("rounds", [], "no round was kept", "Watch at least one round that took place.")


def images_figure(
    rounds: Mapping[int, Sets],
    classes: Sequence[int],
    names: Sequence[str],
    *,
    columns: int = 4,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
) -> Figure:
    """A row per class, a block of `columns` images per round; pixels brought back to [0, 1] and cut there.

    `mean` and `std` are those of the normalisation, per channel or one for all.
    """
    _some(rounds)
    shift, stretch = (torch.tensor(values)[:, None, None] for values in (mean, std))
    figure = new_figure(1.0 + 0.62 * columns * len(rounds), 0.4 + 0.62 * len(classes))
    blocks = figure.subfigures(1, len(rounds), squeeze=False)[0]
    for number, (block, (round_, sets)) in enumerate(zip(blocks, rounds.items(), strict=True)):
        block.suptitle(f"round {round_}", fontsize=9)
        grid = block.subplots(len(classes), columns, squeeze=False)
        for row, label in zip(grid, classes, strict=True):
            found = sets.of_class(label)
            for place, axes in enumerate(row):
                axes.set_xticks([])
                axes.set_yticks([])
                if place < len(found):
                    seen = (found[place] * stretch + shift).clamp(0, 1)
                    picture = seen.permute(1, 2, 0).float().numpy()
                    axes.imshow(picture, cmap="gray", vmin=0, vmax=1)
                else:
                    axes.set_visible(False)
            if number == 0:
                row[0].set_ylabel(names[label], fontsize=8, rotation=0, ha="right", va="center")
    return figure


def some_images_figure(
    round: int, sets: Sets, names: Sequence[str], *, mean: Sequence[float], std: Sequence[float]
) -> Figure | None:
    """A few images of the first classes that a round's sets hold; None where they hold no image."""
    shown = sorted(set(sets.labels[sets.labels != PADDING].tolist()))[:_MOST_CLASSES]
    if not shown:
        return None
    columns = min(_MOST_OF_A_CLASS, max(len(sets.of_class(label)) for label in shown))
    return images_figure({round: sets}, shown, names, columns=columns, mean=mean, std=std)


def pixels_figure(rounds: Mapping[int, Sets], bins: int = 80) -> Figure:
    """The distribution of pixel values, one line per round."""
    _some(rounds)
    figure = new_figure()
    axes = figure.add_subplot()
    limit = max(float(torch.quantile(_thinned(sets.pixels()).abs(), 0.999)) for sets in rounds.values())
    edges = np.linspace(-limit, limit, bins + 1)
    for number, (round_, sets) in enumerate(rounds.items()):
        counts, _ = np.histogram(sets.pixels().double().numpy(), bins=edges, density=True)
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
